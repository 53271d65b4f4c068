"""PyTorch's own fused op: a matmul per shard, pipelined with copies over symmetric memory.

It allocates its result, which is copied into the output here; the measured time includes the copy.
"""

from __future__ import annotations

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import ITEM_BYTES, Config, Plan, Variant
from taxfree_kernels.vendor import fused_op_unsupported_reason, symm_mem_op


class TorchFusedPlan(Plan):
    """One call of ``torch.ops.symm_mem.fused_matmul_reduce_scatter``, or that of fp8 factors."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> None:
        self._group, self._problem = fabric.group, problem
        # A matmul and a copy per shard, no copy for this rank's; then the sum, and the copy here.
        self.launches = 2 * problem.world_size + 1
        elements = 2 * problem.shard_rows * problem.shard_columns  # of two products, in turns
        self._workspace_bytes = elements * ITEM_BYTES[problem.dtype]

    def connect(self) -> None:
        name = f"fused_{'scaled_' * self._problem.is_fp8}matmul_reduce_scatter"
        self._op = symm_mem_op(name, self._group, self._workspace_bytes)

    def run(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *scales, out = rest
        dim, group = self._problem.scatter_dim, self._group.group_name
        if not scales:
            return out.copy_(self._op(x, weight, "sum", dim, group))
        shape = [x.shape[0], weight.shape[1]]
        return out.copy_(
            self._op(
                x, weight, *scales, "sum", dim, dim, group, shape, out_dtype=out.dtype,
                use_fast_accum=self._problem.fast_accumulation,
            )
        )  # fmt: skip


class TorchFused(Variant):
    """PyTorch's pipelined op."""

    plan_class = TorchFusedPlan
    fused = False
    is_library = True

    def unsupported_reason(self, problem: MatmulReduceScatter, hardware: Hardware) -> str | None:
        if reason := fused_op_unsupported_reason(problem, hardware):
            return reason
        if problem.is_fp8 and problem.scatter_dim:
            return "torch's fused op scatters rows of fp8 products"
        if problem.m % problem.world_size and problem.scatter_dim == 0:
            return "torch's fused op splits rows evenly"
        return None


VARIANT = TorchFused()
