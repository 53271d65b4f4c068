"""The library path: the vendor's matmul, then the collective library's reduce-scatter.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank's matmul
is done, and a partial sum that goes through memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric, Workspace
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Config, Plan, Step, Variant, resized
from taxfree_kernels.vendor import multiply_into, reduce_scatter, try_fp8


@dataclass(frozen=True)
class ScatterBuffers:
    """The buffers for the partial sum in a call of one size.

    Args:
        partial: [m, n], the matmul's output.
        by_owner: [world_size * shard_rows, shard_columns], the collective's input.
        beyond: its rows beyond m, which must be zero; may be empty.
    """

    partial: torch.Tensor
    by_owner: torch.Tensor
    beyond: torch.Tensor


class BaselinePlan(Plan):
    """Matmul, for scatter_dim 1 one re-layout copy, one reduce-scatter.

    The collective needs equal, contiguous shards, so a ragged M is padded with zeros.
    """

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> None:
        self._problem, self._group = problem, fabric.group
        try_fp8(problem, fabric.device)
        self._is_by_columns = problem.scatter_dim == 1
        by_owner = problem.world_size * problem.shard_rows * problem.shard_columns
        sizes = (by_owner, problem.elements if self._is_by_columns else 0, *self._others(problem))
        dtype = getattr(torch, problem.dtype)
        self._scratch = self._memory(fabric).scratch(*(((size,), dtype) for size in sizes))
        self._sized = fabric.workspace.by_size(self._of_size)
        self.launches = 2 + (self._is_by_columns or problem.m % problem.world_size > 0)

    def _memory(self, fabric: Fabric) -> Workspace:
        """The buffers of this size."""
        return fabric.workspace

    def _others(self, problem: MatmulReduceScatter) -> tuple[int, ...]:
        """Elements of further buffers."""
        return ()

    def _of_size(self, m: int) -> ScatterBuffers:
        problem, (by_owner, partial, *_) = resized(self._problem, m=m), self._scratch()
        rows = problem.world_size * problem.shard_rows
        by_owner = by_owner[: rows * problem.shard_columns].view(rows, problem.shard_columns)
        if self._is_by_columns:
            return ScatterBuffers(partial[: problem.elements].view(m, -1), by_owner, by_owner[:0])
        return ScatterBuffers(by_owner[:m], by_owner, by_owner[m:])

    def run(self, *tensors: Any) -> torch.Tensor:
        x, weight, *scales, out = tensors
        buffers = self._sized[x.shape[0]]
        self._multiply(buffers, x, weight, *scales)
        if self._is_by_columns:
            self._lay_out(buffers)
        reduce_scatter(out, buffers.by_owner, self._group)
        assert isinstance(out, torch.Tensor)
        return out

    def steps(self, *tensors: Any) -> list[Step]:
        x, weight, *scales, out = tensors
        buffers = self._sized[x.shape[0]]
        one_of_each = buffers.by_owner.view(-1)[: self._problem.world_size]
        steps = [Step("matmul", "producer", lambda: self._multiply(buffers, x, weight, *scales))]
        if self._is_by_columns:
            moved = 2 * buffers.partial.nbytes
            steps.append(
                Step("re-layout", "copy", lambda: self._lay_out(buffers), memory_bytes=moved)
            )
        steps.append(
            Step(
                "reduce-scatter",
                "collective",
                lambda: reduce_scatter(out, buffers.by_owner, self._group),
                latency_probe=lambda: reduce_scatter(out.view(-1)[:1], one_of_each, self._group),
            )
        )
        return steps

    def _multiply(
        self, buffers: ScatterBuffers, x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
    ) -> None:
        is_fast = self._problem.fast_accumulation
        multiply_into(buffers.partial, x, weight, None, *scales, is_fast=is_fast)
        if len(buffers.beyond):
            buffers.beyond.zero_()

    def _lay_out(self, buffers: ScatterBuffers) -> None:
        """Transpose [m, owner, columns] to [owner, m, columns]."""
        m, world_size = len(buffers.partial), self._problem.world_size
        columns = buffers.partial.view(m, world_size, -1)
        buffers.by_owner.view(world_size, m, -1).copy_(columns.transpose(0, 1))


class Baseline(Variant):
    """The library, called as an expert would."""

    plan_class = BaselinePlan
    fused = False
    is_library = True


VARIANT = Baseline()
