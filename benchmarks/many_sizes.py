"""Calls four operations with ever new numbers of rows, as an engine does, and watches memory.

    python -m benchmarks.many_sizes --gpus 8
    python -m benchmarks.many_sizes --gpus 2 --share

Ranges of rows are prepared, then called at random sizes. The record has the memory of the runtime
and of the device's allocator, the number of compiled kernels, and the host time of first and later
calls of a size. Some outputs are compared with the float64 reference. Where ranks share a GPU, host
times include waiting for it, so their minimum is recorded too. The record is written to
``benchmarks/results/many_sizes``.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.commands import call_of, exit_code, keep, parser, positive, record_of
from taxfree import devices, fingerprints
from taxfree._runtime.runtime import Runtime
from taxfree.errors import WrongResult
from taxfree.workers.group import WorkerGroup
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.gpu import SHARING
from taxfree_kernels.fabric.layout import arena_bytes
from taxfree_kernels.variant import op_of, operation, problem_class, resized

FOLDER = Path(__file__).parent / "results" / "many_sizes"
DEADLINE_S = 400.0
_SETTLED = 100  # calls after which no memory may grow
_ATTENTION_EVERY = 100  # calls: one interpreted call takes a second

#: operation -> its winner, the largest size, and the problem's fields on GPUs and interpreted
SERVED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "all_gather_matmul": ("push", 2000, {"n": 768, "k": 1536}, {"n": 16, "k": 16}),
    "matmul_all_reduce": (
        "push_two_shot", 2000,
        {"n": 768, "k": 1536, "residual": True}, {"n": 16, "k": 16, "residual": True},
    ),
    "matmul_reduce_scatter": ("push_lamport", 2000, {"n": 768, "k": 1536}, {"n": 16, "k": 16}),
    "flash_decode": (
        "fused", 8,
        {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv_len_per_rank": 4096},
        {"q_heads": 3, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 8},
    ),
}  # fmt: skip
_RECORDED = 8  # rows, or sequences, of the one record of each operation


def serve(fabric: Fabric, calls: int, seed: int) -> dict[str, Any]:
    """Call; a task of the workers.

    Returns:
        Of this rank: `wrong` outputs of those `compared`; after the first calls and at the end, the
        runtime's account of its memory and the bytes of the allocator, or of the process;
        `kernels` by operation; microseconds of calls.
    """
    problems = [_problem(op, fabric) for op in SERVED]
    runtime = Runtime.on_fabric(
        fabric,
        [record_of(each, SERVED[op_of(each)][0], fabric.hardware, "eager") for each in problems],
    )
    runtime.prepare([each.for_rows(1, SERVED[op_of(each)][1]) for each in problems])
    *matmuls, attention = problems
    sizes, seen, held = random.Random(seed), set[Any](), []
    first, later, compared, wrong = [], [], 0, 0
    for call in range(calls):
        problem = attention if call % _ATTENTION_EVERY == 0 else matmuls[call % 3]
        problem = _of_size(problem, sizes.randint(1, SERVED[op_of(problem)][1]))
        is_compared = sizes.random() < 0.02 and fabric.has_graphs
        inputs = operation(op_of(problem)).make_inputs(
            problem, fabric.rank, 1, fabric.device, integers=is_compared
        )
        fabric.synchronize()
        is_attention = op_of(problem) == "flash_decode"
        options = {"scale": float(inputs[5][0])} if is_attention else {}
        called = call_of(runtime, problem, inputs, **options)
        begin = time.perf_counter()
        out = called()
        us = (time.perf_counter() - begin) * 1e6
        (later if problem in seen else first).append(us)
        seen.add(problem)
        if is_compared:
            reference = operation(op_of(problem)).reference
            expected = reference(problem, fabric.rank, 1, fabric.device, integers=True)
            compared, wrong = compared + 1, wrong + (not torch.equal(out.double(), expected))
        if call in (_SETTLED, calls - 1):
            del inputs, out
            held.append((dataclasses.asdict(runtime.memory()), _bytes_held(fabric)))
    runtime.check()
    (early, early_bytes), (late, late_bytes) = held
    return {
        "sizes": len(seen),
        "compared": compared,
        "wrong": wrong,
        "memory_after_100": early,
        "memory": late,
        "held_after_100_bytes": early_bytes,
        "held_bytes": late_bytes,
        "kernels": runtime.kernels(),
        "first_call_us": _summary(first),
        "later_call_us": _summary(later),
    }


def _problem(op: str, fabric: Fabric) -> Any:
    _, _, on_gpus, interpreted = SERVED[op]
    fields = on_gpus if fabric.has_graphs else interpreted
    problem = problem_class(op)
    size = fingerprints.rows_field(op)
    return problem(**{size: _RECORDED}, **fields, world_size=fabric.world_size)


def _of_size(problem: Any, size: int) -> Any:
    return resized(problem, **{fingerprints.rows_field(op_of(problem)): size})


def _bytes_held(fabric: Fabric) -> int:
    """Bytes of the device's allocator; of the process, if interpreted."""
    if fabric.has_graphs:
        return int(torch.cuda.memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _summary(times: list[float]) -> dict[str, float]:
    if not times:
        return {}
    return {"median": round(statistics.median(times), 1), "least": round(min(times), 1)}


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=positive, help="ranks; default: all GPUs")
    made.add_argument("--share", action="store_true", help="ranks share the GPUs that are there")
    made.add_argument("--calls", type=positive, default=10_000)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args(arguments)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    from benchmarks.many_sizes import serve  # this may be __main__, which ranks lack

    fabric, there = devices.fabric_for(options.fabric), devices.available_gpus()
    ranks = options.gpus or there or 2
    variables = {SHARING: "1"} if options.share else {}
    with WorkerGroup(ranks, fabric, arena_bytes(64 << 20), 30.0, variables) as group:
        found = group.call(serve, DEADLINE_S, calls=options.calls, seed=options.seed)
        shared = there if options.share else None
        record = {"calls": options.calls, "seed": options.seed, "found": found[0]}
        print(record)
        keep(record, group, fabric, FOLDER, options.out, shared)
    wrong = sum(each["wrong"] for each in found)
    if wrong:
        raise WrongResult(f"{wrong} outputs differ from the reference")


if __name__ == "__main__":
    sys.exit(main())
