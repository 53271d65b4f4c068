"""The library path: the vendor's matmul, then the collective library's all-reduce.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank's matmul
is done, and a partial sum that goes through memory. Rank 0's matmul adds the bias in its epilogue.
The residual is added after the sum, since no vendor's matmul adds a matrix for free; if there is a
normalisation kernel, it adds it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.rms_norm import RMSNorm
from taxfree_kernels.variant import Config, Plan, Step, Variant
from taxfree_kernels.vendor import matmul_into


class BaselinePlan(Plan):
    """Matmul into the output, all-reduce in place, one kernel for a residual and RMSNorm."""

    #: name of that kernel in reports when it does not normalise
    _finish_name = "residual"

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        self._group, self._adds_bias = fabric.group, fabric.rank == 0
        self._one = self._buffer(fabric, (1, 1), getattr(torch, problem.dtype))
        self._norm = RMSNorm(problem, fabric) if problem.rms_norm else None
        self.launches = 2 + (problem.residual or problem.rms_norm)

    def _buffer(self, fabric: Fabric, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=fabric.device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        total = self._total(out)
        self._multiply(x, weight, bias, total)
        self._reduce(total)
        return self._finish(total, residual, norm_weight, eps, out)

    def steps(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: torch.Tensor | None,
        out: torch.Tensor,
    ) -> list[Step]:
        total = self._total(out)
        steps = [
            Step("matmul", "producer", lambda: self._multiply(x, weight, bias, total)),
            Step(
                "all-reduce",
                "collective",
                lambda: self._reduce(total),
                least=lambda: self._reduce(self._one),
            ),
        ]
        if self.launches == 3:
            name = self._finish_name if self._norm is None else "rms_norm"
            moved = total.nbytes + out.nbytes + (0 if residual is None else residual.nbytes)
            steps.append(
                Step(
                    name,
                    "copy",
                    lambda: self._finish(total, residual, norm_weight, eps, out),
                    memory_bytes=moved,
                )
            )
        return steps

    def _total(self, out: torch.Tensor) -> torch.Tensor:
        """Where the ranks' partial sums are added up."""
        return out if self._norm is None else out[1]

    def _multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, total: torch.Tensor
    ) -> None:
        matmul_into(total, x, weight, bias if self._adds_bias else None)

    def _reduce(self, partial: torch.Tensor) -> None:
        dist.all_reduce(partial, group=self._group)

    def _finish(
        self,
        total: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        if self._norm is not None:
            return self._norm(total, residual, norm_weight, eps, out)
        return self._add(total, residual, out)

    def _add(
        self, total: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        return out if residual is None else out.add_(residual)


class Baseline(Variant):
    """The library, as good as an expert would call it."""

    name = "baseline"
    fused = False

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric)


VARIANT = Baseline()
