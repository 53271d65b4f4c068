"""``push_lamport`` with roles for warps, for Hopper: see ``reduction.specialized_words``.

The interpreter does not run Gluon: there, and for the happens-before checker, this variant is
``push_lamport``, the same protocol.
"""

from __future__ import annotations

from functools import partial

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taxfree_kernels.device import packets
from taxfree_kernels.device.peers import Peers, translate
from taxfree_kernels.device.specialized import make_boxes
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import owner_of_tile, swizzle2d, tiles_of_shards
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.matmul_reduce_scatter.push_lamport import MOST_POLLED, PushLamport
from taxfree_kernels.reduction import specialized_words as roles
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan


@gluon.jit
def _reduce(
    boxes, books, place, tile_n, is_last_row, stride_w, out_ptr, buffers, rank, m, n, k, shard_rows,
    shard,
    GROUP: gl.constexpr, TILE: gl.constexpr, SCATTER_DIM: gl.constexpr, LANES: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply, and exchange words as ``push_lamport`` does.

    Addresses do not depend on the product, and are found before the loop.
    """
    gdc_wait(GROUP)
    ELEMENT: gl.constexpr = out_ptr.dtype.element_ty
    WIDTH: gl.constexpr = TILE.BLOCK_N // 2  # words of a tile's row
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = roles.words_layout(TILE.BLOCK_N, TILE.SWAP_AB, WARPS)
    POLLED: gl.constexpr = roles.polled_layout(triton.next_power_of_2(GROUP.WORLD), WARPS)
    ADDED: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    unknown = Peers(buffers.control_ptr, buffers.heap_bases, rank, None)
    owner_tiles = gl.cdiv(shard.columns, TILE.BLOCK_N)
    rows = place.row + gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, WORDS))
    owner, shard_row, _, shard_col = owner_of_tile(
        rows, tile_n, owner_tiles, shard_rows, shard.columns, GROUP, SCATTER_DIM, TILE.BLOCK_N
    )
    stride_row = owner_tiles * WIDTH
    target_ptr = translate(buffers.inbox_ptr + rank * shard.stride_source, unknown, owner)
    target_ptr += shard_row * stride_row
    column = shard_col // 2 + gl.arange(0, WIDTH, gl.SliceLayout(0, WORDS))[None, :]
    is_sent = (rows < m)[:, None]
    peer = owner if SCATTER_DIM == 1 else owner[:, None]
    acc = roles.multiply_tile(boxes, place, stride_w, m, n, k, TILE, WORK)
    generation, turn = roles.open_books(books)
    slot = (turn % 3) * buffers.stride_slot
    peers = Peers(buffers.control_ptr, buffers.heap_bases, rank, generation)
    words = roles.words_of_tile(acc, ELEMENT, TILE)
    packets.send(peers, (target_ptr + slot)[:, None] + column, words, peer, mask=is_sent)

    # -- own rows of the tile; the last tile also covers a ragged shard's end, which is not sent
    first, last = rank * shard_rows, (rank + 1) * shard_rows
    if SCATTER_DIM == 1:
        first, last = 0, gl.where(owner == rank, m, 0)
    end = gl.where(is_last_row, last, gl.minimum(last, place.row + TILE.BLOCK_M))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, POLLED))
    element = gl.arange(0, 2 * LANES, ADDED)
    for row in range(gl.maximum(first, place.row), end, LANES // WIDTH):
        word_rows = row + lane // WIDTH
        in_shard = (gl.minimum(word_rows, last - 1) - first) * stride_row + shard_col // 2
        total, arrived = roles.sum_of_words(
            in_shard + lane % WIDTH, word_rows < gl.minimum(end, m), buffers.inbox_ptr + slot,
            shard.stride_source, peers, ELEMENT, GROUP,
        )  # fmt: skip
        total = gl.convert_layout(total, ADDED, assert_trivial=True)
        own_row, col = row + element // TILE.BLOCK_N, shard_col + element % TILE.BLOCK_N
        total = gl.where(own_row < m, gl.where(arrived, total, float("nan")), 0.0)
        at_out = (own_row - first).to(gl.int64) * shard.columns + col
        is_own = (own_row < end) & (col < shard.columns)
        gl.store(out_ptr + at_out, total.to(ELEMENT), mask=is_own)


@gluon.jit(do_not_specialize=["rank", "m", "shard_rows", "used"])
def _push_lamport_specialized(
    x_desc, w_desc, stride_w, out_ptr, buffers, rank, m, n, k, shard_rows, shard, used,
    GROUP: gl.constexpr, TILE: gl.constexpr, SCATTER_DIM: gl.constexpr, LANES: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    tiles_m, tiles_n, owner_tiles = tiles_of_shards(m, shard.columns, GROUP, SCATTER_DIM, TILE)
    tile_m, tile_n = swizzle2d(program, tiles_m, tiles_n, TILE.GROUP_M)
    row = tile_m * TILE.BLOCK_M
    col = tile_n // owner_tiles * shard.columns + tile_n % owner_tiles * TILE.BLOCK_N
    place = roles.ReductionTile(program, tiles_m * tiles_n, row, col, gl.cdiv(k, TILE.BLOCK_K))
    boxes = make_boxes(x_desc, w_desc, TILE.SWAP_AB, 1, WORK.STAGES)
    books = roles.make_books()
    gl.warp_specialize(
        [
            (_reduce, (boxes, books, place, tile_n, tile_m == tiles_m - 1, stride_w, out_ptr,
                       buffers, rank, m, n, k, shard_rows, shard, GROUP, TILE, SCATTER_DIM, LANES,
                       WORK)),
            (roles.load_tile, (x_desc, w_desc, boxes, place, GROUP, TILE, WORK)),
            (roles.keep_books, (books, buffers, used, program, gl.num_programs(0), GROUP)),
        ],
        [1, 1],
        [WORK.OTHER_REGISTERS, WORK.OTHER_REGISTERS],
    )  # fmt: skip


class PushLamportSpecialized(roles.Specialized, PushLamport):
    """Tiles go to their owners as words; the warps of a program have roles."""

    def plan(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> Plan:
        if fabric.hardware.backend == "interpreter":
            return super().plan(problem, fabric, config)
        threads, width = config["num_warps"] * fabric.hardware.warp_size, config["BLOCK_N"] // 2
        most = MOST_POLLED * threads // power_of_2(problem.world_size, 1)
        wanted = max(4 * threads, power_of_2(problem.shard_rows, 1) * width)
        constants = {"SCATTER_DIM": problem.scatter_dim, "LANES": min(most, wanted)}
        layout = partial(self.layout, config)
        return roles.SpecializedPlan(
            problem, fabric, config, _push_lamport_specialized, layout, constants
        )


VARIANT = PushLamportSpecialized()
