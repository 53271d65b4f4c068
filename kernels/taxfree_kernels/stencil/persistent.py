"""One kernel for all steps: each tile waits for the tiles around it, and for no other.

There is no launch and no barrier between steps. A program has the same number of tiles in each
step. Those at sides that are shared come first, and send what the neighbour needs at once; others
are computed while it travels.

Protocol. All programs run at the same time: the launch is cooperative. A tile's counter counts its
steps. Step s of a tile waits until the counters of the tiles around it, and its own, are s - 1.
Then their values are there, and nobody still reads those of step s - 2, which it overwrites. All
programs take the steps in order, so the lowest step that is not done anywhere can go on.

Halos are the Lamport words of ``words``. A neighbour sends to the area of step s again once it has
received what this tile sent of step s + 2. Between the two this tile has counted step s + 1, behind
its stores, so the words are EMPTY by then.

The last program to end adds the squares of all tiles for the norms, in the order of tiles. It sends
the sums to all ranks with its signal, waits for theirs, and adds these in the order of ranks. So in
each call all ranks signal, and wait for, all peers, as payload slots need it. By then all words are
EMPTY again. So this call takes no turn of Lamport words: the next one may have the same slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.stencil import step, words
from taxfree_kernels.stencil.norms import finish
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Config, Plan, Space, resized

_REGISTERS = 1 << 16  # of a compute unit of NVIDIA
_CLEARED = tl.constexpr(1024)  # counters at once
_FIRST_COUNTER = tl.constexpr(1)  # of a tile; programs that end count themselves before it


@triton.jit(do_not_specialize=["rank", "rows", "steps", "norm_every"])
def _persistent(
    u_ptr, out_ptr,  # of a call
    other_ptr, squares_ptr, counters_ptr,  # of the plan
    inbox, control_ptr, heap_bases, rank,  # of the fabric
    rows, steps, norm_every,  # of the size
    GROUP: tl.constexpr, BOX: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """All steps of a rank's part.

    Args:
        other_ptr: float32, a part: steps alternate between it and the output.
        squares_ptr: float64 [norms, tiles].
        counters_ptr: int32 [1 + tiles], 0 between launches.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    targets = words.targets_of(inbox.words_ptr, heap_bases, rank, BOX)
    peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
    turn = packets.running_turn(control_ptr)
    down, across, deep = step.tiles_of(rows, BOX)
    tiles = down * across * deep
    steps_ptr = counters_ptr + _FIRST_COUNTER
    for place in range(program, step.sides_of(rows, BOX), programs):
        tile = step.tile_at(place, False, rows, BOX)
        area = words.area_at(1, turn, inbox, rows, BOX)
        words.send_first(u_ptr, targets, area, tile, rows, peers, BOX)
    source_ptr = u_ptr
    for step_number in range(1, steps + 1):
        target_ptr = out_ptr
        if (steps - step_number) % 2 == 1:
            target_ptr = other_ptr
        area = words.area_at(step_number + 1, turn, inbox, rows, BOX)
        received_ptr = inbox.words_ptr + words.area_at(step_number, turn, inbox, rows, BOX)
        for place in range(program, tiles, programs):
            tile = step.tile_at(place, step_number % 2 == 0, rows, BOX)
            is_right = _wait_for_tiles(tile, steps_ptr, step_number - 1, rows, peers, GROUP, BOX)
            has_norm = False
            if HAS_NORMS:
                has_norm = step_number % norm_every == 0
            if place < step.sides_of(rows, BOX):
                squares = words.relax_at_sides(
                    source_ptr, target_ptr, received_ptr, targets, area, tile, rows, is_right,
                    step_number < steps, has_norm, peers, GROUP, BOX,
                )  # fmt: skip
            else:
                squares = words.relax_inside(
                    source_ptr, target_ptr, tile, rows, rank, is_right, has_norm, BOX, False
                )
            if has_norm:
                norm = step_number // norm_every - 1
                tl.store(squares_ptr + norm * tiles + tile + tl.arange(0, 1), squares)
            # Who gave up may be ahead of the program that had this tile in the last step.
            sync.count_units(steps_ptr + tile, is_right.to(tl.int32), GROUP)
        source_ptr = target_ptr
    if sync.arrive(counters_ptr, programs, GROUP):
        lanes = tl.arange(0, _CLEARED)
        for first in range(0, tiles, _CLEARED):
            zeros = tl.zeros((_CLEARED,), tl.int32)
            tl.store(steps_ptr + first + lanes, zeros, mask=first + lanes < tiles)
        sums_ptr = inbox.sums_ptr + peers.generation % 2 * inbox.stride_sums
        norms_ptr = out_ptr + rows * BOX.COLUMNS * BOX.DEPTH
        norms = steps // norm_every if HAS_NORMS else 0
        finish(squares_ptr, sums_ptr, norms_ptr, tiles, norms, peers, GROUP, HAS_NORMS)
    sync.leave(control_ptr)


