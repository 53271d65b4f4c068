"""One fused kernel: tiles go to their owners as Lamport words; senders add their own rows.

``push`` without a drain and a signal between a tile and its sum, and without programs that only
wait and add. With few rows these are a large part of the exchange's time. It is the first shot of
``push_two_shot_lamport`` of ``matmul_all_reduce``.

Protocol. A program that holds a complete tile of this rank's partial sum sends the rows to their
owners, this rank included; while these are in flight, empties its share of the slot that the
previous turn used; and if this rank owns rows of the tile, waits for them from every rank and adds
in rank order. It waits only for programs of its tile, which send before they wait. Consider the
rank that has started the fewest programs: the programs of a tile that waits there have started
everywhere, since all ranks start the same programs in the same order, so their words arrive. Each
rank owns at least one row, hence hears from all ranks in each call: the full exchange under which
three slots of words suffice (:class:`taxfree_kernels.fabric.heap.Pool`). Problems that leave a rank
without rows are refused.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Peers, translate
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import (
    owner_of_tile,
    swizzle2d,
    tile_and_share,
    tiles_of_shards,
    xcd_swizzle,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import Layout, OutputShard, partial_tile, store_tile
from taxfree_kernels.reduction.packets import (
    LamportPlan,
    LamportVariant,
    sum_of_lamport_words,
    words_of,
)
from taxfree_kernels.reduction.spaces import lanes_of, tiles_of
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan

MOST_POLLED = 64  # words per thread, from all ranks


@triton.jit(do_not_specialize=["rank", "m", "shard_rows", "used"])
def _push_lamport(
    x, w, stride_w, out_ptr, buffers, rank, m, n, k, shard_rows, shard, used,
    GROUP: tl.constexpr, TILE: tl.constexpr, SCATTER_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        inbox_ptr: int32, the first slot of Lamport words. A slot is [source, shard_rows, words],
            rows as wide as all tiles of a shard's columns.
        used: number of words of a slot that all sources use.
        ROWS: rows that a program adds at once.
    """
    gdc_wait(GROUP)
    ELEMENT: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = TILE.BLOCK_N // 2  # words of a tile's row
    generation = sync.running_generation(buffers.control_ptr)
    turn = packets.running_turn(buffers.control_ptr)
    peers = Peers(buffers.control_ptr, buffers.heap_bases, rank, generation)
    slot_ptr = tl.multiple_of(buffers.inbox_ptr + (turn % 3) * buffers.stride_slot, 16)
    tiles_m, tiles_n, owner_tiles = tiles_of_shards(m, shard.columns, GROUP, SCATTER_DIM, TILE)
    tiles = tiles_m * tiles_n
    number = xcd_swizzle(tl.program_id(0), tiles * TILE.SPLIT_K, TILE.XCDS)
    tile, split = tile_and_share(number, TILE.SPLIT_K, 0)
    tile_m, tile_n = swizzle2d(tile, tiles_m, tiles_n, TILE.GROUP_M)
    row_begin = tile_m * TILE.BLOCK_M
    rows = row_begin + tl.arange(0, TILE.BLOCK_M)
    owner, shard_row, first_col, shard_col = owner_of_tile(
        rows, tile_n, owner_tiles, shard_rows, shard.columns, GROUP, SCATTER_DIM, TILE.BLOCK_N
    )
    acc, is_whole = partial_tile(
        tile, split, tiles, row_begin, m, first_col + shard_col, first_col + shard.columns, x, w,
        stride_w, buffers, k, GROUP, TILE,
    )  # fmt: skip
    if is_whole:
        stride_row = owner_tiles * WIDTH
        column = shard_col // 2 + tl.arange(0, WIDTH)
        own_ptr = slot_ptr + rank * shard.stride_source
        target_ptr = translate(own_ptr, peers, owner) + shard_row * stride_row
        words = tl.reshape(words_of(acc, ELEMENT), (TILE.BLOCK_M, WIDTH))
        target = target_ptr[:, None] + column[None, :]
        peer = owner if SCATTER_DIM == 1 else owner[:, None]
        packets.send(peers, target, words, peer, mask=(rows < m)[:, None])
        packets.empty_last_turn(
            buffers.control_ptr, buffers.inbox_ptr, buffers.stride_slot, turn, used, tile, tiles
        )

        # -- own rows of the tile; the last tile also covers a ragged shard's end, which is not sent
        if SCATTER_DIM == 0:
            first, last = rank * shard_rows, (rank + 1) * shard_rows
        else:
            first, last = 0, tl.where(owner == rank, m, 0)
        begin = tl.maximum(first, row_begin)
        end = tl.where(tile_m == tiles_m - 1, last, tl.minimum(last, row_begin + TILE.BLOCK_M))
        lane = tl.arange(0, ROWS * WIDTH)
        for row in range(begin, end, ROWS):
            word_rows = row + lane // WIDTH
            offsets = (
                (tl.minimum(word_rows, last - 1) - first) * stride_row
                + shard_col // 2
                + lane % WIDTH
            )
            total, arrived = sum_of_lamport_words(
                offsets,
                word_rows < tl.minimum(end, m),
                slot_ptr,
                shard.stride_source,
                peers,
                ELEMENT,
                GROUP,
            )
            total = tl.where(arrived, tl.reshape(total, (ROWS, TILE.BLOCK_N)), float("nan"))
            own_rows = row + tl.arange(0, ROWS)
            total = tl.where((own_rows < m)[:, None], total, 0.0)
            cols = shard_col + tl.arange(0, TILE.BLOCK_N)
            store_tile(out_ptr, own_rows - first, cols, own_rows < end, shard.columns, total)
    packets.leave_turn(buffers.control_ptr)
    sync.leave(buffers.control_ptr)


