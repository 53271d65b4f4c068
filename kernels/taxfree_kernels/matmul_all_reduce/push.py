"""One fused kernel: each finished tile goes to every rank, and every rank adds the partial sums.

Removes the launch tax (one kernel), the bulk-synchronous tax (a tile is sent as soon as it is
finished, and summed once it has arrived from all ranks), and the locality tax of a partial sum that
is written, read by a collective, and written again. Sends a whole partial sum to every peer: for
few rows.

Protocol. Tile programs have the lowest ids. Each computes a tile of this rank's partial sum, stores
it into every rank's inbox, its own included, and never waits. A large problem has more tiles than a
pool has channels, so one signal to every rank announces a group of tiles; the last program of the
group to finish sends it. Above them, one program per tile waits for the tile's group from all ranks
and adds what they sent in rank order, so that all ranks get the same bits. When the sum is
normalised, each of these programs handles a row instead, and waits for all groups. So programs wait
only for tile programs, of which those on the same rank have lower ids, and any order that starts
low ids first makes progress. Every tile is waited for from every rank in every call: the full
exchange under which the two payload slots of a pool suffice
(:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.pdl import gdc_wait
from taxfree_kernels.device.peers import Peers
from taxfree_kernels.device.tiles import swizzle2d, xcd_swizzle
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import ONE_SHOT_ELEMENTS, MatmulAllReduce
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.constants import block_row, tiles_per_signal
from taxfree_kernels.reduction.fused import FusedPlan, FusedVariant, Layout
from taxfree_kernels.reduction.rows import sum_and_normalise
from taxfree_kernels.reduction.sizes import padded_columns, padded_elements, tiles_of
from taxfree_kernels.reduction.tile import (
    announce_tile,
    numbered_tile,
    send_tile,
    store_tile,
    total_of_tile,
)
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan


@triton.jit(do_not_specialize=["rank", "m"])
def _push(
    x, w, stride_wk, stride_wn, bias_ptr, residual_ptr, norm_weight_ptr, eps_ptr, out_ptr,
    inbox_ptr, stride_slot, control_ptr, partials_ptr, counters_ptr, heap_bases, rank, m, n, k,
    stride_source, stride_row, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK_ROW: tl.constexpr, GROUPS: tl.constexpr,
    TILES_PER_SIGNAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See the module; BLOCK_ROW is 0 when the sum is not normalised, otherwise at least n."""
    gdc_wait(GROUP)
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot_ptr = tl.multiple_of(inbox_ptr + (generation % 2) * stride_slot, 16)
    tiles_m, tiles_n = tl.cdiv(m, TILE.BLOCK_M), tl.cdiv(n, TILE.BLOCK_N)
    tiles = tiles_m * tiles_n
    senders = tiles * TILE.SPLIT_K
    if program < senders:
        tile, row_begin, col_begin, acc, is_whole = numbered_tile(
            xcd_swizzle(program, senders, TILE.XCDS), m, n, k, x, w, stride_wk, stride_wn,
            partials_ptr, counters_ptr, GROUP, TILE,
        )  # fmt: skip
        if is_whole:
            rows = row_begin + tl.arange(0, TILE.BLOCK_M)
            cols = col_begin + tl.arange(0, TILE.BLOCK_N)
            at = rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
            mask = (rows < m)[:, None] & (cols < stride_row)[None, :]
            own_ptr = slot_ptr + rank.to(tl.int64) * stride_source
            part = acc.to(slot_ptr.dtype.element_ty)
            send_tile(part, own_ptr, at, mask, peers, GROUP, TO_SELF=True)
            announce_tile(tile, tiles, 0, counters_ptr + tiles, peers, GROUP, TILES_PER_SIGNAL)
    elif BLOCK_ROW > 0:
        own_ptr = slot_ptr + rank.to(tl.int64) * stride_source
        sum_and_normalise(
            program - senders, 0, tl.cdiv(tiles, TILES_PER_SIGNAL), own_ptr, slot_ptr,
            stride_source, stride_row, bias_ptr, residual_ptr, norm_weight_ptr, eps_ptr, out_ptr, m
            * n, n, peers, GROUP, HAS_BIAS, HAS_RESIDUAL, GROUPS, BLOCK_ROW,
        )  # fmt: skip
    else:
        tile = program - senders
        tile_m, tile_n = swizzle2d(tile, tiles_m, tiles_n, TILE.GROUP_M)
        rows = tile_m * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
        cols = tile_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
        at = rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
        total = total_of_tile(
            rows, cols, rows < m, n, bias_ptr, residual_ptr, slot_ptr, stride_source, at, (rows <
            m)[:, None] & (cols < stride_row)[None, :], tile // TILES_PER_SIGNAL, peers, GROUP,
            HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
        store_tile(out_ptr, rows, cols, rows < m, n, total)
    sync.leave(control_ptr)


class Push(FusedVariant):
    """Tiles to everybody, and their sums, in one kernel."""

    name = "push"

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        if problem.elements > ONE_SHOT_ELEMENTS:
            return "all of the partial sum would cross the link to every peer"
        return spaces.rows_prune_reason(problem) or super().unsupported_reason(problem, hardware)

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        return [
            spaces.with_room_for_rows(problem, hardware, config)
            for config in super().seed_configs(problem, hardware)
            if spaces.fits_addends(problem, hardware, config)
        ]

    def prune_reason(
        self, problem: MatmulAllReduce, hardware: Hardware, config: Config
    ) -> str | None:
        crowded = spaces.warps_prune_reason(problem, hardware, config)
        return crowded or super().prune_reason(problem, hardware, config)

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        def layout(problem: MatmulAllReduce) -> Layout:
            tiles = tiles_of(problem.m, problem.n, config["BLOCK_M"], config["BLOCK_N"])
            plane = padded_elements(problem.m, problem.n)
            sums = problem.m if problem.rms_norm else tiles
            sizes = (plane, padded_columns(problem.n))
            return Layout(tiles, sums, problem.world_size * plane, sizes)

        tiles = layout(problem).tiles
        groups = -(-tiles // tiles_per_signal(tiles, config))
        constants = {
            "HAS_BIAS": problem.bias,
            "HAS_RESIDUAL": problem.residual,
            "BLOCK_ROW": block_row(problem),
            "GROUPS": power_of_2(groups, 1) if problem.rms_norm else 0,
        }
        return FusedPlan(problem, fabric, config, _push, layout, constants)


VARIANT = Push()
