"""The library path: the vendor's matmul, then the collective library's all-reduce.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank's matmul
is done, and a partial sum that goes through memory. Rank 0's matmul adds the bias in its epilogue.
The residual is added after the sum, because no vendor's matmul adds a matrix for free. If there is
a normalisation kernel, that kernel adds it; it also quantises what it normalised, as code that a
compiler fuses does.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric, Scratch
from taxfree_kernels.launch import Kernel
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.rms_norm import RMSNorm
from taxfree_kernels.variant import Config, Plan, Step, Variant
from taxfree_kernels.vendor import all_reduce, multiply_into, try_fp8


class BaselinePlan(Plan):
    """Matmul into the output, all-reduce in place, one kernel for what follows the sum."""

    #: name of that kernel in reports when it does not normalise
    _finish_name = "residual"

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        self._group, self._adds_bias = fabric.group, fabric.rank == 0
        self._n, self._norm_inputs = problem.n, problem.norm_inputs
        self._is_fast = problem.fast_accumulation
        try_fp8(problem, fabric.device, problem.bias and self._adds_bias)
        self._norm = RMSNorm(problem, fabric) if problem.rms_norm else None
        self._scratch = self._reserve(problem, fabric)
        self.launches = 2 + (problem.residual or problem.rms_norm)

    def _reserve(self, problem: MatmulAllReduce, fabric: Fabric) -> Scratch:
        """Scratch memory for the sum: the output may be the residual, which is read later."""
        elements = problem.elements if problem.residual else 1
        return fabric.workspace.scratch(((elements,), getattr(torch, problem.dtype)))

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return () if self._norm is None else (self._norm.kernel(size),)

    def run(self, *tensors: Any) -> torch.Tensor:
        x, weight, bias, residual, *others, out = tensors
        norm, scales = others[: self._norm_inputs], others[self._norm_inputs :]
        total = self._total(out, residual)
        self._multiply(x, weight, bias, total, *scales)
        self._reduce(total)
        return self._finish(total, residual, out, *norm)

    def steps(self, *tensors: Any) -> list[Step]:
        x, weight, bias, residual, *others, out = tensors
        norm, scales = others[: self._norm_inputs], others[self._norm_inputs :]
        total = self._total(out, residual)
        steps = [
            Step("matmul", "producer", lambda: self._multiply(x, weight, bias, total, *scales)),
            Step(
                "all-reduce",
                "collective",
                lambda: self._reduce(total),
                latency_probe=lambda: self._reduce(self._scratch()[0][:1]),
            ),
        ]
        if self.launches == 3:
            name = self._finish_name if self._norm is None else "rms_norm"
            moved = total.nbytes + out.nbytes + (0 if residual is None else residual.nbytes)
            steps.append(
                Step(
                    name,
                    "copy",
                    lambda: self._finish(total, residual, out, *norm),
                    memory_bytes=moved,
                )
            )
        return steps

    def _total(self, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The buffer of the all-reduce."""
        total = out if self._norm is None else self._norm.total_of(out)
        if residual is not None and residual.data_ptr() == total.data_ptr():
            return self._in_scratch(len(total))
        return total

    def _in_scratch(self, m: int) -> torch.Tensor:
        return self._scratch()[0][: m * self._n].view(m, self._n)

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        total: torch.Tensor,
        *scales: torch.Tensor,
    ) -> None:
        own_bias = bias if self._adds_bias else None
        multiply_into(total, x, weight, own_bias, *scales, is_fast=self._is_fast)

    def _reduce(self, partial: torch.Tensor) -> None:
        all_reduce(partial, self._group)

    def _finish(
        self,
        total: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        *norm: torch.Tensor,
    ) -> torch.Tensor:
        if self._norm is not None:
            return self._norm(total, residual, out, *norm)
        if residual is not None:
            return torch.add(total, residual, out=out)
        return out if total is out else out.copy_(total)


class Baseline(Variant):
    """The library, called as an expert would."""

    plan_class = BaselinePlan
    fused = False
    is_library = True


VARIANT = Baseline()
