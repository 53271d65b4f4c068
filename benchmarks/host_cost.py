"""Measures the host time of eager calls of the library's paths, and what dispatch adds.

    python -m benchmarks.host_cost --gpus 2

Nothing is on record. Calls of the library's plans are timed with and without the runtime. What the
runtime adds is also timed alone: plans do nothing then.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.commands import exit_code, keep, parser, positive
from taxfree._runtime.collectives import vote
from taxfree._runtime.ready import ready_plans
from taxfree._runtime.runtime import Runtime
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Ready, op_of, operation, problem_class, variants
from taxfree_tune import devices
from taxfree_tune.measuring.groups import deadline_s, group_for

#: small, so that a host cannot wait for its device
LIBRARY: list[tuple[str, dict[str, Any]]] = [
    ("all_gather_matmul", {"m": 16, "n": 256, "k": 512, "gather_dim": 0}),
    ("all_gather_matmul", {"m": 16, "n": 256, "k": 512, "gather_dim": 1, "bias": True}),
    ("matmul_all_reduce", {"m": 16, "n": 256, "k": 256}),
    ("matmul_all_reduce", {"m": 16, "n": 256, "k": 256, "residual": True, "rms_norm": True}),
    ("matmul_reduce_scatter", {"m": 16, "n": 256, "k": 256}),
    ("flash_decode", {
        "batch": 4, "q_heads": 8, "kv_heads": 1, "head_dim": 128, "kv_len_per_rank": 256,
    }),
    ("attention", {"batch": 1, "length": 64, "q_heads": 8, "kv_heads": 1, "head_dim": 128}),
]  # fmt: skip
FOLDER = Path(__file__).parent / "results" / "host_cost"
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
    op = operation(op_of(problem))
    inputs = op.make_inputs(problem, fabric.rank, 1, fabric.device)
    out = op.empty_output(problem, fabric.device)
    choice = runtime.choice(problem).of("eager")
    variant = variants(op_of(problem))[choice.variant]
    (plan,) = ready_plans(fabric, [partial(variant.plan, problem, fabric, choice.config)])
    assert isinstance(plan, Ready), plan
    shape = tuple(out.shape)

    def dispatch() -> None:
        runtime.call(problem, inputs, out)

    def allocate() -> Any:
        made = out.new_empty(shape)
        return made.unbind() if getattr(problem, "rms_norm", False) else made

    calls, samples = (_CALLS, _SAMPLES) if fabric.has_graphs else _INTERPRETED
    plan_us, dispatch_us = _fastest(fabric, [lambda: plan(*inputs, out), dispatch], calls, samples)
    entry = runtime._plans.find(problem)
    assert entry is not None
    method = _call_of(runtime, problem, inputs)
    running = entry.eager or entry.plan
    with mock.patch.object(running, "run", lambda *tensors: tensors[-1]):
        timed = [lambda: running(*inputs, out), dispatch, method, allocate]
        nothing, dispatched, called, allocation = _fastest(fabric, timed, _CALLS, _SAMPLES)
    return LibraryCost(
        op_of(problem), str(problem), choice.variant, plan_us, dispatch_us,
        given_us=dispatched - nothing, method_us=called - nothing - allocation,
    )  # fmt: skip


def _fastest(
    fabric: Fabric, functions: Sequence[Callable[[], Any]], calls: int, samples: int
) -> list[float]:
    """Microseconds per call until the host is free again: the least of the samples.

    Other load can only add to it.
    """
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(samples + 1):
        for function, samples_us in zip(functions, times, strict=True):
            fabric.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            if turn:  # the first time, all is cold
                samples_us.append((time.perf_counter() - begin) / calls * 1e6)
    everyone = vote(fabric.group, [min(of_function) for of_function in times])
    return [max(ranks) for ranks in zip(*everyone, strict=True)]


def _call_of(runtime: Runtime, problem: Any, inputs: Any) -> Callable[[], Any]:
    """A call of the runtime's method on the inputs that an operation makes."""
    op = op_of(problem)
    taken = {"matmul_all_reduce": 4, "flash_decode": 5, "matmul_reduce_scatter": 2}.get(op, 3)
    arguments, options = inputs[:taken], dict[str, Any]()
    if op == "all_gather_matmul":
        options["gather_dim"] = problem.gather_dim
    if op == "attention":
        options |= {"causal": problem.causal, "cu_seqlens": inputs[3]}
    if getattr(problem, "rms_norm", False):
        x, weight, bias, residual, norm_weight, eps = inputs
        arguments = (x, weight, norm_weight, bias, residual, float(eps))
        op = "matmul_all_reduce_rms_norm"
    return partial(getattr(runtime, op), *arguments, **options)


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=positive, default=2, help="ranks")
    options = made.parse_args()
    return exit_code(lambda: _time_all(options))


def _time_all(options: argparse.Namespace) -> None:
    """Print a table, and keep a record."""
    fabric = devices.fabric_for(options.fabric)
    devices.require(fabric, options.gpus)
    problems = [problem_class(op)(world_size=options.gpus, **fields) for op, fields in LIBRARY]
    with group_for(problems, fabric) as group:
        costs = group.call(time_library, deadline_s(group.hardware), problems=problems)[0]
        print("| | library | us | dispatched | added to a given problem | to a method |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for cost in costs:
            times = (cost.library_us, cost.dispatched_us, cost.given_us, cost.method_us)
            shown = " | ".join(f"{us:.1f}" for us in times)
            print(f"| {cost.problem} | `{cost.library}` | {shown} |")
        rows = [dataclasses.asdict(cost) for cost in costs]
        keep({"rows": rows}, group, fabric, FOLDER, options.out)


if __name__ == "__main__":
    from benchmarks import host_cost  # whose task has a module that workers find

    sys.exit(host_cost.main())
