"""A last kernel that adds the residual, normalises the sum, and may quantise it, row by row.

Engines run such a kernel after their collectives: the residual costs no launch of its own. It also
follows our own sums in which no rank has whole rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware, fp8_of
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.reduction.fused import OutputParts, Quantised, parts_of, store_normalised
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Plan, Space, Variant

_MOST_THREADS = 1024
_A_THREAD = 32  # elements of a row


@triton.jit(do_not_specialize=["count"])
def _add_and_normalise(
    total_ptr, residual_ptr, norm_weight_ptr, eps_ptr, quantised, out_ptr, count, n,
    HAS_RESIDUAL: tl.constexpr, BLOCK_ROW: tl.constexpr, OUT_SCALES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_ROW)
    mask = column < n
    offsets = row.to(tl.int64) * n + column
    total = tl.load(total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + column, mask=mask, other=0.0)
    store_normalised(
        total, row, offsets, mask, norm_weight, eps_ptr, quantised, out_ptr, count, n, OUT_SCALES
    )


class RMSNorm:
    """The output from a sum [m, n], which may be its part of the output."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        block, warp_size = power_of_2(problem.n, 1), fabric.hardware.warp_size
        threads = min(_MOST_THREADS, max(warp_size, block // _A_THREAD))
        self._problem = problem
        self._kind = getattr(torch, fp8_of(fabric.hardware.architecture))
        self._kernel = Kernel(
            _add_and_normalise,
            grid=0,
            constants={
                "HAS_RESIDUAL": problem.residual,
                "BLOCK_ROW": block,
                "OUT_SCALES": problem.out_scales,
            },
            options=compile_options(fabric.backend, {"num_warps": threads // warp_size}),
        )
        self._sized = fabric.workspace.by_size(self.kernel)

    def kernel(self, m: int) -> Kernel:
        """The kernel for m rows."""
        n = self._problem.n
        return self._kernel.resized(m, (m * n, n))

    def total_of(self, out: torch.Tensor) -> torch.Tensor:
        """The sum's part of the output."""
        return self._parts(out).total if self._problem.is_quantised else out[1]

    def _parts(self, out: torch.Tensor, *scale: torch.Tensor) -> OutputParts:
        return parts_of(out, self._problem.n, self._problem.out_scales, self._kind, *scale)

    def __call__(
        self,
        total: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: torch.Tensor,
        *out_scale: torch.Tensor,
    ) -> torch.Tensor:
        addend, quantised = total if residual is None else residual, None
        if self._problem.is_quantised:
            values, scale, _ = self._parts(out, *out_scale)
            quantised = Quantised(values, scale)
        self._sized[len(total)](total, addend, norm_weight, eps, quantised, out)
        return out


class NormAfterPlan(Plan):
    """The plan of a sum with its addends, then a kernel that normalises what it wrote."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, total: Plan) -> None:
        self._total, self._norm = total, RMSNorm(replace(problem, residual=False), fabric)
        self._norm_inputs = problem.norm_inputs
        self.launches = total.launches + 1

    @property
    def connects(self) -> bool:
        return self._total.connects

    def connect(self) -> None:
        self._total.connect()

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (*self._total.kernels(size), self._norm.kernel(size))

    def run(self, *tensors: Any) -> torch.Tensor:
        x, weight, bias, residual, *others, out = tensors
        norm, scales = others[: self._norm_inputs], others[self._norm_inputs :]
        total = self._norm.total_of(out)
        self._total.run(x, weight, bias, residual, None, None, *scales, total)
        return self._norm(total, None, out, *norm)


class NormAfter(Variant):
    """Before a variant that does not normalise, in the bases of a class: two launches do."""

    def unsupported_reason(self, problem: Any, hardware: Hardware) -> str | None:
        return super().unsupported_reason(_sum_of(problem), hardware)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return super().space(_sum_of(problem), hardware)

    def seed_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return super().seed_configs(_sum_of(problem), hardware)

    def illegal_reason(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        return super().illegal_reason(_sum_of(problem), hardware, config)

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        plan = super().plan(_sum_of(problem), fabric, config)
        return NormAfterPlan(problem, fabric, plan) if problem.rms_norm else plan


def _sum_of(problem: MatmulAllReduce) -> MatmulAllReduce:
    return replace(problem, rms_norm=False, out_scales="none")
