"""``push_two_shot_lamport`` with roles for warps, for Hopper: see ``reduction.specialized_words``.

The interpreter does not run Gluon: there, and for the happens-before checker, this variant is
``push_two_shot_lamport``, the same protocol.
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
from taxfree_kernels.device.tiles import swizzle2d
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.push_two_shot_lamport import PushTwoShotLamport
from taxfree_kernels.matmul_all_reduce.rms_norm import NormAfter
from taxfree_kernels.reduction import specialized_words as roles
from taxfree_kernels.reduction.fused import add_bias_residual
from taxfree_kernels.reduction.packets import halves_of
from taxfree_kernels.variant import Config, Plan


@gluon.jit
def _reduce(
    boxes, books, place, stride_w, epilogue, out_ptr, buffers, rank, m, n, k,
    GROUP: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr, LANES: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    """The consumer: multiply, and exchange words as ``push_two_shot_lamport`` does.

    Addresses do not depend on the product, and are found before the loop.
    """
    gdc_wait(GROUP)
    ELEMENT: gl.constexpr = out_ptr.dtype.element_ty
    WIDTH: gl.constexpr = TILE.BLOCK_N // 2  # words of a tile's row
    SLICES: gl.constexpr = triton.next_power_of_2(GROUP.WORLD)
    SLICE_ROWS: gl.constexpr = TILE.BLOCK_M // SLICES
    SLICE: gl.constexpr = SLICE_ROWS * WIDTH
    ROUNDS: gl.constexpr = triton.cdiv(SLICES, GROUP.WORLD)
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = roles.words_layout(TILE.BLOCK_N, TILE.SWAP_AB, WARPS)
    POLLED: gl.constexpr = roles.polled_layout(SLICES, WARPS)
    ADDED: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    unknown = Peers(buffers.control_ptr, buffers.heap_bases, rank, None)
    row = gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, WORDS))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, WORDS))[None, :]
    has_row = (place.row + row < m)[:, None]
    slices = row // SLICE_ROWS
    owner = (slices + place.tile) % GROUP.WORLD
    stride_source = (place.tiles * ROUNDS * SLICE).to(gl.int64)
    target_ptr = translate(buffers.inbox_ptr + rank * stride_source, unknown, owner)
    target_ptr += (place.tile * ROUNDS + slices // GROUP.WORLD) * SLICE + row % SLICE_ROWS * WIDTH
    sums_ptr = buffers.inbox_ptr + GROUP.WORLD * stride_source + place.tile * (SLICES * SLICE)
    step = gl.arange(0, SLICES, gl.SliceLayout(1, POLLED))
    peer = (rank + 1 + step) % GROUP.WORLD
    sums_at_peers = translate(sums_ptr, unknown, peer)[:, None]
    lane = gl.arange(0, LANES, gl.SliceLayout(0, POLLED))
    element = gl.arange(0, 2 * LANES, ADDED)
    acc = roles.multiply_tile(boxes, place, stride_w, m, n, k, TILE, WORK)
    generation, turn = roles.open_books(books)
    slot = (turn % 3) * buffers.stride_slot
    peers = Peers(buffers.control_ptr, buffers.heap_bases, rank, generation)

    # -- the first shot, [source, tile, ROUNDS, SLICE]: each rank's slices -------------------
    words = roles.words_of_tile(acc, ELEMENT, TILE)
    target = (target_ptr + slot)[:, None] + column
    packets.send(peers, target, words, owner[:, None], mask=has_row)

    # -- the second, [tile, WORDS]: sums of this rank's slices to every rank -----------------
    in_slice = lane % SLICE
    # compilers do not see that lanes of a row stay contiguous after the remainder
    row_in_slice = gl.max_constancy(in_slice // WIDTH, 4)
    for nth in gl.static_range(ROUNDS):
        own_slice = (
            rank + GROUP.WORLD - place.tile % GROUP.WORLD
        ) % GROUP.WORLD + nth * GROUP.WORLD
        first_row = place.row + own_slice * SLICE_ROWS
        row_end = gl.where(own_slice < SLICES, m - first_row, 0)
        total, arrived = roles.sum_of_words(
            (place.tile * ROUNDS + nth) * SLICE + in_slice, row_in_slice < row_end,
            buffers.inbox_ptr + slot, stride_source, peers, ELEMENT, GROUP,
        )  # fmt: skip
        total = gl.convert_layout(total, ADDED, assert_trivial=True)
        down = element % (2 * SLICE) // TILE.BLOCK_N
        cols = place.col + element % TILE.BLOCK_N
        offsets = (first_row + down).to(gl.int64) * n + cols
        total = add_bias_residual(
            total, cols, cols < n, offsets, (down < row_end) & (cols < n), epilogue, EPILOGUE
        )
        total = gl.where(arrived, total, float("nan"))
        pairs = total.to(ELEMENT).to(gl.uint16, bitcast=True).to(gl.int32)
        low, high = gl.split(pairs.reshape([LANES, 2]))
        sent = gl.convert_layout(low | (high << 16), lane.type.layout, assert_trivial=True)
        is_sent = (row_in_slice < row_end) & (lane < SLICE)
        packets.send(
            peers, sums_at_peers + slot + (own_slice * SLICE + in_slice)[None, :],
            sent[None, :], peer[:, None], mask=is_sent[None, :] & (step < GROUP.WORLD)[:, None],
        )  # fmt: skip
    sums, came = packets.receive(
        peers, sums_ptr + slot + row[:, None] * WIDTH + column, owner[:, None], GROUP,
        mask=has_row,
    )  # fmt: skip
    low, high = halves_of(sums, ELEMENT)
    result = gl.join(low, high).reshape([TILE.BLOCK_M, TILE.BLOCK_N])
    OUT: gl.constexpr = result.type.layout
    rows = place.row + gl.arange(0, TILE.BLOCK_M, gl.SliceLayout(1, OUT))[:, None]
    cols = place.col + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, OUT))[None, :]
    result = gl.where(came, result, float("nan")).to(ELEMENT)
    gl.store(out_ptr + rows.to(gl.int64) * n + cols, result, mask=(rows < m) & (cols < n))


@gluon.jit(do_not_specialize=["rank", "m", "used"])
def _push_two_shot_lamport_specialized(
    x_desc, w_desc, stride_w, epilogue, out_ptr, buffers, rank, m, n, k, used,
    GROUP: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr, LANES: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    tiles_m, tiles_n = gl.cdiv(m, TILE.BLOCK_M), gl.cdiv(n, TILE.BLOCK_N)
    tile_m, tile_n = swizzle2d(program, tiles_m, tiles_n, TILE.GROUP_M)
    row, col = tile_m * TILE.BLOCK_M, tile_n * TILE.BLOCK_N
    place = roles.ReductionTile(program, tiles_m * tiles_n, row, col, gl.cdiv(k, TILE.BLOCK_K))
    boxes = make_boxes(x_desc, w_desc, TILE.SWAP_AB, 1, WORK.STAGES)
    books = roles.make_books()
    gl.warp_specialize(
        [
            (_reduce, (boxes, books, place, stride_w, epilogue, out_ptr, buffers, rank, m, n, k,
                       GROUP, TILE, EPILOGUE, LANES, WORK)),
            (roles.load_tile, (x_desc, w_desc, boxes, place, GROUP, TILE, WORK)),
            (roles.keep_books, (books, buffers, used, program, gl.num_programs(0), GROUP)),
        ],
        [1, 1],
        [WORK.OTHER_REGISTERS, WORK.OTHER_REGISTERS],
    )  # fmt: skip


class PushTwoShotLamportSpecialized(roles.Specialized, PushTwoShotLamport):
    """Slices of tiles go to their owners and back; the warps of a program have roles."""

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        if problem.rms_norm:
            return "it does not normalise"
        return super().unsupported_reason(problem, hardware)

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        if fabric.hardware.backend == "interpreter":
            return super().plan(problem, fabric, config)
        constants = self.constants(config, problem, fabric.hardware)
        function, layout = _push_two_shot_lamport_specialized, partial(self.layout, config)
        return roles.SpecializedPlan(problem, fabric, config, function, layout, constants)


class PushTwoShotLamportSpecializedNormAfter(NormAfter, PushTwoShotLamportSpecialized):
    """Slices of tiles go to their owners and back; another kernel normalises."""


VARIANT = PushTwoShotLamportSpecializedNormAfter()
