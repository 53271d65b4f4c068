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
from taxfree_kernels.variant import Config, Plan, Step, Variant
from taxfree_kernels.vendor import matmul_into


class BaselinePlan(Plan):
    """Matmul into the output, all-reduce in place, one addition for a residual."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        self._group, self._adds_bias = fabric.group, fabric.rank == 0
        self._one = self._buffer(fabric, (1, 1), getattr(torch, problem.dtype))
        self.launches = 2 + problem.residual

    def _buffer(self, fabric: Fabric, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=fabric.device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        self._multiply(x, weight, bias, out)
        self._reduce(out)
        return out if residual is None else out.add_(residual)

    def steps(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> list[Step]:
        steps = [
            Step("matmul", "producer", lambda: self._multiply(x, weight, bias, out)),
            Step(
                "all-reduce",
                "collective",
                lambda: self._reduce(out),
                least=lambda: self._reduce(self._one),
            ),
        ]
        if residual is not None:
            steps.append(
                Step("residual", "copy", lambda: out.add_(residual), memory_bytes=3 * out.nbytes)
            )
        return steps

    def _multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        matmul_into(out, x, weight, bias if self._adds_bias else None)

    def _reduce(self, partial: torch.Tensor) -> None:
        dist.all_reduce(partial, group=self._group)


class Baseline(Variant):
    """The library, as good as an expert would call it."""

    name = "baseline"
    fused = False

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric)


VARIANT = Baseline()
