"""One fused kernel: each finished tile goes to every rank, and every rank adds the partial sums.

Removes the launch tax (one kernel), the bulk-synchronous tax (a tile is sent as soon as it is
finished, and summed once it has arrived from all ranks), and the locality tax of a partial sum that
is written, read by a collective, and written again. It sends a whole partial sum to every peer, so
it suits few rows.

Protocol. Tile programs have the lowest ids, and never wait. Each computes a tile of this rank's
partial sum, and stores it into every rank's inbox, its own included. A large problem has more tiles
than a pool has channels, so tiles form groups: the last program of a group to finish signals every
rank. Above them, one program per tile waits for the tile's group from all ranks. It adds what they
sent in rank order, so that all ranks get the same bits. With RMSNorm, each of these programs
handles a row instead, and waits for all groups.

So programs wait only for tile programs. On the same rank these have lower ids: any order that
starts low ids first makes progress. In every call, every rank waits for every tile of every rank.
With this full exchange, the two payload slots of a pool suffice
(:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import swizzle2d, xcd_swizzle
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import ONE_SHOT_ELEMENTS, MatmulAllReduce
from taxfree_kernels.reduction import fused, spaces
from taxfree_kernels.reduction.spaces import (
    padded_columns,
    padded_elements,
    tiles_in,
    tiles_per_signal,
)
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan, Signals


@triton.jit(do_not_specialize=["rank", "m"])
def _push(
    x, w, stride_w, epilogue, out_ptr, buffers, rank, m, n, k, strides,
    GROUP: tl.constexpr, TILE: tl.constexpr, EPILOGUE: tl.constexpr, SCHEDULE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """See the module; GROUPS is the most signals that announce one row, with RMSNorm."""
    gdc_wait(GROUP)
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(buffers, rank)
    tiles_m, tiles_n = tl.cdiv(m, TILE.BLOCK_M), tl.cdiv(n, TILE.BLOCK_N)
    tiles = tiles_m * tiles_n
    senders = tiles * TILE.SPLIT_K
    if program < senders:
        tile, row_begin, col_begin, acc, is_whole = fused.numbered_tile(
            xcd_swizzle(program, senders, TILE.XCDS), m, n, k, x, w, stride_w, buffers, GROUP, TILE
        )
        if is_whole:
            rows = row_begin + tl.arange(0, TILE.BLOCK_M)
            cols = col_begin + tl.arange(0, TILE.BLOCK_N)
            offsets = rows.to(tl.int64)[:, None] * strides.row + cols[None, :]
            mask = (rows < m)[:, None] & (cols < strides.row)[None, :]
            own_ptr = slot_ptr + rank.to(tl.int64) * strides.source
            part = acc.to(slot_ptr.dtype.element_ty)
            fused.send_tile(part, own_ptr, offsets, mask, peers, GROUP, TO_SELF=True)
            fused.announce_tile(
                tile, tiles, 0, buffers.counters_ptr + tiles, peers, GROUP,
                SCHEDULE.TILES_PER_SIGNAL,
            )  # fmt: skip
    elif EPILOGUE.BLOCK_ROW > 0:
        own_ptr = slot_ptr + rank.to(tl.int64) * strides.source
        fused.sum_and_normalise(
            program - senders, 0, tl.cdiv(tiles, SCHEDULE.TILES_PER_SIGNAL), own_ptr, slot_ptr,
            strides.source, strides.row, epilogue, out_ptr, m * n, n, peers, GROUP, EPILOGUE,
            GROUPS,
        )  # fmt: skip
    else:
        tile = program - senders
        tile_m, tile_n = swizzle2d(tile, tiles_m, tiles_n, TILE.GROUP_M)
        rows = tile_m * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        cols = tile_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
        offsets = rows.to(tl.int64)[:, None] * strides.row + cols[None, :]
        total = fused.total_of_tile(
            rows, cols, rows < m, n, epilogue, slot_ptr, strides.source, offsets,
            (rows < m)[:, None] & (cols < strides.row)[None, :], tile // SCHEDULE.TILES_PER_SIGNAL,
            peers, GROUP, EPILOGUE,
        )  # fmt: skip
        fused.store_tile(out_ptr, rows, cols, rows < m, n, total)
    sync.leave(buffers.control_ptr)


class Push(fused.FusedReductionVariant):
    """One kernel: tiles go to all ranks, which add them."""

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        if problem.elements > ONE_SHOT_ELEMENTS:
            return "all of the partial sum would cross the link to every peer"
        return spaces.rows_unsupported_reason(problem) or super().unsupported_reason(
            problem, hardware
        )

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        return [
            spaces.with_room_for_rows(problem, hardware, config)
            for config in super().seed_configs(problem, hardware)
            if spaces.fits_addends(problem, hardware, config)
        ]

    def illegal_reason(
        self, problem: MatmulAllReduce, hardware: Hardware, config: Config
    ) -> str | None:
        crowded = spaces.warps_illegal_reason(
            problem, hardware, config
        ) or spaces.addends_illegal_reason(problem, hardware, config)
        return crowded or super().illegal_reason(problem, hardware, config)

    def signals(self, problem: MatmulAllReduce, config: Config) -> Signals:
        tiles = tiles_in(problem, config)
        return Signals(tiles, -(-tiles // tiles_per_signal(tiles, config)))

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        def layout(problem: MatmulAllReduce) -> fused.Layout:
            tiles = tiles_in(problem, config)
            plane = padded_elements(problem.m, problem.n)
            sums = problem.m if problem.rms_norm else tiles
            strides = fused.Strides(plane, padded_columns(problem.n))
            return fused.Layout(tiles, sums, problem.world_size * plane, (strides,))

        tiles = layout(problem).tiles
        per_signal = tiles_per_signal(tiles, config)
        groups = -(-tiles // per_signal)
        lanes = power_of_2(problem.n, 1) if problem.rms_norm else 0
        constants = {
            "EPILOGUE": fused.Epilogue(problem.bias, problem.residual, lanes, problem.out_scales),
            "SCHEDULE": fused.TileSchedule(per_signal),
            "GROUPS": power_of_2(groups, 1) if problem.rms_norm else 0,
        }
        return fused.FusedReductionPlan(problem, fabric, config, _push, layout, constants)


VARIANT = Push()
