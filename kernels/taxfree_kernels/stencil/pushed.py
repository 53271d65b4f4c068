"""A launch for each step, which sends what the neighbours need itself.

Points at shared sides have programs of their own, which come first. Those of tiles leave them out:
they are as fast as without an exchange.

Protocol. That of ``persistent``, but a tile of step s + 1 begins when all tiles of step s have
ended. A launch waits only for words that earlier launches have sent, so its programs need not run
at the same time. The last launch, of one program, exchanges signals and the sums of the norms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.stencil import step, words
from taxfree_kernels.stencil.norms import finish
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Config, Plan, Space, resized


@triton.jit
def _edges_of(rows, BOX: tl.constexpr, EDGE: tl.constexpr):
    """Programs of a shared row, and of a shared column."""
    of_row = tl.cdiv(BOX.COLUMNS * BOX.DEPTH, EDGE.BLOCK_1) * (BOX.DOWN > 1)
    return of_row, tl.cdiv(rows * BOX.DEPTH, EDGE.BLOCK_1) * (BOX.ACROSS > 1)


@triton.jit
def _edge_of(program, rank, rows, BOX: tl.constexpr, EDGE: tl.constexpr):
    """A program's points at shared sides, in the order of a halo; rows have the corners.

    What is at no shared side, or another program's, is in a row beyond the part.
    """
    of_row, of_column = _edges_of(rows, BOX, EDGE)
    is_column = program >= 2 * of_row
    place = tl.where(is_column, program - 2 * of_row, program)
    size = tl.where(is_column, of_column, of_row)
    is_second = place >= size
    first = tl.where(is_second, place - size, place) * EDGE.BLOCK_1
    along = (first + tl.arange(0, EDGE.BLOCK_1)) // BOX.DEPTH
    first_row = tl.where(is_second, rows - 1, 0)
    first_column = tl.where(is_second, BOX.COLUMNS - 1, 0)
    row, column = tl.where(is_column, along, first_row), tl.where(is_column, first_column, along)
    is_others = is_second & (tl.where(is_column, BOX.COLUMNS, rows) == 1)
    first_row = tl.where(is_column | is_others, -1, first_row)  # it has none of a shared row
    first_column = tl.where(is_column, first_column, first // BOX.DEPTH)
    if BOX.DOWN > 1:
        is_others = is_others | (is_column & ((row == 0) | (row == rows - 1)))
    layer = (first + tl.arange(0, EDGE.BLOCK_1)) % BOX.DEPTH
    edge = step.Block(first_row, first_column, row, column, layer)
    is_own = row < 0
    for SIDE in tl.static_range(step.SIDES):
        is_edge = step.at_side(edge, rows, SIDE, BOX)
        is_own = is_own | (is_edge & (step.rank_at(rank, SIDE, BOX) >= 0))
    row = tl.where(is_own & (is_others == 0), row, rows)
    return step.Block(first_row, first_column, row, column, layer)


@triton.jit(do_not_specialize=["rank", "rows"])
def _send_first(
    u_ptr, inbox, control_ptr, heap_bases, rank, rows, BOX: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Send what other ranks need for the first step."""
    targets = words.targets_of(inbox.words_ptr, heap_bases, rank, BOX)
    peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
    area = words.area_at(1, packets.running_turn(control_ptr), inbox, rows, BOX)
    edge = _edge_of(tl.program_id(0), rank, rows, BOX, EDGE)
    values = step.loaded(u_ptr, edge, rows, EDGE)
    words.send_edges(values, targets, area, edge, rows, peers, EDGE)


