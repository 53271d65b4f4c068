"""A launch for each step, which sends what the neighbours need itself.

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
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
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


@triton.jit(do_not_specialize=["rank", "rows"])
def _send_first(
    u_ptr, inbox, control_ptr, heap_bases, rank, rows, GROUP: tl.constexpr, BOX: tl.constexpr
):  # fmt: skip
    """Send what other ranks need for the first step, a program for each tile."""
    targets = targets_of(inbox.words_ptr, heap_bases, rank, BOX)
    peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
    area = area_at(1, packets.running_turn(control_ptr), inbox, rows, BOX)
    tile = tile_at(tl.program_id(0), False, rows, BOX)
    send_first(u_ptr, targets, area, tile, rows, peers, BOX)


@triton.jit(do_not_specialize=["step_number", "rank", "rows", "steps", "norm_every"])
def _step(
    source_ptr, target_ptr, step_number,  # of a step
    squares_ptr, inbox, control_ptr, heap_bases, rank,  # of the plan and the fabric
    rows, steps, norm_every,  # of the size
    GROUP: tl.constexpr, BOX: tl.constexpr, THIN: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """A step, a program for each tile."""
    program = tl.program_id(0)
    tile = tile_at(program, step_number % 2 == 0, rows, BOX)
    has_norm = False
    if HAS_NORMS:
        has_norm = step_number % norm_every == 0
    if program < sides_of(rows, BOX):
        targets = targets_of(inbox.words_ptr, heap_bases, rank, BOX)
        peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
        turn = packets.running_turn(control_ptr)
        received_ptr = inbox.words_ptr + area_at(step_number, turn, inbox, rows, BOX)
        area = area_at(step_number + 1, turn, inbox, rows, BOX)
        squares = relax_at_sides(
            source_ptr, target_ptr, received_ptr, targets, area, tile, rows, True,
            step_number < steps, has_norm, peers, GROUP, BOX, THIN, HAS_NORMS,
        )  # fmt: skip
    else:  # most programs: they load nothing of the exchange
        squares = relax_inside(
            source_ptr, target_ptr, tile, rows, rank, True, has_norm, BOX, HAS_NORMS
        )
    if HAS_NORMS:
        if has_norm:
            down, across, deep = tiles_of(rows, BOX)
            place = (step_number // norm_every - 1) * down * across * deep + tile
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
        self._scratch = fabric.workspace.scratch(
            ((problem.elements,), torch.float32),
            ((max(problem.norms, 1) * step.counts(problem, box)[1],), torch.float64),
        )
        self._inbox = inbox_of(problem, fabric)
        self._ends = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        constants: dict[str, Any] = {"GROUP": Group(problem.world_size, fabric.backend)}
        norms = {"HAS_NORMS": problem.norms > 0}
        options = compile_options(fabric.backend, config)
        self._finish = Kernel(_finish, 1, {**constants, **norms}, options)
        constants["BOX"] = box
        self._send_first = Kernel(_send_first, 0, constants, options)
        if "REGISTERS" in config:
            options = options | {"maxnreg": config["REGISTERS"]}
        constants |= {"THIN": step.thin(box, fabric.hardware, config), **norms}
        self._step = Kernel(_step, 0, constants, options)
        self._sized = fabric.workspace.by_size(self._of_size)
        self.launches = problem.steps + 2

    def _of_size(self, rows: int) -> tuple[Kernel, Kernel, Kernel, torch.Tensor]:
        """Of so many rows of the whole domain; the part of every second step is last."""
        problem = resized(self._problem, rows=rows)
        shared, tiles = step.counts(problem, self._box)
        other, squares = self._scratch()
        ends = (self._inbox, *self._ends)
        return (
            self._send_first.resized(shared, (*ends, problem.own_rows)),
            self._step.resized(
                tiles, (squares, *ends, problem.own_rows, problem.steps, problem.norm_every)
            ),
            self._finish.resized(1, (squares, *ends, tiles, problem.elements, problem.norms)),
            other,
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel in self._sized[size][:3] if kernel.grid)

    def run(self, u: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        send_first, relax, end, other = self._sized[u.shape[0] * self._problem.down]
        if send_first.grid:
            send_first(u)
        source = u
        for number, target in step.steps_of(self._problem, out, other):
            relax(source, target, number)
            source = target
        end(out)
        return out


class Pushed(step.Tiled):
    """Steps as launches, whose kernels send halos."""

    plan_class = PushedPlan

    def unsupported_reason(self, problem: Stencil, hardware: Hardware) -> str | None:
        if hardware.backend == "hip":
            # who computes them behind a branch stores to peers lane by lane
            return "AMD's compiler does not know addresses of peers to be the same in all lanes"
        return too_large_reason(problem)

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
