"""What the operations' `registered` variants share: the library's collectives on registered memory.

NCCL has kernels of low latency for buffers in a memory pool that is registered with the
communicator as symmetric.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Variant


class RegisteredMemory:
    """A pool of a communicator's memory; allocate, then register.

    Raises:
        PlanError: the process group's backend registers no memory.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._backend: Any = fabric.group._get_backend(fabric.device)
        if not hasattr(self._backend, "register_mem_pool"):
            raise PlanError(
                f"the process group's {type(self._backend).__name__} registers no memory"
            )
        self._device = fabric.device
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

    def zeros(self, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """A buffer in the pool."""
        with torch.cuda.use_mem_pool(self._pool):
            return torch.zeros(size, dtype=dtype, device=self._device)

    def register(self) -> None:
        """Make all that has been allocated symmetric; collective."""
        self._backend.register_mem_pool(self._pool, symm=True)


class RegisteredVariant(Variant):
    """The collective library on registered buffers."""

    name = "registered"
    fused = False

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if hardware.backend == "interpreter":
            return "the host's collectives know no registered memory"
        return "one rank has no peers" if problem.world_size == 1 else None