class PushLamport(LamportVariant):
    """Tiles go to their owners as words; the same programs add them."""

    def unsupported_reason(self, problem: MatmulReduceScatter, hardware: Hardware) -> str | None:
        if not all(problem.rows_of(rank) for rank in range(problem.world_size)):
            return "a rank without rows would hear from nobody"
        return super().unsupported_reason(problem, hardware)

    def illegal_reason(
        self, problem: MatmulReduceScatter, hardware: Hardware, config: Config
    ) -> str | None:
        words = config["BLOCK_M"] * config["BLOCK_N"] // 2
        crowded = spaces.words_illegal_reason(hardware, config, words, 1, 64)
        return crowded or super().illegal_reason(problem, hardware, config)

    def words(self, problem: MatmulReduceScatter, config: Config) -> int:
        return int(problem.world_size * _stride_source(problem, config))

    def layout(self, config: Config, problem: MatmulReduceScatter) -> Layout:
        """The layout of a launch."""
        rows, columns = problem.shard_rows, problem.shard_columns
        tiles = tiles_of(problem.m, columns, config["BLOCK_M"], config["BLOCK_N"])
        if problem.scatter_dim == 1:
            tiles *= problem.world_size
        words = self.words(problem, config)
        shard = OutputShard(columns, _stride_source(problem, config))
        return Layout(tiles, 0, words, (rows, shard, words))

    def plan(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> Plan:
        constants = {
            "SCATTER_DIM": problem.scatter_dim,
            "ROWS": _rows_at_once(problem, fabric.hardware, config),
        }
        layout = partial(self.layout, config)
        return LamportPlan(problem, fabric, config, _push_lamport, layout, constants)


def _stride_source(problem: MatmulReduceScatter, config: Config) -> int:
    """Words of a shard, padded to 64 bytes."""
    tiles = tiles_of(problem.shard_rows, problem.shard_columns, 1, config["BLOCK_N"])
    words = tiles * config["BLOCK_N"] // 2
    return -(-words // 16) * 16


def _rows_at_once(problem: MatmulReduceScatter, hardware: Hardware, config: Config) -> int:
    """Rows of a tile that a program adds at once: a shard's rows, if it can hold that many.

    Few rows get more lanes than words: see :func:`lanes_of`.
    """
    width = config["BLOCK_N"] // 2
    threads = config.get("num_warps", 1) * hardware.warp_size
    most = max(1, MOST_POLLED * threads // (power_of_2(problem.world_size, 1) * width))
    lanes = lanes_of(hardware, config, power_of_2(problem.shard_rows, 1) * width)
    return int(min(most, config["BLOCK_M"], lanes // width))


VARIANT = PushLamport()
