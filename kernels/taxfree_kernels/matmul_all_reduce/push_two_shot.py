"""One fused kernel: each finished tile goes to the rank that owns it, which sends the sum to all.

Removes the launch tax (one kernel), the bulk-synchronous tax (a tile is sent as soon as it is
finished, summed once it has arrived from all ranks, and sent on, while others are computed), and
the locality tax of a partial sum that is written, read by a collective, and written again. Every
link carries 2 / world_size of the bytes of ``push``, at the cost of one more signal, so it suits
many rows and many ranks.

Tile t belongs to rank t % WORLD, so that consecutive tiles take different links, and a ragged M is
shared evenly. A slot holds the partial sums of this rank's own tiles from every source, in the wire
dtype, [source, own tile, BLOCK_M, BLOCK_N]; then the sums of all tiles, in the output's dtype,
[tile, BLOCK_M, BLOCK_N]. In fp8 each own tile is followed by the scales of its rows, float32
[BLOCK_M]: what a link carries of a tile and its sum is 3/4 of that in 16 bits.

Protocol. Three roles. Tile programs compute a tile of this rank's partial sum, store it into the
owner's inbox, and never wait. One signal to every rank announces a group of tiles, of which all
ranks own equally many, except in the last group: the group's last program to finish sends it.
Adders wait for a group from all ranks, add a piece of one of this rank's tiles in rank order, store
it into the output and into every peer's slot, and announce the group's sums in the same way, on
channels of their own. Copiers wait for the owner of a peer's tile, and copy the sum into the
output. The adders of a group have higher ids than its tile programs, some of them interleaved with
those of later groups, so that sums travel while tiles are computed; copiers have the highest ids.
So a program waits only for programs with lower ids than its own, on any rank, and any order that
starts low ids first makes progress. All ranks get the bits that the owner computed; after a failed
wait these are NaN, which is sent on. Every rank has the same number of adders, even one that owns
fewer tiles, or none. So in each call every rank signals, and waits for, every rank on each group's
channel: the full exchange under which the two payload slots of a pool suffice
(:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import CHANNELS, translate
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import in_turns, rows_in_fp8, swizzle2d
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.rms_norm import NormAfter
from taxfree_kernels.reduction import fused, spaces
from taxfree_kernels.reduction.spaces import staggered_tiles, tiles_in, tiles_per_signal
from taxfree_kernels.variant import ITEM_BYTES, WIRE_BYTES, Config, Plan, Space


class TwoShotInbox(NamedTuple):
    """The slot of the running call; pointers, and strides in elements.

    Args:
        parts_ptr: the partial sums of own tiles, `stride_source` from one source to the next.
        sums_ptr: the sums of all tiles.
        stride_row: see :func:`offsets_in_tile`.
    """

    parts_ptr: Any
    sums_ptr: Any
    stride_source: Any
    stride_row: Any


class Counts(NamedTuple):
    """Numbers of tiles: of rows and columns, and all; of groups of tiles that share a signal."""

    tiles_m: Any
    tiles_n: Any
    tiles: Any
    groups: Any


@triton.jit(do_not_specialize=["rank", "m", "ahead"])
def _push_two_shot(
    x, w, stride_w, addends, out_ptr, buffers, rank, m, n, k, stride_row, ahead,
    GROUP: tl.constexpr, TILE: tl.constexpr, EPILOGUE: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        stride_row: see :func:`offsets_in_tile`.
        ahead: number of tile programs before the first adder: whole groups, or all.
    """
    gdc_wait(GROUP)
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(buffers, rank)
    tiles_m, tiles_n = tl.cdiv(m, TILE.BLOCK_M), tl.cdiv(n, TILE.BLOCK_N)
    tiles = tiles_m * tiles_n
    groups, owned = tl.cdiv(tiles, SCHEDULE.TILES_PER_SIGNAL), tl.cdiv(tiles, GROUP.WORLD)
    counts = Counts(tiles_m, tiles_n, tiles, groups)
    senders, adders = tiles * TILE.SPLIT_K + SCHEDULE.STAGGERED, owned * SCHEDULE.PIECES
    ADDERS_PER_SIGNAL: tl.constexpr = SCHEDULE.TILES_PER_SIGNAL // GROUP.WORLD * SCHEDULE.PIECES
    stride_source = owned.to(tl.int64) * elements_of_part(TILE, slot_ptr.dtype.element_ty)
    sums_ptr = tl.cast(
        slot_ptr + GROUP.WORLD * stride_source, tl.pointer_type(out_ptr.dtype.element_ty)
    )
    inbox = TwoShotInbox(slot_ptr, sums_ptr, stride_source, stride_row)
    is_sender, number = in_turns(
        program, senders, ahead, SCHEDULE.TILES_PER_SIGNAL * TILE.SPLIT_K, ADDERS_PER_SIGNAL,
        TILE.XCDS,
    )  # fmt: skip
    if is_sender:
        send_to_owner(
            number, x, w, stride_w, buffers, inbox, counts, peers, m, n, k, GROUP, TILE, SCHEDULE
        )
    elif number < adders:
        add_piece(
            number, adders, addends, out_ptr, buffers, inbox, counts, peers, m, n, GROUP, TILE,
            EPILOGUE, SCHEDULE,
        )  # fmt: skip
    else:
        copy_sum(number - adders, out_ptr, inbox, counts, peers, m, n, GROUP, TILE, SCHEDULE)
    sync.leave(buffers.control_ptr)


