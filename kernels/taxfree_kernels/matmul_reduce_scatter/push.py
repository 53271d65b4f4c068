"""One fused kernel: each finished tile goes to the ranks that own it, which add the partial sums.

Removes the launch tax (one kernel), the bulk-synchronous tax (a tile is sent as soon as it is
finished, and summed once it has arrived from all ranks), and the locality tax of a partial sum that
is written, read by a collective, and written again. Sends each element over the link once.

Protocol. Tile programs have the lowest ids. Each computes a tile of this rank's partial sum, stores
its rows into the inboxes of their owners, possibly including this rank, and never waits. A large
problem has more tiles than a pool has channels, so one signal to every rank announces a group of
tiles; the last program of the group to finish sends it. Programs above them wait for a tile that
overlaps this rank's shard, from all ranks, and add what they sent in rank order. So programs wait
only for tile programs, of which those on the same rank have lower ids, and any order that starts
low ids first makes progress. A rank without rows waits as well, for the last tile. So in each call
every rank signals every rank, and waits for every rank on at least one channel: the full exchange
under which the two payload slots of a pool suffice (:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import translate
from taxfree_kernels.device.sync import gdc_wait, wait_for_everybody
from taxfree_kernels.device.tiles import (
    index_of_tile,
    owner_of_tile,
    rows_in_fp8,
    swizzle2d,
    tile_and_share,
    tiles_of_shards,
    xcd_swizzle,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.reduction import fused, spaces
from taxfree_kernels.reduction.spaces import (
    padded_columns,
    padded_elements,
    staggered_tiles,
    tiles_of,
    tiles_per_signal,
)
from taxfree_kernels.spaces import distinct
from taxfree_kernels.variant import Config, Plan, Space


@triton.jit(do_not_specialize=["rank", "m", "shard_rows"])
def _push(
    x, w, stride_w, out_ptr, buffers, rank, m, n, k, shard_rows, shard,
    GROUP: tl.constexpr, TILE: tl.constexpr, SCHEDULE: tl.constexpr, SCATTER_DIM: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(buffers, rank)
    tiles_m, tiles_n, owner_tiles = tiles_of_shards(m, shard.columns, GROUP, SCATTER_DIM, TILE)
    senders = tiles_m * tiles_n * TILE.SPLIT_K + SCHEDULE.STAGGERED
    if program < senders:
        send_to_owners(
            xcd_swizzle(program, senders, TILE.XCDS), x, w, stride_w, buffers, slot_ptr, peers, m,
            k, shard_rows, shard, GROUP, TILE, SCHEDULE, SCATTER_DIM,
        )  # fmt: skip
    else:
        add_piece(
            program - senders, out_ptr, slot_ptr, peers, m, shard_rows, shard, GROUP, TILE,
            SCHEDULE, SCATTER_DIM,
        )  # fmt: skip
    sync.leave(buffers.control_ptr)


@triton.jit
def send_to_owners(
    number, x, w, stride_w, buffers, slot_ptr, peers, m, k, shard_rows, shard, GROUP: tl.constexpr,
    TILE: tl.constexpr, SCHEDULE: tl.constexpr, SCATTER_DIM: tl.constexpr,
):  # fmt: skip
    """Compute a tile of this rank's partial sum, or a share; store its rows to their owners."""
    tiles_m, tiles_n, owner_tiles = tiles_of_shards(m, shard.columns, GROUP, SCATTER_DIM, TILE)
    tiles = tiles_m * tiles_n
    tile, split = tile_and_share(number, TILE.SPLIT_K, SCHEDULE.STAGGERED)
    tile_m, tile_n = swizzle2d(tile, tiles_m, tiles_n, TILE.GROUP_M)
    rows = tile_m * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
    owner, shard_row, first_col, shard_col = owner_of_tile(
        rows, tile_n, owner_tiles, shard_rows, shard.columns, GROUP, SCATTER_DIM, TILE.BLOCK_N
    )
    acc, is_whole = fused.partial_tile(
        tile, split, tiles, tile_m * TILE.BLOCK_M, m, first_col + shard_col,
        first_col + shard.columns, x, w, stride_w, buffers, k, GROUP, TILE, SCHEDULE.STAGGERED,
    )  # fmt: skip
    if is_whole:
        cols = shard_col + tl.arange(0, TILE.BLOCK_N)
        own_ptr = slot_ptr + peers.rank.to(tl.int64) * shard.stride_source
        inbox_ptr = translate(own_ptr, peers, owner)
        target_ptr = inbox_ptr + shard_row.to(tl.int64) * shard.stride_row
        mask = (rows < m)[:, None] & (cols < shard.stride_row)[None, :]
        target = target_ptr[:, None] + cols[None, :]
        WIRE: tl.constexpr = slot_ptr.dtype.element_ty
        if WIRE.primitive_bitwidth == 8:
            part, scale = rows_in_fp8(tl.where((cols < shard.columns)[None, :], acc, 0.0), WIRE)
            scales_ptr = tl.cast(inbox_ptr + shard.scales, tl.pointer_type(tl.float32))
            at_row = shard_row.to(tl.int64) * owner_tiles + shard_col // TILE.BLOCK_N
            tl.store(scales_ptr + at_row, scale, mask=rows < m)
            tl.store(target, part, mask=mask)
        else:
            tl.store(target, acc.to(WIRE), mask=mask)
        fused.announce_tile(
            tile, tiles, 0, buffers.counters_ptr + tiles, peers, GROUP, SCHEDULE.TILES_PER_SIGNAL
        )


