"""One fused kernel: each finished tile goes to the ranks that own it, which add the partial sums.

Removes the launch tax (one kernel), the bulk-synchronous tax (a tile leaves when it is finished,
and is summed when all ranks' have come), and the locality tax of a partial sum that is written,
read by a collective, and written again. Sends each element over the link once.

Protocol. Tile programs have the lowest ids. They compute a tile of this rank's partial sum, store
its rows into the inboxes of their owners, this rank perhaps included, and wait for nobody. One
signal to everybody announces a group of tiles, because a large problem has more tiles than a pool
has channels: the last program of a group to finish sends it. Above them, programs wait for a tile
that touches the own shard, from all ranks, and add what they sent in the order of the ranks. So
programs wait only for tile programs, of whom the own rank's have lower ids, and any order that
starts low ids first makes progress. A rank without rows waits as well, for the last tile. So in
each call every rank signals everybody, and waits for everybody on one channel at least: the full
exchange under which the two payload slots of a pool suffice
(:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.exchange import wait_for_everybody
from taxfree_kernels.device.tiles import own_chiplet_first, tile_of
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.fused import FusedPlan, FusedVariant
from taxfree_kernels.partial_sums.sizes import padded_columns, padded_elements
from taxfree_kernels.partial_sums.tile import (
    announce_tile,
    partial_tile,
    sum_of_sources,
    tile_and_share,
)
from taxfree_kernels.spaces import distinct
from taxfree_kernels.variant import Config, Plan, Space


@triton.jit(do_not_specialize=["rank", "m", "shard_rows"])
def _push(
    x, w, stride_wk, stride_wn, out_ptr,
    inbox_ptr, stride_slot, control_ptr, partials_ptr, counters_ptr,
    heap_bases, rank, m, n, k, shard_rows, shard_columns, stride_source, stride_row,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, SCATTER_DIM: tl.constexpr,
    TILES_PER_SIGNAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr, XCDS: tl.constexpr, TMA: tl.constexpr, W_NK: tl.constexpr,
    STAGGERED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    slot_ptr = tl.multiple_of(inbox_ptr + (generation % 2) * stride_slot, 16)
    # Columns of tiles never cross from one rank's shard to the next; rows of tiles may.
    owner_tiles = tl.cdiv(shard_columns, BLOCK_N)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = owner_tiles * WORLD if SCATTER_DIM == 1 else owner_tiles
    tiles = tiles_m * tiles_n
    senders = tiles * SPLIT_K + STAGGERED
    if program < senders:
        index = own_chiplet_first(program, senders, XCDS)
        tile, split = tile_and_share(index, SPLIT_K, STAGGERED)
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        if SCATTER_DIM == 0:
            owner = tl.minimum(rows // shard_rows, WORLD - 1)
            shard_row = rows - owner * shard_rows
            first_col = 0
        else:
            owner = tile_n // owner_tiles
            shard_row = rows
            first_col = owner * shard_columns
        shard_col = tile_n % owner_tiles * BLOCK_N
        acc, is_whole = partial_tile(
            tile, split, tiles, tile_m * BLOCK_M, m,
            first_col + shard_col, first_col + shard_columns,
            x, w, stride_wk, stride_wn, partials_ptr, counters_ptr, k,
            BACKEND, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, EVEN_K, SWAP_AB, TMA, W_NK, STAGGERED,
        )  # fmt: skip
        if is_whole:
            cols = shard_col + tl.arange(0, BLOCK_N)
            own_ptr = slot_ptr + rank.to(tl.int64) * stride_source
            target_ptr = sync.translate(own_ptr, heap_bases, rank, owner)
            target_ptr += shard_row.to(tl.int64) * stride_row
            mask = (rows < m)[:, None] & (cols < stride_row)[None, :]
            target = target_ptr[:, None] + cols[None, :]
            tl.store(target, acc.to(slot_ptr.dtype.element_ty), mask=mask)
            announce_tile(
                tile, tiles, 0, counters_ptr + tiles, control_ptr, generation, heap_bases, rank,
                WORLD, BACKEND, TILES_PER_SIGNAL,
            )  # fmt: skip
    else:
        index = program - senders
        tile_m, tile_n = index // owner_tiles, index % owner_tiles
        if SCATTER_DIM == 0:
            tile_m += rank * shard_rows // BLOCK_M
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        shard_row = rows
        if SCATTER_DIM == 0:
            shard_row -= rank * shard_rows
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if SCATTER_DIM == 1:
            tile_n += rank * owner_tiles
        tile = index_of_tile(min(tile_m, tiles_m - 1), tile_n, tiles_m, tiles_n, GROUP_M)
        arrived = wait_for_everybody(
            control_ptr, tile // TILES_PER_SIGNAL, generation, heap_bases, rank, WORLD, BACKEND
        )
        own_rows = shard_row < shard_rows
        if SCATTER_DIM == 0:
            own_rows = own_rows & (shard_row >= 0)
        at = shard_row.to(tl.int64)[:, None] * stride_row + cols[None, :]
        mask = (own_rows & (rows < m))[:, None] & (cols < stride_row)[None, :]
        total = sum_of_sources(slot_ptr, stride_source, at, mask, WORLD)
        total = tl.where(arrived, total, float("nan"))
        out = out_ptr + shard_row.to(tl.int64)[:, None] * shard_columns + cols[None, :]
        mask = own_rows[:, None] & (cols < shard_columns)[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)
    sync.leave(control_ptr)


@triton.jit
def index_of_tile(tile_m, tile_n, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The number that ``tile_of`` gives this place to."""
    first_m = tile_m // GROUP_M * GROUP_M
    group_size = min(tiles_m - first_m, GROUP_M)
    return first_m * tiles_n + tile_n * group_size + tile_m - first_m


class Push(FusedVariant):
    """Tiles to their owners, and their sums, in one kernel."""

    name = "push"

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {**super().space(problem, hardware), "STAGGERED": (False, True)}

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        configs = super().first_configs(problem, hardware)
        return distinct(
            [
                spaces.staggered_if_worth_it(
                    problem, hardware, each, _tiles_and_sums(problem, each)[0]
                )
                for each in configs
            ]
            + configs[:1]
        )

    def refuses_config(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        tiles, _ = _tiles_and_sums(problem, config)
        reason = spaces.refuses_staggered(hardware, config, tiles, problem.k)
        return reason or super().refuses_config(problem, hardware, config)

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        tiles, sums = _tiles_and_sums(problem, config)
        rows, columns = problem.shard_rows, problem.shard_columns
        sizes = (rows, columns, padded_elements(rows, columns), padded_columns(columns))
        constants = {
            "SCATTER_DIM": problem.scatter_dim,
            "STAGGERED": spaces.staggered_tiles(fabric.hardware, config),
        }
        return FusedPlan(
            problem, fabric, config, _push, tiles, sums, problem.inbox_elements, sizes, constants
        )


def _tiles_and_sums(problem: Any, config: Config) -> tuple[int, int]:
    """Tiles of the partial sum, and programs that add."""
    block_m = config["BLOCK_M"]
    owner_tiles = -(-problem.shard_columns // config["BLOCK_N"])
    tiles = -(-problem.m // block_m) * owner_tiles
    if problem.scatter_dim == 1:
        return tiles * problem.world_size, tiles
    # a shard may begin and end within a tile
    return tiles, (-(-problem.shard_rows // block_m) + 1) * owner_tiles


VARIANT = Push()
