"""The library path: the vendor's matmul, then the collective library's reduce-scatter.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank's matmul
is done, and a partial sum that goes through memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Config, Plan, Step, Variant
from taxfree_kernels.vendor import matmul_into

# torch 2.13 renamed it; earlier versions have only the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class BaselinePlan(Plan):
    """Matmul, for scatter_dim 1 one re-layout copy, one reduce-scatter.

    The collective wants equal shards that follow each other: a ragged M is padded with zeros.
    """

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric) -> None:
        self._problem, self._group = problem, fabric.group
        self.launches = 2 + (problem.scatter_dim == 1)
        size = (problem.world_size * problem.shard_rows, problem.shard_columns)
        self._by_owner = self._buffer(fabric, size)
        if problem.scatter_dim == 0:
            self._partial = self._by_owner[: problem.m]
        else:
            self._partial = self._by_owner.new_empty(problem.m, problem.n)

    def _buffer(self, fabric: Fabric, size: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(size, dtype=getattr(torch, self._problem.dtype), device=fabric.device)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        matmul_into(self._partial, x, weight, None)
        if self._problem.scatter_dim == 1:
            self._lay_out()
        _reduce_scatter(out, self._by_owner, group=self._group)
        return out

    def steps(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> list[Step]:
        partial = self._partial
        steps = [Step("matmul", "producer", lambda: matmul_into(partial, x, weight, None))]
        if self._problem.scatter_dim == 1:
            moved = 2 * partial.nbytes
            steps.append(Step("re-layout", "copy", self._lay_out, memory_bytes=moved))
        steps.append(
            Step(
                "reduce-scatter",
                "collective",
                lambda: _reduce_scatter(out, self._by_owner, group=self._group),
                least=lambda: self._scatter_one_element(out),
            )
        )
        return steps

    def _lay_out(self) -> None:
        """From [m, owner, columns] to [owner, m, columns]."""
        problem = self._problem
        columns = self._partial.view(problem.m, problem.world_size, problem.shard_columns)
        blocks = self._by_owner.view(problem.world_size, problem.m, problem.shard_columns)
        blocks.copy_(columns.transpose(0, 1))

    def _scatter_one_element(self, out: torch.Tensor) -> None:
        one_each = self._by_owner.view(-1)[: self._problem.world_size]
        _reduce_scatter(out.view(-1)[:1], one_each, group=self._group)


class Baseline(Variant):
    """The library, as good as an expert would call it."""

    name = "baseline"
    fused = False

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric)


VARIANT = Baseline()
