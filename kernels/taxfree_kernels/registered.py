"""Shared by the `registered` variants: the library's collectives on registered memory.

NCCL has kernels of low latency for buffers in a memory pool that is registered with the
communicator as symmetric.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric, Workspace
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Plan, Problem, Variant


class RegisteredMemory(Workspace):
    """Scratch memory that is registered with a communicator.

    Raises:
        PlanError: the process group's backend registers no memory.
    """

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric.device, beside=fabric.workspace)
        self._backend: Any = fabric.group._get_backend(fabric.device)
        if not hasattr(self._backend, "register_mem_pool"):
            raise PlanError(
                f"the process group's {type(self._backend).__name__} registers no memory"
            )
        self._pools: list[Any] = []  # kept alive: the communicator refers to them
        self._registered = 0

    def _allocate(self, size: int) -> torch.Tensor:
        self._pools.append(torch.cuda.MemPool(self._backend.mem_allocator))
        with torch.cuda.use_mem_pool(self._pools[-1]):
            return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def register(self) -> None:
        """Register all allocations as symmetric; collective."""
        for pool in self._pools[self._registered :]:
            self._backend.register_mem_pool(pool, symm=True)
        self._registered = len(self._pools)


class RegisteredPlan(Plan):
    """Before the baseline's plan, in the bases of a class: its buffers are registered."""

    def _memory(self, fabric: Fabric) -> Workspace:
        self._registered: RegisteredMemory = fabric.memory_of(RegisteredMemory)
        return self._registered

    def connect(self) -> None:
        self._registered.register()


class RegisteredVariant(Variant):
    """The collective library on registered buffers."""

    fused = False
    is_library = True

    def unsupported_reason(self, problem: Problem, hardware: Hardware) -> str | None:
        if hardware.backend == "interpreter":
            return "the host's collectives know no registered memory"
        return "one rank has no peers" if problem.world_size == 1 else None
