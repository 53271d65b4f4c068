"""The library path on registered buffers: the vendor's matmul, then NCCL's low-latency kernels.

Both ends of the collective live in a memory pool that is registered with the communicator as
symmetric; the shard is copied out of it, which the time includes.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_reduce_scatter.baseline import BaselinePlan
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Config, Plan, Variant


class RegisteredPlan(BaselinePlan):
    """The baseline's pipeline between registered buffers."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric) -> None:
        backend = fabric.group._get_backend(fabric.device)
        if not hasattr(backend, "register_mem_pool"):
            raise PlanError(f"the process group's {type(backend).__name__} registers no memory")
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        super().__init__(problem, fabric)
        self.launches += 1
        self._shard = self._buffer(fabric, (problem.shard_rows, problem.shard_columns))
        backend.register_mem_pool(self._pool, symm=True)

    def _buffer(self, fabric: Fabric, size: tuple[int, int]) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool):
            return super()._buffer(fabric, size)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(super().__call__(x, weight, self._shard))


class Registered(Variant):
    """The collective library on registered buffers."""

    name = "registered"
    fused = False

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if hardware.backend == "interpreter":
            return "the host's collectives know no registered memory"
        return "one rank has no peers" if problem.world_size == 1 else None

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return RegisteredPlan(problem, fabric)


VARIANT = Registered()