@triton.jit
def _wait_for_tiles(tile, counters_ptr, steps, rows, peers, GROUP: tl.constexpr, BOX: tl.constexpr):
    """Wait until a tile, and the tiles around it, have done so many steps; whether they have."""
    down, across, deep = step.tiles_of(rows, BOX)
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
        self._ends = words.ends_of(problem, fabric)
        options = compile_options(fabric.backend, config)
        if fabric.backend != "interpreter":
            options["launch_cooperative_grid"] = True
        if fabric.backend == "cuda":  # all programs fit
            threads = -(-self._most // fabric.hardware.compute_units) * config["num_warps"] * 32
            options["maxnreg"] = min(255, _REGISTERS // threads // 8 * 8)
        group = Group(problem.world_size, fabric.backend)
        constants = {"GROUP": group, "BOX": self._box, "HAS_NORMS": problem.norms > 0}
        self._kernel = Kernel(_persistent, 0, constants, options)
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, rows: int) -> Kernel:
        """Of so many rows of the whole domain."""
        problem = resized(self._problem, rows=rows)
        _, tiles = step.counts(problem, self._box)
        scratch = (*self._scratch(), self._counters())
        sizes = (problem.own_rows, problem.steps, problem.norm_every)
        return self._kernel.resized(min(tiles, self._most), (*scratch, *self._ends, *sizes))

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size],)

    def run(self, u: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._sized[u.shape[0] * self._problem.down](u, out)
        return out


class Persistent(step.Tiled):
    """All steps in one kernel."""

    plan_class = PersistentPlan
    co_resident = True

    def unsupported_reason(self, problem: Stencil, hardware: Hardware) -> str | None:
        return words.too_large_reason(problem)

    def space(self, problem: Stencil, hardware: Hardware) -> Space:
        units = hardware.compute_units
        # an interpreted rank runs one program after the other
        times = (1,) if hardware.backend == "interpreter" else (1, 2, 4)
        programs = {"PROGRAMS": tuple(units * each for each in times)}
        return {**super().space(problem, hardware), **programs}

    def guesses(self, problem: Stencil, hardware: Hardware) -> list[dict[str, int]]:
        """Programs of few warps, or one of many, on each compute unit.

        Few points a thread leave registers for others, which load while this one waits or stores.
        Faces on four sides take so many that half as many threads fit.
        """
        units = hardware.compute_units
        share, is_plane = -(-problem.elements // units), problem.depth == 1
        width = 128 if is_plane else 64
        of_thread = 8 if is_plane and share <= 4096 else 4  # of several blocks 8 spill
        many = ((4, 4), (8, 2), (16, 1)) if is_plane or problem.across == 1 else ((4, 2), (8, 1))
        configs = []
        for warps, programs in many:
            tile = max(512, share // programs)
            points = min(of_thread * 32 * warps, power_of_2(tile, 512))
            lines = points // width
            block = (lines, width, 1) if is_plane else (1, lines, width)
            blocks = min(64 // of_thread, power_of_2(-(-tile // points), 1))
            others = {"num_warps": warps, "PROGRAMS": programs * units}
            configs.append(step.tile_config(*block, blocks, **others))
        if 2048 < share <= 8192:
            configs.reverse()
        if problem.across == 1:  # as fast or faster where blocks are rows
            block = (1, 512, 1) if is_plane else (1, 4, 128)
            blocks = min(16, power_of_2(-(-share // 4 // 512), 1))
            configs.insert(1, step.tile_config(*block, blocks, num_warps=4, PROGRAMS=4 * units))
        return configs


VARIANT = Persistent()
