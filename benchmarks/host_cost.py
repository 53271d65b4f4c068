"""Measures what a call takes the host, up to the driver's launch, without a GPU.

    python -m benchmarks.host_cost

Every fused variant is planned for eight H200s at its first config and called with tensors that have
no memory; its kernels are compiled, but Triton's launcher is replaced by a no-op. What remains is
the Python time of an eager call, in the plan and in Triton.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from taxfree_kernels.compiled.compile import AbsentDevice, target_of
from taxfree_kernels.compiled.record import planned
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants

H200 = KNOWN["h200"]
PROBLEMS: dict[str, dict[str, Any]] = {
    "all_gather_matmul": {"m": 64, "n": 3584, "k": 8192, "gather_dim": 1},
    "matmul_all_reduce": {"m": 16, "n": 8192, "k": 3584},
    "matmul_reduce_scatter": {"m": 64, "n": 8192, "k": 3584},
    "flash_decode": {
        "batch": 1, "q_heads": 96, "kv_heads": 12, "head_dim": 128, "kv_len_per_rank": 8192,
    },
}  # fmt: skip
_SAMPLES, _CALLS = 9, 2000


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
    """Time per call, minimum over samples of many calls: other load can only add to it."""
    samples = []
    for _ in range(_SAMPLES):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((time.perf_counter() - begin) / _CALLS * 1e6)
    return min(samples)


def main() -> int:
    """Print a table; returns the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    triton.runtime.driver.set_active(_IdleDevice(target_of(H200)))
    torch.set_num_threads(1)
    print("| | variant | launches | us |\n| --- | --- | ---: | ---: |")
    for op, fields in PROBLEMS.items():
        problem = problem_class(op)(world_size=8, **fields)
        for name, variant in variants(op).items():
            if not variant.fused or variant.refuses_problem(problem, H200) is not None:
                continue
            config = variant.first_configs(problem, H200)[0]
            plan, tensors = planned(op, name, problem, config, H200)
            us = microseconds(partial(plan, *tensors))
            print(f"| {op} | `{name}` | {plan.launches} | {us:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
