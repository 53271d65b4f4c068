"""The library path: the collective library's all-gather, then the vendor's matmul.

Pays all three taxes: at least two launches, a collective that starts when the slowest rank arrives
and ends before the matmul begins, and a gathered A that goes through memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.several import GatheringPlan, SeveralWeights
from taxfree_kernels.fabric.base import Fabric, Workspace
from taxfree_kernels.variant import Config, Step, resized
from taxfree_kernels.vendor import all_gather, all_gathers, multiply_into, try_fp8


@dataclass(frozen=True)
class GatherBuffers:
    """The buffers for A, or for its scales, in a call of one size.

    Args:
        shard: this rank's rows if they must be copied first, else None.
        gathered: [world_size * shard_rows, columns], the shards one below the other.
        matrix: [m, all columns].
        needs_layout: whether the matrix is a re-layout of the gathered shards.
    """

    shard: torch.Tensor | None
    gathered: torch.Tensor
    matrix: torch.Tensor
    needs_layout: bool


class BaselinePlan(GatheringPlan):
    """One all-gather, for gather_dim 1 one re-layout copy, then the matmul.

    With gather_dim 0 and ragged M it gathers padded shards: the collective needs equal sizes.
    Scales that travel with fp8 rows are gathered in the same launch.
    """

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        self._problem, self._group = problem, fabric.group
        self._is_by_columns = problem.gather_dim == 1
        try_fp8(problem, fabric.device, problem.bias)
        self._widths = [problem.shard_columns]
        if problem.scale_columns:
            self._widths.append(problem.scale_columns)
        sizes: list[tuple[tuple[int, int], torch.dtype]] = []
        dtypes = (getattr(torch, problem.factor_dtype(fabric.hardware.architecture)), torch.float32)
        for width, dtype in zip(self._widths, dtypes, strict=False):
            shard = (problem.shard_rows, width)
            matrix = (problem.m if self._is_by_columns else 0, problem.world_size * width)
            gathered = (problem.world_size * shard[0], width)
            sizes += [(shape, dtype) for shape in (shard, gathered, matrix)]
        self._scratch = self._memory(fabric).scratch(*sizes)
        self._sized = fabric.workspace.by_size(self._of_size)
        copied = [b.needs_layout + (b.shard is not None) for b in self._sized[problem.m]]
        self.launches = 2 + sum(copied)

    def _memory(self, fabric: Fabric) -> Workspace:
        """The buffers of this size."""
        return fabric.workspace

    def _copies_shard(self, problem: AllGatherMatmul) -> bool:
        return problem.gather_dim == 0 and problem.m % problem.world_size > 0

    def _of_size(self, m: int) -> tuple[GatherBuffers, ...]:
        """Those of A; then those of scales that travel."""
        problem, scratch = resized(self._problem, m=m), self._scratch()
        return tuple(
            self._buffers(problem, *scratch[3 * part : 3 * part + 3])
            for part in range(len(self._widths))
        )

    def _buffers(
        self,
        problem: AllGatherMatmul,
        shard: torch.Tensor,
        gathered: torch.Tensor,
        matrix: torch.Tensor,
    ) -> GatherBuffers:
        gathered = gathered[: problem.world_size * problem.shard_rows]
        # With one row, the shards are already side by side.
        needs_layout = self._is_by_columns and problem.m > 1
        if not needs_layout:
            sources = problem.world_size if self._is_by_columns else 1
            matrix = gathered.view(-1, sources * gathered.shape[1])
        copied = shard[: problem.shard_rows] if self._copies_shard(problem) else None
        return GatherBuffers(copied, gathered, matrix[: problem.m], needs_layout)

    def gathered(self, a: torch.Tensor, m: int, *scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = self._sized[m]
        self._gather(parts, self._copied_in(parts, (a, *scale)))
        self._lay_out(parts)
        return self._factor(parts, scale)

    def _factor(
        self, parts: tuple[GatherBuffers, ...], scale: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """A, and in fp8 its scales: gathered, or `scale` if that is of all of A."""
        return (*[part.matrix for part in parts], *scale[len(parts) - 1 :])

    def kept(self, a: torch.Tensor, m: int) -> torch.Tensor:
        if self._is_by_columns or self._sized[m][0].shard is not None:
            return super().kept(a, m)
        whole = a.new_empty(m, self._problem.k)
        all_gather(whole, a, self._group)
        return whole

    def steps(self, *tensors: Any) -> list[Step]:
        a, weight, bias, *scales, out = tensors
        parts, steps = self._sized[out.shape[0]], []
        own = (a, *scales[:1])[: len(parts)]
        shards = [
            tensor if part.shard is None else part.shard
            for part, tensor in zip(parts, own, strict=True)
        ]
        matrix, *scale = self._factor(parts, tuple(scales[:1]))
        kind = {"is_fast": self._problem.fast_accumulation}
        if parts[0].shard is not None:
            moved = 2 * sum(tensor.nbytes for tensor in own)
            copies = Step(
                "copy in", "copy", lambda: self._copied_in(parts, own), memory_bytes=moved
            )
            steps.append(copies)
        steps.append(
            Step(
                "all-gather",
                "collective",
                lambda: self._gather(parts, shards),
                latency_probe=lambda: self._gather_one_element(parts[0], shards[0]),
            )
        )
        if parts[0].needs_layout:
            moved = 2 * sum(part.matrix.nbytes for part in parts)
            layout = Step("re-layout", "copy", lambda: self._lay_out(parts), memory_bytes=moved)
            steps.append(layout)
        steps.append(
            Step(
                "matmul",
                "consumer",
                lambda: multiply_into(out, matrix, weight, bias, *scale, *scales[1:], **kind),
                reads=matrix,
                memory_bytes=matrix.nbytes,
            )
        )
        return steps

    def _copied_in(
        self, parts: tuple[GatherBuffers, ...], own: tuple[torch.Tensor, ...]
    ) -> list[torch.Tensor]:
        """What this rank gives to each gather."""
        pairs = zip(parts, own, strict=False)  # a scale of all of A is not gathered
        return [
            tensor if part.shard is None else _copied_in(tensor, part.shard)
            for part, tensor in pairs
        ]

    def _gather(self, parts: tuple[GatherBuffers, ...], shards: list[torch.Tensor]) -> None:
        if self._problem.is_fp8:  # not all collective libraries know the type
            all_gathers([part.gathered for part in parts], shards, self._group)
        else:
            all_gather(parts[0].gathered, shards[0], self._group)

    def _gather_one_element(self, buffers: GatherBuffers, shard: torch.Tensor) -> None:
        one_each = buffers.gathered.view(-1)[: self._problem.world_size]
        if self._problem.is_fp8:
            all_gathers([one_each], [shard.view(-1)[:1]], self._group)
        else:
            all_gather(one_each, shard.view(-1)[:1], self._group)

    def _lay_out(self, parts: tuple[GatherBuffers, ...]) -> None:
        """Transpose [source, m, columns] to [m, source, columns]."""
        for part in parts:
            if part.needs_layout:
                m, world = len(part.matrix), self._problem.world_size
                by_source = part.gathered.view(world, m, -1)
                part.matrix.view(m, world, -1).copy_(by_source.transpose(0, 1))


def _copied_in(a: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A full shard that begins with a rank's rows."""
    shard[: a.shape[0]].copy_(a)
    return shard


class Baseline(SeveralWeights):
    """The library, called as an expert would."""

    plan_class = BaselinePlan
    fused = False
    is_library = True
    gives_way = True


VARIANT = Baseline()
