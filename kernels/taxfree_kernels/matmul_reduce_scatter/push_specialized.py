"""``push`` with roles for warps, for Hopper: tiles are multiplied while earlier ones are added.

In ``push`` programs that add take compute units from tiles, or come after the last tile. Here each
program stays on its compute unit, its warps have the roles of
:mod:`taxfree_kernels.reduction.specialized`, and the sums are added beside the matrix products. The
interpreter does not run Gluon: there, and for the happens-before checker, this variant is ``push``,
the same protocol.

Protocol. Tiles, groups, signals, channels and waits are those of ``push``, and so is the full
exchange under which two payload slots suffice. What differs is that tiles and the pieces of sums
are drawn, in the order of the numbers that programs have there: for why this makes progress, see
the module of the roles. A consumer stores its half of a tile, a barrier of its warps follows, and
it arrives at a barrier of shared memory, for which the announcer waits before it counts the tile:
so the counter's and the signal's releases cover the stores of both consumers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taxfree_kernels.device import sync
from taxfree_kernels.device.exchange import wait_for_everybody
from taxfree_kernels.device.pdl import gdc_wait
from taxfree_kernels.device.peers import translate
from taxfree_kernels.device.specialized import lines, make_boxes, multiply
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.matmul_reduce_scatter.push import Push, index_of_tile
from taxfree_kernels.matmul_reduce_scatter.shards import owner_of_tile, tiles_of_shards
from taxfree_kernels.reduction import spaces, specialized
from taxfree_kernels.reduction.specialized import (
    CONSUMERS,
    DRAWERS,
    PIECE_TICKETS,
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
from taxfree_kernels.variant import Config, Plan, Space


class Sizes(NamedTuple):
    """The sizes of a call, see ``shards``."""

    m: Any
    k: Any
    shard_rows: Any
    shard: Any
    tiles_m: Any
    tiles_n: Any
    owner_tiles: Any


@gluon.jit
def _consume(
    part: gl.constexpr, boxes, mail, out_ptr, buffers, rank, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, SCHEDULE: gl.constexpr, SCATTER_DIM: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of each tile and store them to their owners; then add pieces."""
    gdc_wait(GROUP)
    peers, slot_ptr = entered(buffers, rank)
    own_ptr = slot_ptr + rank.to(gl.int64) * sizes.shard.stride_source
    LAYOUT: gl.constexpr = lines(TILE.BLOCK_N, gl.num_warps())
    steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    number, turn = gl.to_tensor(0), gl.to_tensor(0)
    tile = take(mail, turn)
    while tile >= 0:
        acc = multiply(part, steps, number, boxes, TILE, CONSUMERS, WORK.STAGES)
        number += steps
        sent = gl.convert_layout(acc.to(slot_ptr.dtype.element_ty), LAYOUT)
        tile_m, tile_n = place_of(mail, turn)
        rows = tile_m * TILE.BLOCK_M + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        owner, shard_row, _, shard_col = owner_of_tile(
            rows, tile_n, sizes.owner_tiles, sizes.shard_rows, sizes.shard.columns, GROUP,
            SCATTER_DIM, TILE.BLOCK_N,
        )  # fmt: skip
        cols = shard_col + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        target_ptr = translate(own_ptr, peers, owner)
        target_ptr += shard_row.to(gl.int64) * sizes.shard.stride_row
        mask = (rows < sizes.m)[:, None] & (cols < sizes.shard.stride_row)[None, :]
        gl.store(target_ptr[:, None] + cols[None, :], sent, mask=mask)
        report_stored(mail, turn)
        turn += 1
        tile = take(mail, turn)
    _add_pieces(out_ptr, buffers, peers, slot_ptr, sizes, GROUP, TILE, SCHEDULE, SCATTER_DIM)


