"""The library path on registered buffers: the vendor's matmul, then NCCL's low-latency kernels.

The matmul writes into a buffer that is registered with the communicator as symmetric, where the
all-reduce then works in place; from there the result is copied, or added to the residual.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.variant import Config, Plan, Variant
from taxfree_kernels.vendor import matmul_into


class RegisteredPlan(Plan):
    """Matmul into a registered buffer, all-reduce there, one kernel that reads the result."""

    launches = 3

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        backend = fabric.group._get_backend(fabric.device)
        if not hasattr(backend, "register_mem_pool"):
            raise PlanError(f"the process group's {type(backend).__name__} registers no memory")
        self._group, self._adds_bias = fabric.group, fabric.rank == 0
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            dtype = getattr(torch, problem.dtype)
            self._sum = torch.empty(problem.m, problem.n, dtype=dtype, device=fabric.device)
        backend.register_mem_pool(self._pool, symm=True)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        matmul_into(self._sum, x, weight, bias if self._adds_bias else None)
        dist.all_reduce(self._sum, group=self._group)
        if residual is None:
            return out.copy_(self._sum)
        return torch.add(self._sum, residual, out=out)


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
