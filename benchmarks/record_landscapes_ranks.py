"""The tasks of a worker that records landscapes; see :mod:`benchmarks.record_landscapes`."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.emulate_ranks import act_alone_for
from taxfree._runtime.collectives import Failure
from taxfree._runtime.ready import ready_plans
from taxfree.errors import one_line
from taxfree.measuring import timer
from taxfree.measuring.trial import Bench, Calls, Candidate
from taxfree_kernels.cross_compile.resources import Resources, programs_per_unit, prune_reason
from taxfree_kernels.cross_compile.screen import SPILL_LIMIT
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Plan

CHAIN, REPETITIONS = 10, 5  # fewer calls than a search times, because there are many configs


@dataclass
class _State:
    """What a worker keeps from one task to the next."""

    calls: list[Calls] = field(default_factory=list)
    compiled: list[list[tuple[Plan, list[Any]] | str]] = field(default_factory=list)


_state = _State()

#: Microseconds, or why there are none.
Found = float | str


def open_all(
    fabric: Fabric, op: str, problems: Sequence[Mapping[str, Any]], arena_bytes: int
) -> None:
    """Make inputs for problems, which takes seconds of the GPU; nothing if that was done.

    Args:
        problems: fields of each.
        arena_bytes: of an emulated rank; 0 if nothing is emulated.
    """
    if not _state.calls:
        if arena_bytes:
            act_alone_for(fabric, problems[0]["world_size"], arena_bytes)
        kind = Calls if arena_bytes else Bench
        _state.calls = [kind(fabric, op, dict(problem)) for problem in problems]
        fabric.synchronize()


def compile_all(fabric: Fabric, jobs: Sequence[tuple[Candidate, Sequence[int]]]) -> None:
    """Compile kernels on the CPU; nothing runs on the GPU.

    Args:
        jobs: candidates, each with the indices of its problems.
    """
    _state.compiled = [
        [_compiled(_state.calls[at], candidate) for at in indices] for candidate, indices in jobs
    ]
    gc.collect()
    gc.freeze()  # a capture collects garbage, while others wait for the GPU


def _compiled(calls: Calls, candidate: Candidate) -> tuple[Plan, list[Any]] | str:
    kernels: list[Any] = []

    def compile_only(kernel: Kernel, args: tuple[Any, ...]) -> None:
        kernels.append(
            kernel.function.warmup(*args, grid=(kernel.grid,), **kernel.constants, **kernel.options)
        )

    try:
        plan = calls.compiled(candidate, compile_only)
    except Exception as error:
        return f"does not compile: {one_line(error)}"
    return plan, kernels


def time_all(fabric: Fabric, jobs: Sequence[tuple[Candidate, Sequence[int]]]) -> list[list[Found]]:
    """Time what was compiled last: for each job, for each of its problems.

    Nobody else may use the GPU meanwhile.
    """
    return [
        [_timed(fabric, _state.calls[at], each) for at, each in zip(indices, found, strict=True)]
        for (_, indices), found in zip(jobs, _state.compiled, strict=True)
    ]


def _timed(fabric: Fabric, calls: Calls, compiled: tuple[Plan, list[Any]] | str) -> Found:
    if isinstance(compiled, str):
        return compiled
    made, kernels = compiled
    try:
        why_not = next(filter(None, (_refusal(fabric, kernel) for kernel in kernels)), None)
    except Exception as error:  # it does not fit the GPU
        return f"cannot be loaded: {one_line(error)}"
    if why_not is not None:
        return why_not
    (plan,) = ready_plans(fabric, [lambda: made])
    if isinstance(plan, Failure):
        return f"cannot be connected: {plan.why}"
    calls.call(plan)(0)
    hang = calls.hang()
    if hang is not None:
        return f"hangs: {hang}"
    if isinstance(calls, Bench):
        why_wrong, _ = calls.check(plan)
        if why_wrong is not None:
            return f"wrong: {why_wrong}"
    mode = "graph" if fabric.has_graphs else "eager"
    chain = CHAIN if fabric.has_graphs else 1
    timing = timer.time_together(fabric, [(calls.call(plan), mode)], REPETITIONS, chain=chain)[0]
    fabric.synchronize()
    return timing.median_us


def _refusal(fabric: Fabric, kernel: Any) -> str | None:
    """Why the screen of a search refuses a kernel, or None; it is loaded."""
    if not hasattr(kernel, "_init_handles"):  # interpreted
        return None
    kernel._init_handles()
    hardware, shared = fabric.hardware, kernel.metadata.shared
    programs = programs_per_unit(hardware, kernel.n_regs, shared, kernel.metadata.num_warps)
    spilled = 4 * kernel.n_spills  # counted in registers
    return prune_reason(Resources(kernel.n_regs, spilled, shared, programs), hardware, SPILL_LIMIT)