@triton.jit
def send_to_owner(
    number, x, w, stride_w, buffers, inbox, counts, peers, m, n, k, GROUP: tl.constexpr,
    TILE: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of this rank's partial sum, or a share of one; store it to its owner."""
    tile, row_begin, col_begin, acc, is_whole = fused.numbered_tile(
        number, m, n, k, x, w, stride_w, buffers, GROUP, TILE, SCHEDULE.STAGGERED
    )
    if is_whole:
        row = tl.arange(0, TILE.BLOCK_M)
        offsets = offsets_in_tile(row, inbox.stride_row, TILE.BLOCK_N)
        own_ptr = inbox.parts_ptr + peers.rank.to(tl.int64) * inbox.stride_source
        target_ptr = translate(own_ptr, peers, tile % GROUP.WORLD)
        WIRE: tl.constexpr = inbox.parts_ptr.dtype.element_ty
        target_ptr += (tile // GROUP.WORLD).to(tl.int64) * elements_of_part(TILE, WIRE)
        mask = (row_begin + row < m)[:, None]
        if WIRE.primitive_bitwidth == 8:
            is_column = col_begin + tl.arange(0, TILE.BLOCK_N) < n
            part, scale = rows_in_fp8(tl.where(is_column[None, :], acc, 0.0), WIRE)
            scale_ptrs = scales_of_rows(target_ptr, row, inbox.stride_row, TILE)
            tl.store(scale_ptrs, scale, mask=row_begin + row < m)
            tl.store(target_ptr + offsets, part, mask=mask)
        else:
            tl.store(target_ptr + offsets, acc.to(WIRE), mask=mask)
        fused.announce_tile(
            tile, counts.tiles, 0, buffers.counters_ptr + counts.tiles, peers, GROUP,
            SCHEDULE.TILES_PER_SIGNAL,
        )  # fmt: skip


@triton.jit
def add_piece(
    number, adders, addends, out_ptr, buffers, inbox, counts, peers, m, n, GROUP: tl.constexpr,
    TILE: tl.constexpr, EPILOGUE: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Add a piece of one of this rank's tiles, once all ranks have sent it; send the sum to all."""
    ROWS: tl.constexpr = TILE.BLOCK_M // SCHEDULE.PIECES
    ELEMENTS: tl.constexpr = TILE.BLOCK_M * TILE.BLOCK_N
    OWNED_PER_SIGNAL: tl.constexpr = SCHEDULE.TILES_PER_SIGNAL // GROUP.WORLD
    owned_tile, piece = number // SCHEDULE.PIECES, number % SCHEDULE.PIECES
    tile = owned_tile * GROUP.WORLD + peers.rank
    tile_m, tile_n = swizzle2d(  # the last adders may have no tile
        min(tile, counts.tiles - 1), counts.tiles_m, counts.tiles_n, TILE.GROUP_M
    )
    row = piece * ROWS + tl.arange(0, ROWS)
    rows, cols = tile_m * TILE.BLOCK_M + row, tile_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
    row_mask = rows < tl.where(tile < counts.tiles, m, 0)
    offsets = offsets_in_tile(row, inbox.stride_row, TILE.BLOCK_N)
    WIRE: tl.constexpr = inbox.parts_ptr.dtype.element_ty
    part_ptr = inbox.parts_ptr + owned_tile.to(tl.int64) * elements_of_part(TILE, WIRE)
    scale_ptrs = None
    if WIRE.primitive_bitwidth == 8:
        scale_ptrs = scales_of_rows(part_ptr, row, inbox.stride_row, TILE)[:, None]
    total = fused.total_of_tile(
        rows, cols, row_mask, n, addends, part_ptr, inbox.stride_source, offsets,
        row_mask[:, None], owned_tile // OWNED_PER_SIGNAL, peers, GROUP, EPILOGUE, scale_ptrs,
    )  # fmt: skip
    result = total.to(out_ptr.dtype.element_ty)
    sum_ptr = inbox.sums_ptr + tile.to(tl.int64) * ELEMENTS
    for step in tl.static_range(1, GROUP.WORLD):
        target_ptr = translate(sum_ptr, peers, (peers.rank + step) % GROUP.WORLD)
        tl.store(target_ptr + offsets, result, mask=row_mask[:, None])
    fused.announce_tile(
        number, adders, counts.groups, buffers.counters_ptr + counts.tiles + counts.groups, peers,
        GROUP, OWNED_PER_SIGNAL * SCHEDULE.PIECES,
    )  # fmt: skip
    fused.store_tile(out_ptr, rows, cols, row_mask, n, result)


@triton.jit
def copy_sum(
    copier, out_ptr, inbox, counts, peers, m, n, GROUP: tl.constexpr, TILE: tl.constexpr,
    SCHEDULE: tl.constexpr,
):  # fmt: skip
    """Copy the sum of a peer's tile to the output, once it has arrived."""
    owned_tile = copier // (GROUP.WORLD - 1)
    source = (peers.rank + 1 + copier % (GROUP.WORLD - 1)) % GROUP.WORLD
    tile = owned_tile * GROUP.WORLD + source
    if tile < counts.tiles:
        tile_m, tile_n = swizzle2d(tile, counts.tiles_m, counts.tiles_n, TILE.GROUP_M)
        row = tl.arange(0, TILE.BLOCK_M)
        rows = tile_m * TILE.BLOCK_M + row
        cols = tile_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)
        group = owned_tile // (SCHEDULE.TILES_PER_SIGNAL // GROUP.WORLD)
        arrived = sync.wait(peers, counts.groups + group, source, GROUP)
        sum_ptr = inbox.sums_ptr + tile.to(tl.int64) * (TILE.BLOCK_M * TILE.BLOCK_N)
        offsets = offsets_in_tile(row, inbox.stride_row, TILE.BLOCK_N)
        result = tl.load(sum_ptr + offsets, mask=(rows < m)[:, None])
        result = tl.where(arrived, result, float("nan"))
        fused.store_tile(out_ptr, rows, cols, rows < m, n, result)


@triton.jit
def offsets_in_tile(row, stride_row, BLOCK_N: tl.constexpr):
    """int64 offsets of all elements of these rows of a tile.

    Args:
        stride_row: BLOCK_N, passed at run time. A compiler that knows how small the offsets are
            emits CDNA buffer accesses, lane by lane if the base was loaded from memory.
    """
    return row.to(tl.int64)[:, None] * stride_row + tl.arange(0, BLOCK_N)[None, :]


@triton.constexpr_function
def elements_of_part(tile, wire):
    """Elements of a source's partial sum of a tile in an inbox, with scales if there are any."""
    return tile.BLOCK_M * (tile.BLOCK_N + (_SCALE_BYTES if wire.primitive_bitwidth == 8 else 0))


@triton.jit
def scales_of_rows(tile_ptr, row, stride_row, TILE: tl.constexpr):
    """Pointers to the scales of these rows of a tile in fp8; see :func:`offsets_in_tile`."""
    scales_ptr = tl.cast(tile_ptr + TILE.BLOCK_M * TILE.BLOCK_N, tl.pointer_type(tl.float32))
    return scales_ptr + row.to(tl.int64) * (stride_row // TILE.BLOCK_N)


class PushTwoShotPlan(fused.FusedReductionPlan):
    """A plan whose kernel takes a bias and a residual, but no norm: `NormAfter` launches that."""

    def _epilogue(
        self, addends: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        ((bias, residual, *_),) = super()._epilogue(addends, out)
        return (fused.Addends(bias, residual),)


class PushTwoShot(fused.FusedReductionVariant):
    """One kernel: tiles go to their owners, sums to all ranks."""

    sends_fp8 = True

    def space(self, problem: MatmulAllReduce, hardware: Hardware) -> Space:
        is_gpu = hardware.backend != "interpreter"
        return {
            **super().space(problem, hardware),
            "SIGNALS": spaces.signal_counts(hardware, CHANNELS // 2),  # half are for sums
            "PIECES": (1, 2, 4) if is_gpu else (1, 2),
            "AHEAD": (1, 2, 4, _ALL_WAVES) if is_gpu else (0, 1),
            "STAGGERED": (False, True),
        }

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        space, units = self.space(problem, hardware), hardware.compute_units
        configs = []
        for config in super().seed_configs(problem, hardware):
            if self.illegal_reason(problem, hardware, config):
                continue
            tiles = tiles_in(problem, config)
            adders = -(-tiles // problem.world_size)
            enough = (  # with many ranks each adds few tiles, so use the most pieces
                count
                for count in space["PIECES"]
                if 2 * count * adders >= units
                and problem.world_size <= spaces.FEW_RANKS
                and spaces.fits_addends(problem, hardware, config, count)
            )
            config["PIECES"] = next(enough, space["PIECES"][-1])
            config["AHEAD"] = min(2, spaces.tiles_at_once(problem, hardware, config))
            configs.append(spaces.staggered_if_worth_it(problem, hardware, config, tiles))
        first = configs[0]
        if tiles_in(problem, first) * first["SPLIT_K"] > units:  # more than one wave
            configs.append({**first, "STAGGERED": not first["STAGGERED"]})
            configs.append({**first, "AHEAD": space["AHEAD"][-1]})
        return [
            config for config in configs if self.illegal_reason(problem, hardware, config) is None
        ]

    def illegal_reason(
        self, problem: MatmulAllReduce, hardware: Hardware, config: Config
    ) -> str | None:
        needed = WIRE_BYTES[config["WIRE"]] * slot_elements(problem, config)
        if needed > problem.slot_bytes:
            return f"{needed} bytes of whole tiles in a slot of {problem.slot_bytes}"
        reason = spaces.addends_illegal_reason(
            problem, hardware, config, config["PIECES"]
        ) or spaces.staggered_illegal_reason(hardware, config, tiles_in(problem, config), problem.k)
        if reason is not None:
            return reason
        return super().illegal_reason(problem, hardware, config)

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        world = problem.world_size
        per_signal = tiles_per_signal(tiles_in(problem, config), config)
        schedule = fused.TileSchedule(
            -(-per_signal // world) * world,  # of which all ranks own equally many
            config["PIECES"],
            staggered_tiles(fabric.hardware, config),
        )
        turn = schedule.TILES_PER_SIGNAL * config["SPLIT_K"]
        turns_ahead = -(-config["AHEAD"] * fabric.hardware.compute_units // turn)

        def layout(problem: MatmulAllReduce) -> fused.Layout:
            tiles = tiles_in(problem, config)
            ahead = min(turns_ahead * turn, tiles * config["SPLIT_K"])
            ahead += schedule.STAGGERED
            others = -(-tiles // world) * (config["PIECES"] + world - 1)
            sizes = (config["BLOCK_N"], ahead)
            return fused.Layout(tiles, others, slot_elements(problem, config), sizes)

        epilogue = fused.Epilogue(problem.bias, problem.residual)
        constants = {"EPILOGUE": epilogue, "SCHEDULE": schedule}
        return PushTwoShotPlan(problem, fabric, config, _push_two_shot, layout, constants)


_ALL_WAVES = 64  # all waves of tile programs, but of the largest problems in the smallest tiles
_SCALE_BYTES = 4


def slot_elements(problem: MatmulAllReduce, config: Config) -> int:
    """Elements of a slot, in the WIRE type: own tiles from every source, and all sums."""
    tiles, elements = tiles_in(problem, config), config["BLOCK_M"] * config["BLOCK_N"]
    inboxes = -(-tiles // problem.world_size) * problem.world_size
    wire, item = WIRE_BYTES[config["WIRE"]], ITEM_BYTES[problem.dtype]
    scales = inboxes * config["BLOCK_M"] * _SCALE_BYTES if config["WIRE"] == "fp8" else 0
    return int(inboxes * elements + scales + tiles * elements * item // wire)


class PushTwoShotNormAfter(NormAfter, PushTwoShot):
    """One kernel: tiles go to their owners, sums to all ranks; another one normalises."""


VARIANT = PushTwoShotNormAfter()
