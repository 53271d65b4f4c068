"""The library path on registered buffers: the vendor's matmul, then NCCL's low-latency kernels.

The matmul writes into a buffer that is registered with the communicator as symmetric, and the
all-reduce works there in place. The last kernel reads the result there: it copies it out, adds the
residual, or normalises.
"""

from __future__ import annotations

import torch

from taxfree_kernels.fabric.base import Fabric, Scratch
from taxfree_kernels.matmul_all_reduce.baseline import BaselinePlan
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.registered import RegisteredPlan, RegisteredVariant
from taxfree_kernels.variant import Config


class RegisteredAllReducePlan(RegisteredPlan, BaselinePlan):
    """Matmul into a registered buffer, all-reduce there, one kernel that reads the result."""

    _finish_name = "copy out"

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        self.launches = 3

    def _reserve(self, problem: MatmulAllReduce, fabric: Fabric) -> Scratch:
        dtype = getattr(torch, problem.dtype)
        return self._memory(fabric).scratch(((problem.elements,), dtype))

    def _total(self, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self._in_scratch(out.shape[-2])


class Registered(RegisteredVariant):
    """Vendor matmul, all-reduce in a registered buffer."""

    plan_class = RegisteredAllReducePlan


VARIANT = Registered()
