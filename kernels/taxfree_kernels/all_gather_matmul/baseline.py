"""The library path: the collective library's all-gather, then the vendor's matmul.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank arrives
and ends before the matmul begins, and a gathered A that goes through memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.several import GatheringPlan, SeveralWeights
from taxfree_kernels.fabric.base import Fabric, Workspace
from taxfree_kernels.variant import Config, Plan, Step, resized
from taxfree_kernels.vendor import all_gather, matmul_into


@dataclass(frozen=True)
class GatherBuffers:
    """The buffers for A in a call of one size.

    Args:
        shard: this rank's rows if they must be copied first, else None.
        gathered: [world_size * shard_rows, shard_columns], the shards one below the other.
        matrix: [m, k], the left operand.
        needs_layout: whether the matrix is a re-layout of the gathered shards.
    """

    shard: torch.Tensor | None
    gathered: torch.Tensor
    matrix: torch.Tensor
    needs_layout: bool


class BaselinePlan(GatheringPlan):
    """One all-gather, for gather_dim 1 one re-layout copy, then the matmul.

    With gather_dim 0 and ragged M it gathers padded shards: the collective needs equal sizes.
    """

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric) -> None:
        self._problem, self._group = problem, fabric.group
        self._is_by_columns = problem.gather_dim == 1
        shard = (problem.shard_rows, problem.shard_columns)
        gathered = (problem.world_size * shard[0], shard[1])
        matrix = (problem.m if self._is_by_columns else 0, problem.k)
        sizes = ((shape, getattr(torch, problem.dtype)) for shape in (shard, gathered, matrix))
        self._scratch = self._memory(fabric).scratch(*sizes)
        self._sized = fabric.workspace.by_size(self._of_size)
        top = self._sized[problem.m]
        self.launches = 2 + top.needs_layout + (top.shard is not None)

    def _memory(self, fabric: Fabric) -> Workspace:
        """The buffers of this size."""
        return fabric.workspace

    def _copies_shard(self, problem: AllGatherMatmul) -> bool:
        return problem.gather_dim == 0 and problem.m % problem.world_size > 0

    def _of_size(self, m: int) -> GatherBuffers:
        problem = resized(self._problem, m=m)
        shard, gathered, matrix = self._scratch()
        gathered = gathered[: problem.world_size * problem.shard_rows]
        # With one row, the shards are already side by side.
        needs_layout = self._is_by_columns and m > 1
        if not needs_layout:
            matrix = gathered.view(-1, problem.k)
        copied = shard[: problem.shard_rows] if self._copies_shard(problem) else None
        return GatherBuffers(copied, gathered, matrix[:m], needs_layout)

    def gathered(self, a: torch.Tensor, m: int) -> torch.Tensor:
        buffers = self._sized[m]
        if buffers.shard is not None:
            a = _copied_in(a, buffers.shard)
        all_gather(buffers.gathered, a, self._group)
        if buffers.needs_layout:
            self._lay_out(buffers)
        return buffers.matrix

    def kept(self, a: torch.Tensor, m: int) -> torch.Tensor:
        if self._is_by_columns or self._sized[m].shard is not None:
            return super().kept(a, m)
        whole = a.new_empty(m, self._problem.k)
        all_gather(whole, a, self._group)
        return whole

    def steps(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> list[Step]:
        buffers, steps = self._sized[out.shape[0]], []
        own_shard, shard, matrix = buffers.shard, a, buffers.matrix
        if own_shard is not None:
            shard = own_shard
            steps.append(
                Step("copy in", "copy", lambda: _copied_in(a, own_shard), memory_bytes=2 * a.nbytes)
            )
        steps.append(
            Step(
                "all-gather",
                "collective",
                lambda: all_gather(buffers.gathered, shard, self._group),
                latency_probe=lambda: self._gather_one_element(buffers, shard),
            )
        )
        if buffers.needs_layout:
            moved = 2 * matrix.nbytes
            steps.append(
                Step("re-layout", "copy", lambda: self._lay_out(buffers), memory_bytes=moved)
            )
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

    def _gather_one_element(self, buffers: GatherBuffers, shard: torch.Tensor) -> None:
        one_each = buffers.gathered.view(-1)[: self._problem.world_size]
        all_gather(one_each, shard.view(-1)[:1], self._group)

    def _lay_out(self, buffers: GatherBuffers) -> None:
        """Transpose [source, m, columns] to [m, source, columns]."""
        m, world, width = len(buffers.matrix), self._problem.world_size, self._problem.shard_columns
        by_source = buffers.gathered.view(world, m, width)
        buffers.matrix.view(m, world, width).copy_(by_source.transpose(0, 1))


def _copied_in(a: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A full shard that begins with a rank's rows."""
    shard[: a.shape[0]].copy_(a)
    return shard


class Baseline(SeveralWeights):
    """The library, called as an expert would."""

    name = "baseline"
    fused = False
    is_library = True
    gives_way = True

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric)


VARIANT = Baseline()
