"""The library path on registered buffers: NCCL's low-latency kernels, then the vendor's matmul.

Both ends of the collective live in a memory pool that is registered with the communicator as
symmetric; the caller's shard is copied into it, which the time includes.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.all_gather_matmul.baseline import BaselinePlan
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.registered import RegisteredMemory, RegisteredVariant
from taxfree_kernels.variant import Config, Plan, Step


class RegisteredPlan(BaselinePlan):
    """The baseline's pipeline between registered buffers."""

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric) -> None:
        self._memory = RegisteredMemory(fabric)
        super().__init__(problem, fabric)
        size = (problem.shard_rows, problem.shard_columns)
        self._shard = self._memory.zeros(size, self._gathered.dtype)
        self._memory.register()
        self._padded = None
        self.launches = 3 + self._needs_layout

    def _buffer(self, fabric: Fabric, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.zeros(size, dtype)

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        self._copy_in(a)
        return super().__call__(self._shard, weight, bias, out)

    def steps(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> list[Step]:
        copy_in = Step("copy in", "copy", lambda: self._copy_in(a), memory_bytes=2 * a.nbytes)
        return [copy_in, *super().steps(self._shard, weight, bias, out)]

    def _copy_in(self, a: torch.Tensor) -> None:
        self._shard[: a.shape[0]].copy_(a)


class Registered(RegisteredVariant):
    """All-gather between registered buffers, vendor matmul."""

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return RegisteredPlan(problem, fabric)


VARIANT = Registered()