@triton.jit
def add_piece(
    number, out_ptr, slot_ptr, peers, m, shard_rows, shard, GROUP: tl.constexpr,
    TILE: tl.constexpr, SCHEDULE: tl.constexpr, SCATTER_DIM: tl.constexpr,
):  # fmt: skip
    """Add a piece of a tile of this rank's shard, once all ranks have sent it."""
    tiles_m, tiles_n, owner_tiles = tiles_of_shards(m, shard.columns, GROUP, SCATTER_DIM, TILE)
    ROWS: tl.constexpr = TILE.BLOCK_M // SCHEDULE.PIECES
    index, piece = number // SCHEDULE.PIECES, number % SCHEDULE.PIECES
    tile_m, tile_n = index // owner_tiles, index % owner_tiles
    if SCATTER_DIM == 0:
        tile_m += peers.rank * shard_rows // TILE.BLOCK_M
    sum_rows = tile_m * TILE.BLOCK_M + piece * ROWS + tl.arange(0, ROWS)
    own_row = sum_rows
    if SCATTER_DIM == 0:
        own_row -= peers.rank * shard_rows
    cols = tile_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
    scale_ptrs = None
    if slot_ptr.dtype.element_ty.primitive_bitwidth == 8:
        scales_ptr = tl.cast(slot_ptr + shard.scales, tl.pointer_type(tl.float32))
        scale_ptrs = scales_ptr + (own_row.to(tl.int64) * owner_tiles + tile_n)[:, None]
    if SCATTER_DIM == 1:
        tile_n += peers.rank * owner_tiles
    tile = index_of_tile(min(tile_m, tiles_m - 1), tile_n, tiles_m, tiles_n, TILE.GROUP_M)
    arrived = wait_for_everybody(peers, tile // SCHEDULE.TILES_PER_SIGNAL, GROUP)
    is_own = own_row < shard_rows
    if SCATTER_DIM == 0:
        is_own = is_own & (own_row >= 0)
    offsets = own_row.to(tl.int64)[:, None] * shard.stride_row + cols[None, :]
    row_was_sent = (is_own & (sum_rows < m))[:, None]
    was_sent = row_was_sent & (cols < shard.stride_row)[None, :]
    total = fused.sum_of_sources(
        slot_ptr, shard.stride_source, offsets, was_sent, GROUP, None, 0, scale_ptrs, row_was_sent
    )
    total = tl.where(arrived, total, float("nan"))
    out = out_ptr + own_row.to(tl.int64)[:, None] * shard.columns + cols[None, :]
    is_stored = is_own[:, None] & (cols < shard.columns)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_stored)


