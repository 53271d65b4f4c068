"""The library path on registered buffers: the vendor's matmul, then NCCL's low-latency kernels.

The matmul writes into a buffer that is registered with the communicator as symmetric, where the
all-reduce then works in place; from there the result is copied, or added to the residual.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_all_reduce.baseline import BaselinePlan
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.registered import RegisteredMemory, RegisteredVariant
from taxfree_kernels.variant import Config, Plan, Step


class RegisteredPlan(BaselinePlan):
    """Matmul into a registered buffer, all-reduce there, one kernel that reads the result."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        self._memory = RegisteredMemory(fabric)
        super().__init__(problem, fabric)
        self._sum = self._memory.zeros((problem.m, problem.n), self._one.dtype)
        self._memory.register()
        self.launches = 3

    def _buffer(self, fabric: Fabric, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.zeros(size, dtype)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        super().__call__(x, weight, bias, None, self._sum)
        return self._copy_out(residual, out)

    def steps(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> list[Step]:
        moved = (2 if residual is None else 3) * out.nbytes
        copy_out = Step(
            "copy out", "copy", lambda: self._copy_out(residual, out), memory_bytes=moved
        )
        return [*super().steps(x, weight, bias, None, self._sum), copy_out]

    def _copy_out(self, residual: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        if residual is None:
            return out.copy_(self._sum)
        return torch.add(self._sum, residual, out=out)


class Registered(RegisteredVariant):
    """Vendor matmul, all-reduce in a registered buffer."""

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return RegisteredPlan(problem, fabric)


VARIANT = Registered()
