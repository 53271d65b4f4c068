"""The library path, in TorchRec's order of steps: indices travel, rows are pooled, these travel.

Where tables are sharded by rows, every owner needs all indices, and the parts that owners pool are
added in a reduce-scatter. Indices, where bags begin, and weights travel side by side, so that there
is one collective before the look-up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding_bag

from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Config, Plan, Step, Variant, resized
from taxfree_kernels.vendor import all_gather, all_to_all, reduce_scatter


class _Buffers(NamedTuple):
    """Memory of the calls of one size.

    Args:
        sent: int32 [tables, columns]: indices, where bags begin, bits of weights.
        received: int32 [ranks, own tables, columns].
        pooled: [tables, batch + 1, dim], of all owners; the last bag of each table is of indices
            beyond the others.
    """

    sent: torch.Tensor
    received: torch.Tensor
    pooled: torch.Tensor


class BaselinePlan(Plan):
    """Indices to the owners, their look-up, pooled rows to who asked, and their order."""

    launches = 7

    def __init__(self, problem: EmbeddingAllToAll, fabric: Fabric, config: Config) -> None:
        self._problem, self._fabric, self._group = problem, fabric, fabric.group
        self._counts = [len(problem.tables_of(rank)) for rank in range(problem.world_size)]
        self._own = self._counts[fabric.rank]
        whole = problem.tables * self._columns(problem)
        received = problem.world_size * self._own * self._columns(problem)
        rows = problem.tables * (problem.batch + 1) * problem.dim
        dtype = getattr(torch, problem.dtype)
        self._memory = fabric.workspace.scratch(
            ((whole,), torch.int32), ((received,), torch.int32), ((rows,), dtype)
        )
        blocks = torch.arange(
            problem.world_size * self._own, dtype=torch.int32, device=fabric.device
        )
        self._blocks = blocks.view(
            problem.world_size, self._own, 1
        )  # of each rank's bags of a table
        self._first_row = (
            blocks[: self._own, None] * problem.rows
        )  # own tables are looked up as one
        self._sized = fabric.workspace.by_size(self._of_size)

    def _columns(self, problem: EmbeddingAllToAll) -> int:
        return problem.capacity * (1 + problem.weighted) + problem.batch + 1

    def _of_size(self, batch: int) -> _Buffers:
        problem = resized(self._problem, batch=batch)
        columns, world = self._columns(problem), problem.world_size
        shapes = (
            (problem.tables, columns), (world, self._own, columns),
            (problem.tables, batch + 1, problem.dim),
        )  # fmt: skip
        sent, received, pooled = (
            flat[: torch.Size(shape).numel()].view(shape)
            for flat, shape in zip(self._memory(), shapes, strict=True)
        )
        return _Buffers(sent, received, pooled)

    def run(self, *tensors: Any) -> torch.Tensor:
        weight, indices, offsets, weights, out = tensors
        buffers = self._sized[len(out)]
        self._pack(buffers, indices, offsets, weights)
        self._ask(buffers)
        self._answer(buffers, self._look_up(buffers, weight, len(out)))
        return self._finish(buffers, offsets, out)

    def _pack(self, buffers: _Buffers, *bags: torch.Tensor | None) -> None:
        parts = [part.view(torch.int32) for part in bags if part is not None]
        torch.cat(parts, 1, out=buffers.sent)

    def _ask(self, buffers: _Buffers) -> None:
        received = buffers.received.flatten(0, 1)
        if self._problem.shard_dim == 1:
            all_gather(received, buffers.sent, self._group)
            return
        own = [self._own] * self._problem.world_size
        all_to_all(received, buffers.sent, own, self._counts, self._group)

    def _look_up(self, buffers: _Buffers, weight: torch.Tensor, batch: int) -> torch.Tensor:
        """[ranks * own tables, batch + 1, dim], pooled; means, where they are not parts."""
        problem, capacity = self._problem, batch * self._problem.bag
        row = buffers.received[:, :, :capacity]
        begins = buffers.received[:, :, capacity : capacity + batch + 1]
        begins = begins.add(self._blocks, alpha=capacity)
        factors = None
        if problem.weighted:
            bits = buffers.received[:, :, capacity + batch + 1 :].contiguous()
            factors = bits.view(torch.float32).to(weight.dtype)
        if problem.shard_dim == 1:
            row = row - self._fabric.rank * problem.rows
            is_own = ((row >= 0) & (row < problem.rows)).to(weight.dtype)
            factors = is_own if factors is None else factors * is_own
            row = row.clamp(0, problem.rows - 1)
        if not self._own:
            return weight.new_empty(0, batch + 1, problem.dim)
        is_whole = problem.shard_dim == 0
        pooled = embedding_bag(
            (row + self._first_row).flatten(),
            weight.flatten(0, 1),
            begins.flatten(),
            mode=problem.mode if is_whole else "sum",
            per_sample_weights=None if factors is None else factors.flatten(),
        )
        return pooled.view(-1, batch + 1, problem.dim)

    def _answer(self, buffers: _Buffers, pooled: torch.Tensor) -> None:
        if self._problem.shard_dim == 1:
            reduce_scatter(buffers.pooled, pooled, self._group)
            return
        own = [self._own] * self._problem.world_size
        all_to_all(buffers.pooled, pooled, self._counts, own, self._group)

    def _finish(self, buffers: _Buffers, offsets: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        by_sample = buffers.pooled[:, : len(out)].transpose(0, 1)
        if self._problem.shard_dim == 1 and self._problem.mode == "mean":
            lengths = offsets.diff().clamp(min=1).t()
            return torch.div(by_sample, lengths[:, :, None], out=out)
        return out.copy_(by_sample)

    def steps(self, *tensors: Any) -> list[Step]:
        weight, indices, offsets, weights, out = tensors
        batch, buffers = len(out), self._sized[len(out)]
        blocks = self._problem.world_size * self._own
        pooled = [weight.new_zeros(blocks, batch + 1, weight.shape[-1])]  # by the step before
        empty, nothing = self._sized[0], pooled[0][:, :1].contiguous()

        def look_up() -> None:
            pooled[0] = self._look_up(buffers, weight, batch)

        return [
            Step(
                "pack",
                "copy",
                lambda: self._pack(buffers, indices, offsets, weights),
                memory_bytes=2 * buffers.sent.nbytes,
            ),
            # no probe: the look-up would read indices that nobody has sent
            Step("indices", "collective", lambda: self._ask(buffers)),
            Step("look-up", "producer", look_up),
            Step(
                "pooled rows",
                "collective",
                lambda: self._answer(buffers, pooled[0]),
                latency_probe=lambda: self._answer(empty, nothing),
            ),
            Step(
                "order",
                "copy",
                lambda: self._finish(buffers, offsets, out),
                memory_bytes=2 * out.nbytes,
            ),
        ]


class Baseline(Variant):
    """The library, called as an expert would."""

    plan_class = BaselinePlan
    fused = False
    is_library = True


VARIANT = Baseline()
