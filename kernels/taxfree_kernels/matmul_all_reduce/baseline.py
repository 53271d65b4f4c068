"""The library path: the vendor's matmul, then the collective library's all-reduce.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank's matmul
is done, and a partial sum that goes through memory. The bias is added by rank 0's matmul, in its
epilogue; the residual after the sum, as no vendor's matmul adds a matrix for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.variant import Config, Plan, Variant
from taxfree_kernels.vendor import matmul_into


class BaselinePlan(Plan):
    """Matmul into the output, all-reduce in place, one addition for a residual."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        self._group, self._adds_bias = fabric.group, fabric.rank == 0
        self.launches = 2 + problem.residual

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        matmul_into(out, x, weight, bias if self._adds_bias else None)
        dist.all_reduce(out, group=self._group)
        return out if residual is None else out.add_(residual)


class Baseline(Variant):
    """The library, as good as an expert would call it."""

    name = "baseline"
    fused = False

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric)


VARIANT = Baseline()