class Push(fused.FusedReductionVariant):
    """One kernel: tiles go to their owners, which add them."""

    sends_fp8 = True

    def space(self, problem: MatmulReduceScatter, hardware: Hardware) -> Space:
        pieces = (1, 2, 4) if hardware.backend != "interpreter" else (1, 2)
        return {**super().space(problem, hardware), "PIECES": pieces, "STAGGERED": (False, True)}

    def seed_configs(
        self, problem: MatmulReduceScatter, hardware: Hardware
    ) -> list[dict[str, Any]]:
        counts = self.space(problem, hardware)["PIECES"]
        configs = []
        for config in super().seed_configs(problem, hardware):
            tiles, _ = _tiles_and_sums(problem, config)
            config["PIECES"] = _pieces(problem, hardware, config, counts)
            configs.append(spaces.staggered_if_worth_it(problem, hardware, config, tiles))
        return distinct([*configs, {**configs[0], "STAGGERED": False}])

    def illegal_reason(
        self, problem: MatmulReduceScatter, hardware: Hardware, config: Config
    ) -> str | None:
        tiles, _ = _tiles_and_sums(problem, config)
        reason = spaces.staggered_illegal_reason(hardware, config, tiles, problem.k)
        return reason or super().illegal_reason(problem, hardware, config)

    def plan(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> Plan:
        def layout(problem: MatmulReduceScatter) -> fused.Layout:
            tiles, sums = _tiles_and_sums(problem, config)
            rows, columns = problem.shard_rows, problem.shard_columns
            stride, scales = padded_elements(rows, columns), None
            if config["WIRE"] == "fp8":
                scales = stride
                stride += padded_elements(rows, 4 * -(-columns // config["BLOCK_N"]))
            shard = fused.OutputShard(columns, stride, padded_columns(columns), scales)
            slot = problem.world_size * stride
            return fused.Layout(tiles, sums * config["PIECES"], slot, (rows, shard))

        tiles, _ = _tiles_and_sums(problem, config)
        schedule = fused.TileSchedule(
            tiles_per_signal(tiles, config),
            config["PIECES"],
            staggered_tiles(fabric.hardware, config),
        )
        constants = {"SCATTER_DIM": problem.scatter_dim, "SCHEDULE": schedule}
        return fused.FusedReductionPlan(problem, fabric, config, _push, layout, constants)


def _tiles_and_sums(problem: MatmulReduceScatter, config: Config) -> tuple[int, int]:
    """Numbers of tiles and of adding programs."""
    block_m = config["BLOCK_M"]
    owner_tiles = -(-problem.shard_columns // config["BLOCK_N"])
    tiles = -(-problem.m // block_m) * owner_tiles
    if problem.scatter_dim == 1:
        return tiles * problem.world_size, tiles
    # a shard may begin and end within a tile
    return tiles, (-(-problem.shard_rows // block_m) + 1) * owner_tiles


def _pieces(
    problem: MatmulReduceScatter, hardware: Hardware, config: Config, counts: tuple[int, ...]
) -> int:
    """Adding programs per own tile, so that all compute units work; 1 for few rows."""
    if min(problem.shard_rows, config["BLOCK_M"]) < 32:
        return counts[0]
    tiles = tiles_of(
        problem.shard_rows, problem.shard_columns, config["BLOCK_M"], config["BLOCK_N"]
    )
    enough = (count for count in counts if count * tiles >= hardware.compute_units)
    return next(enough, counts[-1])


VARIANT = Push()
