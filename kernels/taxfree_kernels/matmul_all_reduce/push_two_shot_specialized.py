"""``push_two_shot`` with roles for warps, for Hopper: sums and copies beside matrix products.

In ``push_two_shot`` programs that add and copy take compute units from tiles, or come after the
last tile. Here each program stays on its compute unit, its warps have the roles of
:mod:`taxfree_kernels.reduction.specialized`, and pieces are added and copied while later tiles are
multiplied. The interpreter does not run Gluon: there, and for the happens-before checker, this
variant is ``push_two_shot``, the same protocol.

Protocol. Slots, groups, signals, channels and waits are those of ``push_two_shot``, and so is the
full exchange under which two payload slots suffice. What differs is that tiles and pieces are
drawn; a piece is a part of a tile to add, or to copy. The order of pieces is that of tiles, in
batches: as many tiles as programs finish at once are added, then the peers' sums of such tiles are
copied. A piece to copy waits for pieces to add of the same batch, which come earlier on every rank:
for why this makes progress, see the module of the roles. A consumer stores its half of a tile, a
barrier of its warps follows, and it arrives at a barrier of shared memory, for which the announcer
waits before it counts the tile: so the counter's and the signal's releases cover the stores of both
consumers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taxfree_kernels.device import sync
from taxfree_kernels.device.exchange import wait_for_everybody
from taxfree_kernels.device.pdl import gdc_wait
from taxfree_kernels.device.peers import translate
from taxfree_kernels.device.specialized import lines, make_boxes, multiply
from taxfree_kernels.device.tiles import swizzle2d
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.push_two_shot import FINE, PushTwoShot, PushTwoShotPlan
from taxfree_kernels.reduction import specialized
from taxfree_kernels.reduction.epilogue import add_bias_residual
from taxfree_kernels.reduction.specialized import (
    CONSUMERS,
    DRAWERS,
    PIECE_TICKETS,
    TICKETS,
    SpecializedPlan,
    added,
    announce,
    entered,
    make_mail,
    place_of,
    produce,
    report_stored,
    rows_at_once,
    sum_of_parts,
    take,
)
from taxfree_kernels.reduction.tile import announce_tile, store_tile
from taxfree_kernels.variant import Config, Plan, Space


class Sizes(NamedTuple):
    """The sizes of a call."""

    m: Any
    n: Any
    k: Any
    tiles_m: Any
    tiles_n: Any


@gluon.jit
def _results(slot_ptr, out_ptr, stride_source, GROUP: gl.constexpr):
    """The part of a slot that holds the sums of all tiles."""
    sums_ptr = slot_ptr + GROUP.WORLD * stride_source
    return tl.cast(sums_ptr, tl.pointer_type(out_ptr.dtype.element_ty))


@gluon.jit
def _consume(
    part: gl.constexpr, boxes, mail, addends, out_ptr, buffers, rank, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr, SCHEDULE: gl.constexpr,
    FINE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of each tile and store them to its owner; then add and copy pieces."""
    gdc_wait(GROUP)
    peers, slot_ptr = entered(buffers, rank)
    LAYOUT: gl.constexpr = lines(TILE.BLOCK_N)
    ELEMENTS: gl.constexpr = TILE.BLOCK_M * TILE.BLOCK_N
    owned = gl.cdiv(sizes.tiles_m * sizes.tiles_n, GROUP.WORLD)
    own_ptr = slot_ptr + rank * (owned.to(gl.int64) * ELEMENTS)
    steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    row = part * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    number, turn = gl.to_tensor(0), gl.to_tensor(0)
    tile = take(mail, turn)
    while tile >= 0:
        acc = multiply(part, steps, number, boxes, TILE, CONSUMERS, WORK.STAGES)
        number += steps
        sent = gl.convert_layout(acc.to(slot_ptr.dtype.element_ty), LAYOUT)
        tile_m, _ = place_of(mail, turn)
        target_ptr = translate(own_ptr, peers, tile % GROUP.WORLD)
        target_ptr += (tile // GROUP.WORLD).to(gl.int64) * ELEMENTS
        mask = (tile_m * TILE.BLOCK_M + row < sizes.m)[:, None]
        gl.store(target_ptr + (row * TILE.BLOCK_N)[:, None] + col[None, :], sent, mask=mask)
        report_stored(mail, turn)
        turn += 1
        tile = take(mail, turn)
    _do_pieces(
        addends,
        out_ptr,
        buffers,
        peers,
        slot_ptr,
        sizes,
        GROUP,
        TILE,
        EPILOGUE,
        SCHEDULE,
        FINE,
        WORK,
    )


@gluon.jit
def _add(
    addends, out_ptr, buffers, rank, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr, SCHEDULE: gl.constexpr,
    FINE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    peers, slot_ptr = entered(buffers, rank)
    _do_pieces(
        addends,
        out_ptr,
        buffers,
        peers,
        slot_ptr,
        sizes,
        GROUP,
        TILE,
        EPILOGUE,
        SCHEDULE,
        FINE,
        WORK,
    )


@gluon.jit
def _do_pieces(
    addends, out_ptr, buffers, peers, slot_ptr, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr, SCHEDULE: gl.constexpr,
    FINE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Draw pieces of this rank's tiles and add them, and pieces of peers' tiles and copy them."""
    PEERS: gl.constexpr = GROUP.WORLD - 1
    OWNED_PER_SIGNAL: gl.constexpr = SCHEDULE.TILES_PER_SIGNAL // GROUP.WORLD
    COPIES: gl.constexpr = WORK.COPIES * PEERS  # pieces to copy for each own tile
    tiles = sizes.tiles_m * sizes.tiles_n
    groups, owned = gl.cdiv(tiles, SCHEDULE.TILES_PER_SIGNAL), gl.cdiv(tiles, GROUP.WORLD)
    at_once = gl.maximum(gl.num_programs(0) // SCHEDULE.TILES_PER_SIGNAL, 1) * OWNED_PER_SIGNAL
    pieces = owned * (SCHEDULE.PIECES + COPIES)
    draws = pieces + gl.num_programs(0) * DRAWERS
    tickets_ptr = buffers.counters_ptr + PIECE_TICKETS
    piece = sync.draw(tickets_ptr, draws)
    while piece < pieces:
        begin = piece // (at_once * (SCHEDULE.PIECES + COPIES)) * at_once
        additions = gl.minimum(at_once, owned - begin) * SCHEDULE.PIECES
        place = piece - begin * (SCHEDULE.PIECES + COPIES)
        if place < additions:
            _add_piece(
                begin * SCHEDULE.PIECES + place, groups, owned, addends, out_ptr, buffers, peers,
                slot_ptr, sizes, GROUP, TILE, EPILOGUE, SCHEDULE, FINE,
            )  # fmt: skip
        else:
            _copy_piece(
                begin * COPIES + place - additions, groups, owned, out_ptr, peers, slot_ptr, sizes,
                GROUP, TILE, SCHEDULE, FINE, WORK,
            )  # fmt: skip
        piece = sync.draw(tickets_ptr, draws)


@gluon.jit
def _add_piece(
    number, groups, owned, addends, out_ptr, buffers, peers, slot_ptr, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr, SCHEDULE: gl.constexpr,
    FINE: gl.constexpr,
):  # fmt: skip
    """As an adder of ``push_two_shot`` with this number."""
    LAYOUT: gl.constexpr = added(TILE.BLOCK_N, gl.num_warps())
    ROWS: gl.constexpr = TILE.BLOCK_M // SCHEDULE.PIECES
    AT_ONCE: gl.constexpr = rows_at_once(ROWS, TILE.BLOCK_N, gl.num_warps())
    ELEMENTS: gl.constexpr = TILE.BLOCK_M * TILE.BLOCK_N
    OWNED_PER_SIGNAL: gl.constexpr = SCHEDULE.TILES_PER_SIGNAL // GROUP.WORLD
    tiles = sizes.tiles_m * sizes.tiles_n
    own, first = number // SCHEDULE.PIECES, number % SCHEDULE.PIECES * ROWS
    tile = own * GROUP.WORLD + peers.rank
    tile_m, tile_n = swizzle2d(
        gl.minimum(tile, tiles - 1), sizes.tiles_m, sizes.tiles_n, TILE.GROUP_M
    )
    end = gl.where(tile < tiles, sizes.m, 0)
    cols = tile_n * TILE.BLOCK_N + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    stride_source = owned.to(gl.int64) * ELEMENTS
    source_ptr = slot_ptr + own.to(gl.int64) * ELEMENTS
    result_ptr = _results(slot_ptr, out_ptr, stride_source, GROUP) + tile.to(gl.int64) * ELEMENTS
    channel = own // OWNED_PER_SIGNAL
    if FINE:
        channel = gl.where(tile < tiles, channel, 0)  # nobody computes a tile beyond the last
    arrived = wait_for_everybody(peers, channel, GROUP)
    for begin in range(first, first + ROWS, AT_ONCE):
        row = begin + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
        rows = tile_m * TILE.BLOCK_M + row
        row_mask = rows < end
        at = (row * TILE.BLOCK_N)[:, None] + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))[
            None, :
        ]
        added_too = gl.zeros([AT_ONCE, TILE.BLOCK_N], gl.float32, LAYOUT)
        col_mask = (cols < sizes.n)[None, :]
        place = rows.to(gl.int64)[:, None] * sizes.n + cols[None, :]
        added_too = add_bias_residual(
            added_too, cols[None, :], col_mask, place, row_mask[:, None] & col_mask, addends,
            EPILOGUE,
        )  # fmt: skip
        total = sum_of_parts(source_ptr, stride_source, at, row_mask[:, None], LAYOUT, GROUP)
        total = gl.where(arrived, total + added_too, float("nan"))
        result = total.to(out_ptr.dtype.element_ty)
        for step in gl.static_range(1, GROUP.WORLD):
            target_ptr = translate(result_ptr, peers, (peers.rank + step) % GROUP.WORLD)
            gl.store(target_ptr + at, result, mask=row_mask[:, None])
        store_tile(out_ptr, rows, cols, row_mask, sizes.n, result)
    announce_tile(
        number, owned * SCHEDULE.PIECES, groups, buffers.counters_ptr + TICKETS + groups, peers,
        GROUP, 1 if FINE else OWNED_PER_SIGNAL * SCHEDULE.PIECES,
    )  # fmt: skip


@gluon.jit
def _copy_piece(
    number, groups, owned, out_ptr, peers, slot_ptr, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, SCHEDULE: gl.constexpr,
    FINE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """A part of the work of a copier of ``push_two_shot``."""
    LAYOUT: gl.constexpr = added(TILE.BLOCK_N, gl.num_warps())
    AT_ONCE: gl.constexpr = 1024 * gl.num_warps() // TILE.BLOCK_N  # rows: 64 bytes a thread
    ROWS: gl.constexpr = TILE.BLOCK_M // WORK.COPIES
    ELEMENTS: gl.constexpr = TILE.BLOCK_M * TILE.BLOCK_N
    PEERS: gl.constexpr = GROUP.WORLD - 1
    OWNED_PER_SIGNAL: gl.constexpr = SCHEDULE.TILES_PER_SIGNAL // GROUP.WORLD
    first = number % WORK.COPIES * ROWS
    copier = number // WORK.COPIES
    own, source = copier // PEERS, (peers.rank + 1 + copier % PEERS) % GROUP.WORLD
    tile = own * GROUP.WORLD + source
    if tile < sizes.tiles_m * sizes.tiles_n:
        tile_m, tile_n = swizzle2d(tile, sizes.tiles_m, sizes.tiles_n, TILE.GROUP_M)
        cols = tile_n * TILE.BLOCK_N + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        result_ptr = _results(slot_ptr, out_ptr, owned.to(gl.int64) * ELEMENTS, GROUP)
        result_ptr += tile.to(gl.int64) * ELEMENTS
        channel = groups + own // OWNED_PER_SIGNAL
        if FINE:
            channel = groups + own * SCHEDULE.PIECES + first // (TILE.BLOCK_M // SCHEDULE.PIECES)
        arrived = sync.wait(peers, channel, source, GROUP)
        if FINE:
            for further in gl.static_range(1, SCHEDULE.PIECES // WORK.COPIES):
                arrived = sync.wait(peers, channel + further, source, GROUP) & arrived
        for begin in range(first, first + ROWS, AT_ONCE):
            row = begin + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
            rows = tile_m * TILE.BLOCK_M + row
            at = (row * TILE.BLOCK_N)[:, None] + gl.arange(
                0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT)
            )[None, :]
            result = gl.load(result_ptr + at, mask=(rows < sizes.m)[:, None])
            result = gl.where(arrived, result, float("nan"))
            store_tile(out_ptr, rows, cols, rows < sizes.m, sizes.n, result)


@gluon.jit(do_not_specialize=["rank", "m"])
def _push_two_shot_specialized(
    x_desc, w_desc, stride_w, addends, out_ptr, buffers, rank, m, n, k, stride_row, ahead,
    GROUP: gl.constexpr, TILE: gl.constexpr, EPILOGUE: gl.constexpr, SCHEDULE: gl.constexpr,
    FINE: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = gl.cdiv(m, TILE.BLOCK_M), gl.cdiv(n, TILE.BLOCK_N)
    sizes = Sizes(m, n, k, tiles_m, tiles_n)
    boxes = make_boxes(x_desc, w_desc, False, CONSUMERS, WORK.STAGES)
    mail = make_mail()
    gl.warp_specialize(
        [
            (_consume, (0, boxes, mail, addends, out_ptr, buffers, rank, sizes,
                        GROUP, TILE, EPILOGUE, SCHEDULE, FINE, WORK)),
            (_consume, (1, boxes, mail, addends, out_ptr, buffers, rank, sizes,
                        GROUP, TILE, EPILOGUE, SCHEDULE, FINE, WORK)),
            (_add, (addends, out_ptr, buffers, rank, sizes,
                    GROUP, TILE, EPILOGUE, SCHEDULE, FINE, WORK)),
            (produce, (x_desc, w_desc, boxes, mail, buffers.counters_ptr, k, tiles_m, tiles_n,
                       tiles_n, n, GROUP, TILE, WORK)),
            (announce, (mail, tiles_m * tiles_n, buffers, rank, GROUP, SCHEDULE.TILES_PER_SIGNAL,
                        FINE)),
        ],
        [4, 2, 1, 1],
        [WORK.REGISTERS, WORK.OTHER_REGISTERS, WORK.OTHER_REGISTERS, WORK.OTHER_REGISTERS],
    )  # fmt: skip
    sync.leave(buffers.control_ptr)


class _Plan(SpecializedPlan, PushTwoShotPlan):
    """One launch, without RMSNorm."""


class PushTwoShotSpecialized(PushTwoShot):
    """One kernel whose warps have roles: sums and copies beside matrix products."""

    name = "push_two_shot_specialized"
    searched = False  # until it is measured on several GPUs

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        reason = specialized.unsupported_reason(problem, hardware)
        return reason or super().unsupported_reason(problem, hardware)

    def space(self, problem: MatmulAllReduce, hardware: Hardware) -> Space:
        space = specialized.narrowed(super().space(problem, hardware), hardware)
        return {**space, "AHEAD": space["AHEAD"][:1], "SIGNALS": (FINE, *space["SIGNALS"])}

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        space = self.space(problem, hardware)
        return specialized.seed_configs(problem, hardware, space, self.prune_reason)

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        if fabric.hardware.backend == "interpreter":
            return super().plan(problem, fabric, config)
        return self._plan(_Plan, _push_two_shot_specialized, problem, fabric, config)


VARIANT = PushTwoShotSpecialized()
