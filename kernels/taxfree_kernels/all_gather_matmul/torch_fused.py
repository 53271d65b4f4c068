"""PyTorch's own fused op: copies over symmetric memory, pipelined with a matmul per shard.

It allocates its result, which is copied into the output here; the time includes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.several import Biases, SeveralWeights, SeveralWeightsPlan
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config
from taxfree_kernels.vendor import fused_op_unsupported_reason, symm_mem_op

_MULTICAST_ROWS = 2048  # at most, of which PyTorch gathers so


class TorchFusedPlan(SeveralWeightsPlan):
    """One call of ``torch.ops.symm_mem.fused_all_gather_matmul``, or that of fp8 factors."""

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        self._group, self._problem = fabric.group, problem
        # Per shard a copy and a matmul, but for the own one a matmul only; then the copy here.
        self.launches = 2 * problem.world_size
        # With multicast all of few rows are gathered in the workspace; else the shard is copied.
        rows = max(problem.shard_rows, min(problem.m, _MULTICAST_ROWS))
        self._workspace_bytes = rows * (problem.factor_bytes * problem.k + 4 * problem.is_fp8)

    def connect(self) -> None:
        name = f"fused_all_gather_{'scaled_' * self._problem.is_fp8}matmul"
        self._op = symm_mem_op(name, self._group, self._workspace_bytes)

    def run(self, *tensors: Any) -> torch.Tensor:
        a, weight, bias, *scales, out = tensors
        if scales:
            a_scale, weight_scale = scales
            _, (product,) = self._op(
                a, [weight], a_scale, [weight_scale], 0, self._group.group_name, [bias], [None],
                [out.dtype], [self._problem.fast_accumulation],
            )  # fmt: skip
            return out.copy_(product)
        _, (product,) = self._op(a, [weight], 0, self._group.group_name, return_A=False)
        return out.copy_(product) if bias is None else torch.add(product, bias, out=out)

    def run_several(
        self, a: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, returns_a: bool
    ) -> list[torch.Tensor]:
        whole, products = self._op(a, weights, 0, self._group.group_name, return_A=returns_a)
        pairs = zip(products, biases, strict=True)
        outs = [product if bias is None else product + bias for product, bias in pairs]
        return [*outs, whole] if returns_a else outs


class TorchFused(SeveralWeights):
    """PyTorch's pipelined op."""

    plan_class = TorchFusedPlan
    fused = False
    is_library = True
    gives_way = True

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if reason := fused_op_unsupported_reason(problem, hardware):
            return reason
        if problem.gather_dim == 1:
            return "torch's fused op rounds the sum after each rank's columns"
        if problem.m % problem.world_size:
            return "torch's fused op gathers equal shards"
        return None


VARIANT = TorchFused()
