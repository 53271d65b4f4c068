"""PyTorch's own all-reduces over symmetric memory, behind the vendor's matmul.

The matmul writes into a symmetric buffer. One shot: every rank loads all ranks' buffers and adds.
Two shots: every rank adds a block, and loads the blocks that the others have added. PyTorch's
multicast ops are left out: NVLink multicast was off where we measured.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.partial_sums.spaces import partial_bytes
from taxfree_kernels.variant import Config, Plan, Space, Variant
from taxfree_kernels.vendor import matmul_into, symm_mem_op

_ONE_SHOT_BYTES = 1 << 18  # up to which one shot is tried first


class TorchSymmMemPlan(Plan):
    """Matmul into a symmetric buffer, PyTorch's all-reduce, one addition for a residual."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        name = {1: "one_shot_all_reduce_out", 2: "two_shot_all_reduce_out"}[config["SHOTS"]]
        self._all_reduce = symm_mem_op(name, fabric.group)
        self._group_name, self._adds_bias = fabric.group.group_name, fabric.rank == 0
        dtype = getattr(torch, problem.dtype)
        self._partial = symm_mem.empty(problem.m, problem.n, dtype=dtype, device=fabric.device)
        symm_mem.rendezvous(self._partial, self._group_name)
        self.launches = 2 + problem.residual

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm_weight: None,
        eps: None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        matmul_into(self._partial, x, weight, bias if self._adds_bias else None)
        self._all_reduce(self._partial, "sum", self._group_name, out)
        return out if residual is None else out.add_(residual)


class TorchSymmMem(Variant):
    """Vendor matmul, PyTorch's all-reduce over symmetric memory."""

    name = "torch_symm_mem"
    fused = False

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if hardware.backend != "cuda":
            return "torch's ops need CUDA"
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.rms_norm:
            return "it does not normalise"
        if problem.dtype != "bfloat16":
            return "torch's ops add bfloat16 or float32"
        if problem.elements % 8:
            return "torch's ops want whole blocks of 16 bytes"
        return None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {"SHOTS": (1, 2)}

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        order = (1, 2) if partial_bytes(problem) <= _ONE_SHOT_BYTES else (2, 1)
        return [{"SHOTS": shots} for shots in order]

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return TorchSymmMemPlan(problem, fabric, config)


VARIANT = TorchSymmMem()
