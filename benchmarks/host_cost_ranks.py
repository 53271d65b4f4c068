"""The task of ranks that time the library's path with and without a runtime; see `host_cost`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.commands import call_of
from taxfree._runtime.collectives import vote
from taxfree._runtime.ready import ready_plans
from taxfree._runtime.runtime import Runtime
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Ready, op_of, operation, variants

_CALLS, _SAMPLES = 20, 40  # so many calls in a row fit the device's queue
_INTERPRETED = 2, 3  # of calls that take milliseconds


@dataclass(frozen=True)
class LibraryCost:
    """Host time of eager calls of one problem, in microseconds; the slowest rank's.

    Args:
        problem: as text.
        library: the variant.
        library_us: of its plan.
        dispatched_us: of the runtime, which runs the same for a given problem.
        given_us, method_us: what the runtime adds to a plan: of a given problem, and of a call of
            its method; the latter without the allocation of what it returns.
    """

    op: str
    problem: str
    library: str
    library_us: float
    dispatched_us: float
    given_us: float
    method_us: float


@torch.no_grad()
def time_library(fabric: Fabric, problems: Sequence[Any]) -> list[LibraryCost]:
    """Time the library's path of problems; collective.

    All are timed twice, and the shorter times hold: a busy host can be slow for all that a problem
    is timed in one go.
    """
    runtime = Runtime.on_fabric(fabric, [])
    runtime.prepare(problems)
    rounds = [[_cost(fabric, runtime, problem) for problem in problems] for _ in range(2)]
    return [replace(one, **_least(one, other)) for one, other in zip(*rounds, strict=True)]


def _least(*costs: LibraryCost) -> dict[str, float]:
    names = [field.name for field in fields(LibraryCost) if field.name.endswith("_us")]
    return {name: min(getattr(cost, name) for cost in costs) for name in names}


def _cost(fabric: Fabric, runtime: Runtime, problem: Any) -> LibraryCost:
    found = operation(op_of(problem))
    inputs = found.make_inputs(problem, fabric.rank, 1, fabric.device)
    out = found.empty_output(problem, fabric.device)
    choice = runtime.choice(problem).of("eager")
    variant = variants(op_of(problem))[choice.variant]
    (plan,) = ready_plans(fabric, [partial(variant.plan, problem, fabric, choice.config)])
    assert isinstance(plan, Ready), plan
    shape = tuple(out.shape)

    def dispatch() -> None:
        runtime.call(problem, inputs, out)

    def allocate() -> Any:
        made = inputs[0].new_empty(shape)
        return made.unbind() if getattr(problem, "rms_norm", False) else made

    calls, samples = (_CALLS, _SAMPLES) if fabric.has_graphs else _INTERPRETED
    whole = _fastest(fabric, [lambda: plan(*inputs, out), dispatch], calls, samples)
    entry = runtime._plans.find(problem)
    assert entry is not None
    method = call_of(runtime, problem, inputs)
    running = entry.eager or entry.plan
    with mock.patch.object(running, "run", lambda *tensors: tensors[-1]):
        nothing, given, called, allocation = _fastest(
            fabric,
            [
                lambda: running(*inputs, out),
                dispatch,
                method,
                allocate,
            ],
            _CALLS,
            _SAMPLES,
        )
    added = given - nothing, called - nothing - allocation
    return LibraryCost(op_of(problem), str(problem), choice.variant, *whole, *added)


def _fastest(
    fabric: Fabric, functions: Sequence[Callable[[], Any]], calls: int, samples: int
) -> list[float]:
    """Microseconds per call until the host is free again: the least of the samples.

    Other load can only add to it.
    """
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(samples + 1):
        for function, found in zip(functions, times, strict=True):
            fabric.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            if turn:  # the first time, all is cold
                found.append((time.perf_counter() - begin) / calls * 1e6)
    everyone = vote(fabric.group, [min(of_function) for of_function in times])
    return [max(ranks) for ranks in zip(*everyone, strict=True)]
