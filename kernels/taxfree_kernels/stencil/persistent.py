"""One kernel for all steps: each tile waits for the tiles around it, and for no other.

There is no launch and no barrier between steps. A program has the same number of tiles in each
step. Those at sides that are shared come first, and send what the neighbour needs at once; others
are computed while it travels.

Protocol. All programs run at the same time: the launch is cooperative. A tile's counter counts its
steps. Step s of a tile waits until the counters of the tiles around it, and its own, are s - 1.
Then their values are there, and nobody still reads those of step s - 2, which it overwrites. All
programs take the steps in order, so the lowest step that is not done anywhere can go on.

Halos are Lamport words: they show by themselves that they have arrived. Those of step s lie in area
s % 3, and the tile that has read them makes them EMPTY. The neighbour sends there again once it has
received what this tile sent of step s + 2. Between the two this tile has counted step s + 1, behind
its stores, so the words are EMPTY by then.

The last program to end adds the squares of all tiles for the norms, in the order of tiles. It sends
the sums to all ranks with its signal, waits for theirs, and adds these in the order of ranks. So in
each call all ranks signal, and wait for, all peers, as payload slots need it. By then all words are
EMPTY again. So this call takes no turn of Lamport words: the next one may have the same slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.stencil import step
from taxfree_kernels.stencil.norms import finish
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.stencil.step import sides_of, tile_at, tiles_of
from taxfree_kernels.stencil.words import (
    area_at,
    inbox_of,
    relax_at_sides,
    relax_inside,
    send_first,
    targets_of,
    too_large_reason,
)
from taxfree_kernels.variant import Config, Plan, Space, resized

_REGISTERS = 1 << 16  # of a compute unit of NVIDIA
_CLEARED = tl.constexpr(1024)  # counters at once
_FIRST_COUNTER = tl.constexpr(1)  # of a tile; programs that end count themselves before it


class Scratch(NamedTuple):
    """Memory of this rank.

    Args:
        other_ptr: float32, a part: steps alternate between it and the output.
        squares_ptr: float64 [norms, tiles].
        counters_ptr: int32 [1 + tiles], 0 between launches.
    """

    other_ptr: Any
    squares_ptr: Any
    counters_ptr: Any


@triton.jit(do_not_specialize=["rank", "rows", "steps", "norm_every"])
def _persistent(
    u_ptr, out_ptr,  # of a call
    scratch, inbox, control_ptr, heap_bases, rank,  # of the plan and the fabric
    rows, steps, norm_every,  # of the size
    GROUP: tl.constexpr, BOX: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    targets = targets_of(inbox.words_ptr, heap_bases, rank, BOX)
    peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
    turn = packets.running_turn(control_ptr)
    down, across, deep = tiles_of(rows, BOX)
    tiles = down * across * deep
    counters_ptr = scratch.counters_ptr + _FIRST_COUNTER
    for place in range(program, sides_of(rows, BOX), programs):
        tile = tile_at(place, False, rows, BOX)
        send_first(u_ptr, targets, area_at(1, turn, inbox, rows, BOX), tile, rows, peers, BOX)
    source_ptr = u_ptr
    for step_number in range(1, steps + 1):
        target_ptr = out_ptr
        if (steps - step_number) % 2 == 1:
            target_ptr = scratch.other_ptr
        area = area_at(step_number + 1, turn, inbox, rows, BOX)
        received_ptr = inbox.words_ptr + area_at(step_number, turn, inbox, rows, BOX)
        for place in range(program, tiles, programs):
            tile = tile_at(place, step_number % 2 == 0, rows, BOX)
            is_right = _wait_for_tiles(tile, counters_ptr, step_number - 1, rows, peers, GROUP, BOX)
            has_norm = False
            if HAS_NORMS:
                has_norm = step_number % norm_every == 0
            if place < sides_of(rows, BOX):
                squares = relax_at_sides(
                    source_ptr, target_ptr, received_ptr, targets, area, tile, rows, is_right,
                    step_number < steps, has_norm, peers, GROUP, BOX, HAS_NORMS,
                )  # fmt: skip
            else:
                squares = relax_inside(
                    source_ptr, target_ptr, tile, rows, rank, is_right, has_norm,
                    BOX, HAS_NORMS, False,
                )  # fmt: skip
            if HAS_NORMS:
                if has_norm:
                    norm = step_number // norm_every - 1
                    place_of_tile = scratch.squares_ptr + norm * tiles + tile
                    tl.store(place_of_tile + tl.arange(0, 1), squares)
            # Who gave up may be ahead of the program that had this tile in the last step.
            sync.count_units(counters_ptr + tile, is_right.to(tl.int32), GROUP)
        source_ptr = target_ptr
    if sync.arrive(scratch.counters_ptr, programs, GROUP):
        lanes = tl.arange(0, _CLEARED)
        for first in range(0, tiles, _CLEARED):
            tl.store(
                counters_ptr + first + lanes,
                tl.zeros((_CLEARED,), tl.int32),
                mask=first + lanes < tiles,
            )
        sums_ptr = inbox.sums_ptr + peers.generation % 2 * inbox.stride_sums
        norms_ptr = out_ptr + rows * BOX.COLUMNS * BOX.DEPTH
        norms = steps // norm_every if HAS_NORMS else 0
        finish(scratch.squares_ptr, sums_ptr, norms_ptr, tiles, norms, peers, GROUP, HAS_NORMS)
    sync.leave(control_ptr)


@triton.jit
def _wait_for_tiles(tile, counters_ptr, steps, rows, peers, GROUP: tl.constexpr, BOX: tl.constexpr):
    """Wait until a tile, and the tiles around it, have done so many steps; whether they have."""
    down, across, deep = tiles_of(rows, BOX)
    lane = tl.arange(0, 8)
    layer = tile % deep + tl.where(lane == 1, 1, 0) - tl.where(lane == 2, 1, 0)
    column = tile // deep % across + tl.where(lane == 3, 1, 0) - tl.where(lane == 4, 1, 0)
    row = tile // deep // across + tl.where(lane == 5, 1, 0) - tl.where(lane == 6, 1, 0)
    exists = (row >= 0) & (row < down) & (column >= 0) & (column < across)
    exists = exists & (layer >= 0) & (layer < deep)
    number = tl.where(exists, (row * across + column) * deep + layer, tile)
    return sync.wait_for_units(counters_ptr + number, steps, peers, GROUP, mask=exists)


class PersistentPlan(Plan):
    """One launch, of as many programs as run at the same time."""

    def __init__(self, problem: Stencil, fabric: Fabric, config: Config) -> None:
        self._problem = problem
        self._box = step.box(problem, config)
        self._most = config["PROGRAMS"]
        _, tiles = step.counts(problem, self._box)
        self._scratch = fabric.workspace.scratch(
            ((problem.elements,), torch.float32),
            ((max(problem.norms, 1) * tiles,), torch.float64),
        )
        self._counters = fabric.workspace.counters(_FIRST_COUNTER.value + tiles)
        self._inbox = inbox_of(problem, fabric)
        self._ends = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        options = compile_options(fabric.backend, config)
        if fabric.backend != "interpreter":
            options["launch_cooperative_grid"] = True
        if fabric.backend == "cuda":  # all programs fit
            threads = -(-self._most // fabric.hardware.compute_units) * config["num_warps"] * 32
            options["maxnreg"] = min(255, _REGISTERS // threads // 8 * 8)
        self._kernel = Kernel(
            _persistent,
            grid=0,
            constants={
                "GROUP": Group(problem.world_size, fabric.backend),
                "BOX": self._box,
                "HAS_NORMS": problem.norms > 0,
            },
            options=options,
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, rows: int) -> Kernel:
        """Of so many rows of the whole domain."""
        problem = resized(self._problem, rows=rows)
        _, tiles = step.counts(problem, self._box)
        other, squares = self._scratch()
        scratch = Scratch(other, squares, self._counters())
        sizes = (problem.own_rows, problem.steps, problem.norm_every)
        return self._kernel.resized(
            min(tiles, self._most), (scratch, self._inbox, *self._ends, *sizes)
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size],)

    def run(self, u: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._sized[u.shape[0] * self._problem.down](u, out)
        return out


def _first_configs(problem: Stencil, units: int) -> list[dict[str, int]]:
    """What a search tries first: programs of few warps, or one of many, on each compute unit.

    Few points a thread leave registers for others, which load while this one waits or stores.
    Faces on four sides take so many that half as many threads fit.
    """
    share = -(-problem.elements // units)
    configs, names = [], ("BLOCK_0", "BLOCK_1", "BLOCK_2")
    many = ((4, 4), (8, 2), (16, 1))
    for warps, programs in many if problem.depth == 1 or problem.across == 1 else ((4, 2), (8, 1)):
        tile = max(512, share // programs)
        width, of_thread = (128, 8) if problem.depth == 1 else (64, 4)
        points = min(of_thread * 32 * warps, power_of_2(tile, 512))
        blocks = (points // width, width, 1) if problem.depth == 1 else (1, points // width, width)
        configs.append(
            dict(zip(names, blocks, strict=True))
            | {
                "BLOCKS": min(64 // of_thread, power_of_2(-(-tile // points), 1)),
                "num_warps": warps,
            }
            | {"PROGRAMS": programs * units}
        )
    if 2048 < share <= 8192:
        configs.reverse()
    if problem.across == 1:  # as fast or faster where blocks are rows
        block = (1, 512, 1) if problem.depth == 1 else (1, 4, 128)
        tiles = {"BLOCKS": min(16, power_of_2(-(-share // 4 // 512), 1)), "num_warps": 4}
        configs.insert(1, dict(zip(names, block, strict=True)) | tiles | {"PROGRAMS": 4 * units})
    return configs


class Persistent(step.Tiled):
    """All steps in one kernel."""

    plan_class = PersistentPlan
    co_resident = True

    def unsupported_reason(self, problem: Stencil, hardware: Hardware) -> str | None:
        return too_large_reason(problem)

    def space(self, problem: Stencil, hardware: Hardware) -> Space:
        units = hardware.compute_units
        # an interpreted rank runs one program after the other
        times = (1,) if hardware.backend == "interpreter" else (1, 2, 4)
        programs = {"PROGRAMS": tuple(units * each for each in times)}
        return {**super().space(problem, hardware), **programs}

    def guesses(self, problem: Stencil, hardware: Hardware) -> list[dict[str, int]]:
        return _first_configs(problem, hardware.compute_units)


VARIANT = Persistent()
