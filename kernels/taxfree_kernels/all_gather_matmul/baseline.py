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
from taxfree_kernels.variant import Config, Plan, Step, Variant
from taxfree_kernels.vendor import matmul_into

# torch 2.13 renamed it; earlier versions have only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BaselinePlan(Plan):
    """One all-gather, for gather_dim 1 one re-layout copy, then the matmul.

    With gather_dim 0 and ragged M it gathers padded shards: the collective needs equal sizes.
    """

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric) -> None:
        self._problem, self._group = problem, fabric.group
        # With one row, the sources already stand side by side.
        self._needs_layout = problem.gather_dim == 1 and problem.m > 1
        self.launches = 2 + self._needs_layout
        dtype = getattr(torch, problem.dtype)
        rows, columns, world = problem.shard_rows, problem.shard_columns, problem.world_size
        self._gathered = self._buffer(fabric, (world * rows, columns), dtype)
        self._padded = None
        if problem.gather_dim == 0 and problem.m % world:
            self._padded = torch.zeros(rows, columns, dtype=dtype, device=fabric.device)
            self.launches += 1
        if self._needs_layout:
            self._matrix = torch.empty(problem.m, problem.k, dtype=dtype, device=fabric.device)
        else:
            self._matrix = self._gathered.view(-1, problem.k)[: problem.m]

    def _buffer(self, fabric: Fabric, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=fabric.device)

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if self._padded is not None:
            a = self._pad(a)
        _all_gather(self._gathered, a, group=self._group)
        if self._needs_layout:
            self._lay_out()
        return matmul_into(out, self._matrix, weight, bias)

    def steps(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> list[Step]:
        steps, shard = [], a
        if self._padded is not None:
            shard = self._padded
            steps.append(Step("pad", "copy", lambda: self._pad(a), memory_bytes=2 * a.nbytes))
        steps.append(
            Step(
                "all-gather",
                "collective",
                lambda: _all_gather(self._gathered, shard, group=self._group),
                least=lambda: self._gather_one_element(shard),
            )
        )
        matrix = self._matrix
        if self._needs_layout:
            steps.append(Step("re-layout", "copy", self._lay_out, memory_bytes=2 * matrix.nbytes))
        steps.append(
            Step(
                "matmul",
                "consumer",
                lambda: matmul_into(out, matrix, weight, bias),
                reads=matrix,
                memory_bytes=matrix.nbytes,
            )
        )
        return steps

    def _pad(self, a: torch.Tensor) -> torch.Tensor:
        assert self._padded is not None
        self._padded[: a.shape[0]].copy_(a)
        return self._padded

    def _gather_one_element(self, shard: torch.Tensor) -> None:
        world = self._problem.world_size
        _all_gather(self._gathered.view(-1)[:world], shard.view(-1)[:1], group=self._group)

    def _lay_out(self) -> None:
        """From [source, m, columns] to [m, source, columns]."""
        problem = self._problem
        by_source = self._gathered.view(problem.world_size, problem.m, problem.shard_columns)
        columns = self._matrix.view(problem.m, problem.world_size, problem.shard_columns)
        columns.copy_(by_source.transpose(0, 1))


class Baseline(Variant):
    """The library, as good as an expert would call it."""

    name = "baseline"
    fused = False

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric)


VARIANT = Baseline()
