"""The library path on registered buffers: the vendor's matmul, then NCCL's low-latency kernels.

Both buffers of the collective live in a memory pool that is registered with the communicator as
symmetric; the shard is copied out of it, which the measured time includes.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_reduce_scatter.baseline import BaselinePlan
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.registered import RegisteredMemory, RegisteredVariant
from taxfree_kernels.variant import Config, Plan, Step


class RegisteredPlan(BaselinePlan):
    """The baseline's pipeline between registered buffers."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric) -> None:
        self._memory = RegisteredMemory(fabric)
        super().__init__(problem, fabric)
        self._shard = self._buffer(fabric, (problem.shard_rows, problem.shard_columns))
        self._memory.register()
        self.launches += 1

    def _buffer(self, fabric: Fabric, size: tuple[int, int]) -> torch.Tensor:
        return self._memory.zeros(size, getattr(torch, self._problem.dtype))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(super().__call__(x, weight, self._shard))

    def steps(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> list[Step]:
        copy_out = Step(
            "copy out", "copy", lambda: out.copy_(self._shard), memory_bytes=2 * out.nbytes
        )
        return [*super().steps(x, weight, self._shard), copy_out]


class Registered(RegisteredVariant):
    """Vendor matmul, reduce-scatter between registered buffers."""

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return RegisteredPlan(problem, fabric)


VARIANT = Registered()
