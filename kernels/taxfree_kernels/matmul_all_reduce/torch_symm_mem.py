"""The vendor's matmul, then PyTorch's own all-reduce over symmetric memory.

The matmul writes into a symmetric buffer. One shot: every rank loads all ranks' buffers and adds.
Two shots: every rank adds a block, and loads the blocks that the others have added; or stores it
into all ranks' buffers, from which a residual or a norm reads the sum, which no copy takes out.
PyTorch's multicast ops are left out: NVLink multicast was off where we measured.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric, Workspace
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.matmul_all_reduce.baseline import BaselinePlan
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.reduction.spaces import partial_bytes
from taxfree_kernels.variant import Config, Plan, Space, Step, Variant
from taxfree_kernels.vendor import symm_mem_op

_IN_PLACE = 3  # SHOTS: two, of which the second stores into all ranks' buffers
_OPS = {
    1: "one_shot_all_reduce_out",
    2: "two_shot_all_reduce_out",
    _IN_PLACE: "two_shot_all_reduce_",
}
_ONE_SHOT_BYTES = 1 << 18  # one shot is tried first up to this size


class SymmetricMemory(Workspace):
    """Scratch memory in which PyTorch's ops find their peers'."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric.device, beside=fabric.workspace)
        self._group_name, self._known = fabric.group.group_name, 0

    def _allocate(self, size: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symm_mem

        self._known = 0
        return symm_mem.empty(size, dtype=torch.uint8, device=self._device)

    def rendezvous(self) -> None:
        """Make the block known to all peers; collective."""
        import torch.distributed._symmetric_memory as symm_mem

        if self._known != self._block.data_ptr():
            symm_mem.rendezvous(self._block, self._group_name)
            self._known = self._block.data_ptr()


class TorchSymmMemPlan(BaselinePlan):
    """Matmul into a symmetric buffer, PyTorch's all-reduce, one kernel for what follows."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        self._name, self._is_in_place = _OPS[config["SHOTS"]], config["SHOTS"] == _IN_PLACE
        if self._is_in_place:
            self.launches = 3
        self._memory: SymmetricMemory = fabric.memory_of(SymmetricMemory)
        dtype = getattr(torch, problem.dtype)
        self._partials = self._memory.scratch(((problem.elements,), dtype))

    def connect(self) -> None:
        self._memory.rendezvous()
        self._all_reduce = symm_mem_op(self._name, self._group)

    def steps(self, *tensors: Any) -> list[Step]:
        return Plan.steps(self, *tensors)

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        total: torch.Tensor,
        *scales: torch.Tensor,
    ) -> None:
        if not is_compiling():
            super()._multiply(x, weight, bias, self._partial(total), *scales)

    def _total(self, out: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        total = super()._total(out, residual)
        return self._partial(total) if self._is_in_place else total

    def _reduce(self, total: torch.Tensor) -> None:
        if not is_compiling():
            outs = () if self._is_in_place else (total,)
            self._all_reduce(self._partial(total), "sum", self._group.group_name, *outs)

    def _partial(self, total: torch.Tensor) -> torch.Tensor:
        """This rank's symmetric buffer."""
        return self._partials()[0][: total.numel()].view(total.shape)


class TorchSymmMem(Variant):
    """Vendor matmul, PyTorch's all-reduce over symmetric memory."""

    plan_class = TorchSymmMemPlan
    fused = False
    is_library = True

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        if hardware.backend != "cuda":
            return "torch's ops need CUDA"
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.dtype != "bfloat16":
            return "torch's ops add bfloat16 or float32"
        if problem.elements % 8:
            return "torch's ops want whole blocks of 16 bytes"
        return None

    def space(self, problem: MatmulAllReduce, hardware: Hardware) -> Space:
        return {"SHOTS": tuple(_OPS)}

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        is_small = partial_bytes(problem) <= _ONE_SHOT_BYTES
        order = (1, 2, _IN_PLACE) if is_small else (_IN_PLACE, 2, 1)
        return [{"SHOTS": shots} for shots in order]


VARIANT = TorchSymmMem()