@gluon.jit
def _add(
    out_ptr, buffers, rank, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, SCHEDULE: gl.constexpr, SCATTER_DIM: gl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    peers, slot_ptr = entered(buffers, rank)
    _add_pieces(out_ptr, buffers, peers, slot_ptr, sizes, GROUP, TILE, SCHEDULE, SCATTER_DIM)


@gluon.jit
def _add_pieces(
    out_ptr, buffers, peers, slot_ptr, sizes,
    GROUP: gl.constexpr, TILE: gl.constexpr, SCHEDULE: gl.constexpr, SCATTER_DIM: gl.constexpr,
):  # fmt: skip
    """Draw pieces of this rank's tiles, columns of tiles first, and add them."""
    LAYOUT: gl.constexpr = added(TILE.BLOCK_N, gl.num_warps())
    PIECE_ROWS: gl.constexpr = TILE.BLOCK_M // SCHEDULE.PIECES
    AT_ONCE: gl.constexpr = rows_at_once(PIECE_ROWS, TILE.BLOCK_N, gl.num_warps())
    rank, shard = peers.rank, sizes.shard
    first_row, end_row = 0, sizes.m
    if SCATTER_DIM == 0:
        first_row = rank * sizes.shard_rows
        end_row = gl.minimum(first_row + sizes.shard_rows, sizes.m)
    first = gl.minimum(first_row // TILE.BLOCK_M, sizes.tiles_m - 1)
    own_tiles_m = gl.maximum(gl.cdiv(end_row, TILE.BLOCK_M) - first, 1)
    pieces = own_tiles_m * sizes.owner_tiles * SCHEDULE.PIECES
    draws = pieces + gl.num_programs(0) * DRAWERS
    tickets_ptr = buffers.counters_ptr + PIECE_TICKETS
    piece = sync.draw(tickets_ptr, draws)
    while piece < pieces:
        index = piece // SCHEDULE.PIECES
        tile_m, tile_n = first + index % own_tiles_m, index // own_tiles_m
        row = tile_m * TILE.BLOCK_M + piece % SCHEDULE.PIECES * PIECE_ROWS
        cols = tile_n * TILE.BLOCK_N + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        if SCATTER_DIM == 1:
            tile_n += rank * sizes.owner_tiles
        tile = index_of_tile(tile_m, tile_n, sizes.tiles_m, sizes.tiles_n, TILE.GROUP_M)
        arrived = wait_for_everybody(peers, tile // SCHEDULE.TILES_PER_SIGNAL, GROUP)
        for begin in range(row, row + PIECE_ROWS, AT_ONCE):
            rows = begin + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
            own_row = rows - first_row
            is_own = (own_row >= 0) & (own_row < sizes.shard_rows)
            at = own_row.to(gl.int64)[:, None] * shard.stride_row + cols[None, :]
            mask = (is_own & (rows < sizes.m))[:, None] & (cols < shard.stride_row)[None, :]
            total = sum_of_parts(slot_ptr, shard.stride_source, at, mask, LAYOUT, GROUP)
            total = gl.where(arrived, total, float("nan"))
            out = out_ptr + own_row.to(gl.int64)[:, None] * shard.columns + cols[None, :]
            is_stored = is_own[:, None] & (cols < shard.columns)[None, :]
            gl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_stored)
        piece = sync.draw(tickets_ptr, draws)


@gluon.jit(do_not_specialize=["rank", "m", "shard_rows"])
def _push_specialized(
    x_desc, w_desc, stride_w, out_ptr, buffers, rank, m, n, k, shard_rows, shard,
    GROUP: gl.constexpr, TILE: gl.constexpr, SCHEDULE: gl.constexpr, SCATTER_DIM: gl.constexpr,
    WORK: gl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n, owner_tiles = tiles_of_shards(m, shard.columns, GROUP, SCATTER_DIM, TILE)
    sizes = Sizes(m, k, shard_rows, shard, tiles_m, tiles_n, owner_tiles)
    boxes = make_boxes(x_desc, w_desc, False, CONSUMERS, WORK.STAGES)
    mail = make_mail()
    gl.warp_specialize(
        [
            (_consume, (0, boxes, mail, out_ptr, buffers, rank, sizes,
                        GROUP, TILE, SCHEDULE, SCATTER_DIM, WORK)),
            (_consume, (1, boxes, mail, out_ptr, buffers, rank, sizes,
                        GROUP, TILE, SCHEDULE, SCATTER_DIM, WORK)),
            (_add, (out_ptr, buffers, rank, sizes, GROUP, TILE, SCHEDULE, SCATTER_DIM)),
            (produce, (x_desc, w_desc, boxes, mail, buffers.counters_ptr, k, tiles_m, tiles_n,
                       owner_tiles, shard.columns, GROUP, TILE, WORK)),
            (announce, (mail, tiles_m * tiles_n, buffers, rank, GROUP, SCHEDULE.TILES_PER_SIGNAL,
                        False)),
        ],
        [4, 2, 1, 1],
        [WORK.REGISTERS, WORK.OTHER_REGISTERS, WORK.OTHER_REGISTERS, WORK.OTHER_REGISTERS],
    )  # fmt: skip
    sync.leave(buffers.control_ptr)


class PushSpecialized(Push):
    """One kernel whose warps have roles: tiles go to their owners, which add them meanwhile."""

    name = "push_specialized"
    searched = False  # until it is measured on several GPUs

    def unsupported_reason(self, problem: MatmulReduceScatter, hardware: Hardware) -> str | None:
        reason = specialized.unsupported_reason(problem, hardware)
        return reason or super().unsupported_reason(problem, hardware)

    def space(self, problem: MatmulReduceScatter, hardware: Hardware) -> Space:
        space = specialized.narrowed(super().space(problem, hardware), hardware)
        return {**space, "SIGNALS": spaces.signal_counts(hardware, Pool.CHANNELS)}

    def seed_configs(
        self, problem: MatmulReduceScatter, hardware: Hardware
    ) -> list[dict[str, Any]]:
        space = self.space(problem, hardware)
        return specialized.seed_configs(problem, hardware, space, self.prune_reason)

    def plan(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> Plan:
        if fabric.hardware.backend == "interpreter":
            return super().plan(problem, fabric, config)
        return self._plan(SpecializedPlan, _push_specialized, problem, fabric, config)


VARIANT = PushSpecialized()
