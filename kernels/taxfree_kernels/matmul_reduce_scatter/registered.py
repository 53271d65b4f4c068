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
from taxfree_kernels.registered import RegisteredPlan, RegisteredVariant
from taxfree_kernels.variant import Config, Step


class RegisteredReduceScatterPlan(RegisteredPlan, BaselinePlan):
    """The baseline's pipeline between registered buffers."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        self.launches += 1

    def _others(self, problem: MatmulReduceScatter) -> tuple[int, ...]:
        return (problem.shard_rows * problem.shard_columns,)

    def _shard(self, out: torch.Tensor) -> torch.Tensor:
        return self._scratch()[2][: out.numel()].view(out.shape)

    def run(self, *tensors: Any) -> torch.Tensor:
        *inputs, out = tensors
        return torch.Tensor.copy_(out, super().run(*inputs, self._shard(out)))

    def steps(self, *tensors: Any) -> list[Step]:
        *inputs, out = tensors
        shard = self._shard(out)
        copy_out = Step("copy out", "copy", lambda: out.copy_(shard), memory_bytes=2 * out.nbytes)
        return [*super().steps(*inputs, shard), copy_out]


class Registered(RegisteredVariant):
    """Vendor matmul, reduce-scatter between registered buffers."""

    plan_class = RegisteredReduceScatterPlan


VARIANT = Registered()