@triton.jit(do_not_specialize=["step_number", "rank", "rows", "steps", "norm_every"])
def _step(
    source_ptr, target_ptr, step_number,  # of a step
    squares_ptr, inbox, control_ptr, heap_bases, rank,  # of the plan and the fabric
    rows, steps, norm_every,  # of the size
    GROUP: tl.constexpr, BOX: tl.constexpr, EDGE: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """A step: programs for points of shared edges come first, then one for each tile."""
    gdc_wait(GROUP)
    gdc_launch_dependents(GROUP)
    program, programs = tl.program_id(0), tl.num_programs(0)
    of_row, of_column = _edges_of(rows, BOX, EDGE)
    edges, place = 2 * (of_row + of_column), program
    has_norm = False
    if HAS_NORMS:
        has_norm = step_number % norm_every == 0
    if program < edges:
        edge = _edge_of(program, rank, rows, BOX, EDGE)
        squares = tl.zeros((1,), tl.float64)
        if step.is_beside(edge, rank, rows, EDGE):
            targets = words.targets_of(inbox.words_ptr, heap_bases, rank, BOX)
            peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
            turn = packets.running_turn(control_ptr)
            received_ptr = inbox.words_ptr + words.area_at(step_number, turn, inbox, rows, BOX)
            area = words.area_at(step_number + 1, turn, inbox, rows, BOX)
            squares += words.relax_beside(
                source_ptr, target_ptr, received_ptr, targets, area, edge, rows, True,
                step_number < steps, has_norm, peers, GROUP, EDGE,
            )  # fmt: skip
    else:  # most programs: they load nothing of the exchange
        tile = program - edges
        if step_number % 2 == 0:  # what the last step has used last is used first
            tile = programs - 1 - program
            place = edges + tile
        squares = words.relax_inside(
            source_ptr, target_ptr, tile, rows, rank, True, has_norm, BOX, True
        )
    if has_norm:
        place += (step_number // norm_every - 1) * programs
        tl.store(squares_ptr + place + tl.arange(0, 1), squares)


@triton.jit(do_not_specialize=["tiles", "elements", "norms", "rank"])
def _finish(
    out_ptr, squares_ptr, inbox, control_ptr, heap_bases, rank, tiles, elements, norms,
    GROUP: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Exchange signals, and sums of the norms, with all ranks."""
    peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
    sums_ptr = inbox.sums_ptr + peers.generation % 2 * inbox.stride_sums
    finish(squares_ptr, sums_ptr, out_ptr + elements, tiles, norms, peers, GROUP, HAS_NORMS)
    sync.leave(control_ptr)


class PushedPlan(Plan):
    """A launch for each step, and one before and behind them."""

    def __init__(self, problem: Stencil, fabric: Fabric, config: Config) -> None:
        self._problem = problem
        self._box = box = step.box(problem, config)
        # a point for each thread; of faces, which are not few, as many as one load has
        points = fabric.hardware.warp_size * config["num_warps"] * (4 if box.DEPTH > 1 else 1)
        self._edge = box._replace(BLOCK_0=1, BLOCK_1=max(4, points), BLOCK_2=1, BLOCKS=1)
        self._scratch = fabric.workspace.scratch(
            ((problem.elements,), torch.float32),
            ((max(problem.norms, 1) * self._programs(problem)[1],), torch.float64),
        )
        self._ends = words.ends_of(problem, fabric)
        group = Group(problem.world_size, fabric.backend)
        of_all: dict[str, Any] = {"GROUP": group, "HAS_NORMS": problem.norms > 0}
        of_parts = {"BOX": box, "EDGE": self._edge}
        options = compile_options(fabric.backend, config)
        self._finish = Kernel(_finish, 1, of_all, options)
        self._send_first = Kernel(_send_first, 0, of_parts, options)
        if "REGISTERS" in config:  # on NVIDIA
            options = options | {"maxnreg": config["REGISTERS"], "launch_pdl": True}
        self._step = Kernel(_step, 0, {**of_all, **of_parts}, options)
        self._sized = fabric.workspace.by_size(self._of_size)
        self.launches = problem.steps + 2

    def _programs(self, problem: Stencil) -> tuple[int, int]:
        """Programs of edges, and all programs of a step."""
        edges = sum(2 * -(-points // self._edge.BLOCK_1) for points in problem.halo)
        return edges, edges + step.counts(problem, self._box)[1]

    def _of_size(self, rows: int) -> tuple[Kernel, Kernel, Kernel, torch.Tensor]:
        """Of so many rows of the whole domain; the part of every second step is last."""
        problem = resized(self._problem, rows=rows)
        edges, programs = self._programs(problem)
        other, squares = self._scratch()
        sizes = (problem.own_rows, problem.steps, problem.norm_every)
        norms = (programs, problem.elements, problem.norms)
        return (
            self._send_first.resized(edges, (*self._ends, problem.own_rows)),
            self._step.resized(programs, (squares, *self._ends, *sizes)),
            self._finish.resized(1, (squares, *self._ends, *norms)),
            other,
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel in self._sized[size][:3] if kernel.grid)

    def run(self, u: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        send_first, relax, end, other = self._sized[u.shape[0] * self._problem.down]
        if send_first.grid:
            send_first(u)
        for number, (source, target) in step.steps_of(self._problem, u, out, other):
            relax(source, target, number)
        end(out)
        return out


class Pushed(step.Tiled):
    """Steps as launches, whose kernels send halos."""

    plan_class = PushedPlan
    version = 2  # since 1: edges have programs of their own, and steps are launched early

    def unsupported_reason(self, problem: Stencil, hardware: Hardware) -> str | None:
        if hardware.backend == "hip":
            # who computes them behind a branch stores to peers lane by lane
            return "AMD's compiler does not know addresses of peers to be the same in all lanes"
        return words.too_large_reason(problem)

    def space(self, problem: Stencil, hardware: Hardware) -> Space:
        space = super().space(problem, hardware)
        return {**space, "REGISTERS": (40, 48, 64, 96)} if hardware.backend == "cuda" else space

    def guesses(self, problem: Stencil, hardware: Hardware) -> list[dict[str, int]]:
        # faces on four sides take more
        most = 96 if problem.down > 1 and problem.across > 1 else 64
        return [
            config | {"REGISTERS": registers}
            for registers in (most, 48)
            for config in step.launched_configs(problem)
        ]


VARIANT = Pushed()
