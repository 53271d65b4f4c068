"""Measures the host time of a call.

    python -m benchmarks.host_cost            # of our variants, up to the launch, without a GPU
    python -m benchmarks.host_cost --gpus 2   # of the library's paths, and what dispatch adds

Without a GPU, a record makes every fused variant the winner of a problem on eight H200s, at its
default config. The runtime calls it with tensors that have no memory. Its kernels are compiled, but
a no-op replaces Triton's launcher. The remaining time is the Python time of an eager call in the
runtime, the plan and Triton: of one size again and again, and of the first and second calls of many
prepared sizes.

With ranks, nothing is on record. Eager calls of the library's plans are timed with and without the
runtime. What the runtime adds is also timed alone: plans do nothing then.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks import host_cost_ranks
from benchmarks.commands import call_of, exit_code, keep, parser, positive, record_of
from taxfree import fingerprints
from taxfree._runtime.plans import rows_of
from taxfree._runtime.runtime import Runtime
from taxfree_check.cross_compile.compile import AbsentDevice, target_of
from taxfree_check.cross_compile.record import GhostFabric
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.meta import meta_tensors
from taxfree_kernels.variant import op_of, problem_class, resized, variants
from taxfree_tune import devices
from taxfree_tune.measuring.groups import deadline_s, group_for

H200 = KNOWN["h200"]
PROBLEMS: dict[str, dict[str, Any]] = {
    "all_gather_matmul": {"m": 64, "n": 3584, "k": 8192, "gather_dim": 1},
    "matmul_all_reduce": {"m": 64, "n": 8192, "k": 3584},
    "matmul_reduce_scatter": {"m": 64, "n": 8192, "k": 3584},
    "flash_decode": {
        "batch": 16, "q_heads": 96, "kv_heads": 12, "head_dim": 128, "kv_len_per_rank": 8192,
    },
}  # fmt: skip
#: of the library's paths; small, so that a host cannot wait for its device
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
_WORLD = 8
_SAMPLES, _CALLS = 9, 2000


class _Rank(GhostFabric):
    """One rank of a group whose peers agree to everything."""

    has_graphs = False
    group = SimpleNamespace(group_name="ghost")  # type: ignore[assignment]


class _Utils:
    def load_binary(self, *given: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 32, 0, 1024

    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": 1 << 18}


class _IdleDevice(AbsentDevice):
    """Launches by doing nothing."""

    utils = _Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *given: None


def microseconds(call: Callable[[], object]) -> float:
    """Time per call, the minimum over samples of many calls: other load can only add to it."""
    samples = []
    for _ in range(_SAMPLES):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((time.perf_counter() - begin) / _CALLS * 1e6)
    return min(samples)


def runtime_for(problem: Any, variant: str) -> Runtime:
    """A runtime that runs a variant, prepared for the sizes that its record serves."""
    rank = _Rank(_WORLD, H200, arena_bytes(problem.slot_bytes))
    runtime = Runtime.on_fabric(rank, [record_of(problem, variant, H200, "graph")])
    with mock.patch("taxfree._runtime.collectives.vote", lambda group, value: [value] * _WORLD):
        runtime.prepare([problem.for_rows(rows_of(problem) // 2 + 1, rows_of(problem))])
    return runtime


def _call(runtime: Runtime, problem: Any) -> Callable[[], Any]:
    return call_of(runtime, problem, meta_tensors(problem)[:-1])


def first_and_second_calls(problem: Any, variant: str) -> tuple[float, float]:
    """Median microseconds of the first and of the second call of each size that is served."""
    runtime, name = runtime_for(problem, variant), fingerprints.rows_field(op_of(problem))
    _call(runtime, problem)()  # compiles, as preparing does on a device
    sizes = range(rows_of(problem) // 2 + 1, rows_of(problem))
    problems = [resized(problem, **{name: size}) for size in sizes]
    calls = [
        _call(runtime, problem)
        for problem in problems
        if runtime.choice(problem).variant == variant  # which may not serve all sizes
    ]
    first, second = (statistics.median(map(_timed, calls)) for _ in range(2))
    return first, second


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=positive, help="time the library's paths on so many ranks")
    options = made.parse_args()
    return exit_code(lambda: _of_library(options) if options.gpus else _of_ours())


def _of_library(options: argparse.Namespace) -> None:
    """Print a table, and keep a record."""
    fabric = devices.fabric_for(options.fabric)
    devices.require(fabric, options.gpus)
    problems = [problem_class(op)(world_size=options.gpus, **fields) for op, fields in LIBRARY]
    with group_for(problems, fabric) as group:
        limit = deadline_s(group.hardware)
        costs = group.call(host_cost_ranks.time_library, limit, problems=problems)[0]
        print("| | library | us | dispatched | added to a given problem | to a method |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for cost in costs:
            times = (cost.library_us, cost.dispatched_us, cost.given_us, cost.method_us)
            shown = " | ".join(f"{us:.1f}" for us in times)
            print(f"| {cost.problem} | `{cost.library}` | {shown} |")
        rows = [dataclasses.asdict(cost) for cost in costs]
        keep({"rows": rows}, group, fabric, FOLDER, options.out)


def _of_ours() -> None:
    """Print a table."""
    triton.runtime.driver.set_active(_IdleDevice(target_of(H200)))
    torch.set_num_threads(1)
    print("| | variant | us | first call | second | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for op, fields in PROBLEMS.items():
        problem = problem_class(op)(world_size=_WORLD, **fields)
        for name, variant in variants(op).items():
            if not variant.fused or variant.unsupported_reason(problem, H200) is not None:
                continue
            us = microseconds(_call(runtime_for(problem, name), problem))
            pairs = [first_and_second_calls(problem, name) for _ in range(3)]
            first, second = (min(pair) for pair in zip(*pairs, strict=True))
            costs = f"{us:.1f} | {first:.1f} | {second:.1f} | {first / second:.2f}"
            print(f"| {op} | `{name}` | {costs} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
