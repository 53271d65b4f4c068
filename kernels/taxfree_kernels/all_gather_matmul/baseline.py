"""The library path: the collective library's all-gather, then the vendor's matmul.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank arrives
and ends before the matmul begins, and a gathered A that goes through memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Config, Plan, Variant


def matmul_into(
    out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """out = a @ weight (+ bias) by the vendor's library."""
    if bias is None:
        return torch.mm(a, weight, out=out)
    return torch.addmm(bias, a, weight, out=out)


# torch 2.13 renamed it; earlier versions have only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BaselinePlan(Plan):
    """One all-gather, for gather_dim 1 one re-layout copy, matmul.

    A ragged gather_dim 0 gathers padded shards: the collective wants equal ones.
    """

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric) -> None:
        self._problem, self._group = problem, fabric.group
        self.launches = 2 + (problem.gather_dim == 1)
        dtype = getattr(torch, problem.dtype)
        rows, columns, world = problem.shard_rows, problem.shard_columns, problem.world_size
        self._gathered = self._buffer(fabric, (world * rows, columns), dtype)
        self._padded = None
        if problem.gather_dim == 0 and problem.m % world:
            self._padded = torch.zeros(rows, columns, dtype=dtype, device=fabric.device)
            self.launches += 1
        self._a = torch.empty(problem.m, problem.k, dtype=dtype, device=fabric.device)

    def _buffer(self, fabric: Fabric, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=fabric.device)

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if self._padded is not None:
            self._padded[: a.shape[0]].copy_(a)
            a = self._padded
        _all_gather(self._gathered, a, group=self._group)
        return matmul_into(out, self._as_matrix(), weight, bias)

    def _as_matrix(self) -> torch.Tensor:
        problem = self._problem
        if problem.gather_dim == 0:
            return self._gathered[: problem.m]
        by_source = self._gathered.view(problem.world_size, problem.m, problem.shard_columns)
        if problem.m == 1:  # the sources already stand side by side
            return by_source.view(1, problem.k)
        columns = self._a.view(problem.m, problem.world_size, problem.shard_columns)
        columns.copy_(by_source.transpose(0, 1))
        return self._a


class Baseline(Variant):
    """The library, as good as an expert would call it."""

    name = "baseline"
    fused = False

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric)


VARIANT = Baseline()
