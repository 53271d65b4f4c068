"""The library path on registered buffers: the vendor's matmul, then NCCL's low-latency kernels.

The matmul writes into a buffer that is registered with the communicator as symmetric, and the
all-reduce works there in place; from there the result is copied out, added to the residual, or
normalised.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_all_reduce.baseline import BaselinePlan
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.registered import RegisteredMemory, RegisteredVariant
from taxfree_kernels.variant import Config, Plan


class RegisteredPlan(BaselinePlan):
    """Matmul into a registered buffer, all-reduce there, one kernel that reads the result."""

    _finish_name = "copy out"

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        self._memory = RegisteredMemory(fabric)
        super().__init__(problem, fabric)
        self._sum = self._memory.zeros((problem.m, problem.n), self._one.dtype)
        self._memory.register()
        self.launches = 3

    def _buffer(self, fabric: Fabric, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.zeros(size, dtype)

    def _total(self, out: torch.Tensor) -> torch.Tensor:
        return self._sum

    def _add(
        self, total: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if residual is None:
            return out.copy_(total)
        return torch.add(total, residual, out=out)


class Registered(RegisteredVariant):
    """Vendor matmul, all-reduce in a registered buffer."""

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return RegisteredPlan(problem, fabric)


VARIANT = Registered()
