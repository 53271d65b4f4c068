"""Tunes what some calls met, in the processes that made them.

    torchrun --nproc-per-node 2 -m benchmarks.accept.autotune --budget 60s

The sizes are of no model, so that no table has them. Rank 0 prints one JSON document: what won, the
seconds of each problem and of all, and whether calls by the new records are exact on integers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import taxfree
from taxfree_kernels.variant import Problem, op_of, operation, problem_class


def _problems(has_gpus: bool) -> list[Problem]:
    world_size = dist.get_world_size()
    rows, n, k = ((16, 1024), 4608, 3840) if has_gpus else ((3,), 32, 64)
    fields: list[tuple[str, dict[str, Any]]] = []
    for m in rows:
        size = {"m": m, "n": n, "k": k}
        fields += [
            ("all_gather_matmul", size | {"gather_dim": 1}),
            ("matmul_all_reduce", size),
            ("matmul_reduce_scatter", size),
        ]
    return [
        problem_class(op)(**values, dtype="bfloat16", world_size=world_size)
        for op, values in fields
    ]


def _is_exact(runtime: taxfree.Runtime, problem: Problem) -> bool:
    fabric, made = runtime._fabric, operation(op_of(problem))
    where = (problem, fabric.rank, 1, fabric.device)
    out = made.empty_output(problem, fabric.device)
    runtime.call(problem, made.make_inputs(*where, integers=True), out)
    return torch.equal(out, made.reference(*where, integers=True).to(out.dtype))


def main() -> None:
    """Run the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--budget", default="60s")
    options = made.parse_args()
    logging.basicConfig(format="%(relativeCreated)6d ms %(message)s")
    logging.getLogger("taxfree").setLevel(logging.INFO)
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpus else "gloo")
    with taxfree.init() as runtime:
        problems = _problems(has_gpus)
        with taxfree.autotune(options.budget) as tuned:
            for problem in problems:
                _is_exact(runtime, problem)
            begin = time.monotonic()
        seconds = time.monotonic() - begin
        rows = [_row(outcome, _is_exact(runtime, outcome.problem)) for outcome in tuned]
        runtime.check()
        if runtime._fabric.rank == 0:
            print(json.dumps({"seconds": seconds, "rows": rows}), flush=True)
    dist.barrier()
    os._exit(0)  # captured collectives make NCCL's own teardown slow


def _row(tuned: taxfree.Autotuned, is_same: bool) -> dict[str, Any]:
    record = tuned.record
    row = {
        "op": op_of(tuned.problem), "problem": dataclasses.asdict(tuned.problem),
        "seconds": tuned.seconds, "is_same": is_same, "winner": None, "reason": tuned.reason,
    }  # fmt: skip
    if record is not None:
        row |= {
            "winner": record.winner.variant, "candidates": record.trials,
            "median_us": record.winner.median_us, "library_us": record.baseline.median_us,
        }  # fmt: skip
    return row


if __name__ == "__main__":
    main()
