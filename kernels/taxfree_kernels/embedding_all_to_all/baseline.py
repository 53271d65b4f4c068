"""The library path, in TorchRec's order of steps: indices travel, rows are pooled, these travel.

Where tables are sharded by rows, every owner needs all indices, and the parts that owners pool are
added in a reduce-scatter. Indices, where bags begin, and weights travel side by side, so that there
is one collective before the look-up.

Torch's look-up reads whatever memory it is told to, so who asks replaces what is wrong before it
travels, and marks the bags that become NaN, without a word to the host.
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
        first_row: int32 [own tables, 1], of each own table; they are looked up as one.
        first_index: int32 [ranks * tables, 1], of each rank's bags of a table.
        asked_begins: int32 [1 + tables * (batch + 1)], of own bags, after one that is of indices
            before the first.
        held_begins: int32 [1 + ranks * own tables * (batch + 1)], of those of own tables.
        pooled: [tables, batch + 1, dim], of all owners; the last bag of each table is of indices
            beyond the others.
    """

    sent: torch.Tensor
    received: torch.Tensor
    first_row: torch.Tensor
    first_index: torch.Tensor
    asked_begins: torch.Tensor
    held_begins: torch.Tensor
    pooled: torch.Tensor


class BaselinePlan(Plan):
    """Indices to the owners, their look-up, pooled rows to who asked, and their order."""

    launches = 17

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
        #: what an index adds to its bag's mark: one that is a row nothing, others NaN
        self._marks = torch.zeros(2, 1, dtype=dtype, device=fabric.device)
        self._marks[1] = float("nan")
        self._sized = fabric.workspace.by_size(self._of_size)

    def _columns(self, problem: EmbeddingAllToAll) -> int:
        return problem.capacity * (1 + problem.weighted) + problem.batch + 1

    def _of_size(self, batch: int) -> _Buffers:
        problem, device = resized(self._problem, batch=batch), self._fabric.device
        columns, world = self._columns(problem), problem.world_size
        shapes = (
            (problem.tables, columns), (world, self._own, columns),
            (problem.tables, batch + 1, problem.dim),
        )  # fmt: skip
        sent, received, pooled = (
            flat[: torch.Size(shape).numel()].view(shape)
            for flat, shape in zip(self._memory(), shapes, strict=True)
        )
        blocks = torch.arange(world * problem.tables, dtype=torch.int32, device=device)[:, None]
        asked, held = (
            torch.zeros(1 + count * (batch + 1), dtype=torch.int32, device=device)
            for count in (problem.tables, world * self._own)
        )
        first_row, first_index = blocks[: self._own] * problem.rows, blocks * problem.capacity
        return _Buffers(sent, received, first_row, first_index, asked, held, pooled)

    def run(self, *tensors: Any) -> torch.Tensor:
        weight, indices, offsets, weights, out = tensors
        buffers = self._sized[len(out)]
        mark = self._pack(buffers, indices, offsets, weights)
        self._ask(buffers)
        self._answer(buffers, self._look_up(buffers, weight, len(out)))
        return self._finish(buffers, mark, offsets, out)

    def _pack(
        self, buffers: _Buffers, indices: torch.Tensor, offsets: torch.Tensor, weights: Any
    ) -> torch.Tensor:
        """Pack what can be looked up; returns [tables, batch], NaN for bags that are wrong."""
        capacity, (tables, ends) = indices.shape[1], offsets.shape
        row = indices.clamp(0, self._problem.all_rows - 1)
        # an offset beyond the room, or less than one before, is the one before
        begins = offsets.clamp(0, capacity + 1).remainder(capacity + 1).cummax(1).values
        parts = [row, begins, *([] if weights is None else [weights.view(torch.int32)])]
        torch.cat(parts, 1, out=buffers.sent)
        is_none = torch.ne(row, indices, out=torch.empty_like(indices))
        flat = _flat(begins, buffers.first_index, buffers.asked_begins)
        mark = embedding_bag(is_none.flatten(), self._marks, flat, mode="sum")[1:]
        is_moved = begins != offsets
        is_wrong = is_moved[:, 1:] | is_moved[:, :-1]
        return mark.view(tables, ends)[:, :-1].masked_fill_(is_wrong, float("nan"))

    def _ask(self, buffers: _Buffers) -> None:
        received = buffers.received.flatten(0, 1)
        if self._problem.shard_dim == 1:
            all_gather(received, buffers.sent, self._group)
            return
        own = [self._own] * self._problem.world_size
        all_to_all(received, buffers.sent, own, self._counts, self._group)

    def _look_up(self, buffers: _Buffers, weight: torch.Tensor, batch: int) -> torch.Tensor:
        """[ranks * own tables, batch + 1, dim], pooled; of rows, parts (:func:`_halvings`)."""
        problem, capacity = self._problem, batch * self._problem.bag
        if not self._own:
            return weight.new_empty(0, batch + 1, problem.dim)
        row = buffers.received[:, :, :capacity]
        begins = buffers.received[:, :, capacity : capacity + batch + 1]
        table, padding, mode, factors = weight.flatten(0, 1), None, problem.mode, None
        if problem.weighted:
            bits = buffers.received[:, :, capacity + batch + 1 :].contiguous()
            factors = bits.view(torch.float32).to(weight.dtype)
        if problem.shard_dim == 1:
            row = row - self._fabric.rank * problem.rows
            is_own = (row >= 0) & (row < problem.rows)
            table, padding, mode = _with_padding(table), 1, "sum"
            row = torch.where(is_own, 2 * (row + buffers.first_row), padding)
            if problem.mode == "mean":
                factors = _of_indices(begins, capacity).to(weight.dtype)
            elif factors is not None:  # infinity would make NaN of nothing
                factors = torch.where(is_own, factors, 0)
        else:
            row = row + buffers.first_row
        pooled = embedding_bag(
            row.flatten(),
            table,
            _flat(begins.flatten(0, 1), buffers.first_index, buffers.held_begins),
            mode=mode,
            per_sample_weights=None if factors is None else factors.flatten(),
            padding_idx=padding,
        )
        return pooled[1:].view(-1, batch + 1, problem.dim)

    def _answer(self, buffers: _Buffers, pooled: torch.Tensor) -> None:
        if self._problem.shard_dim == 1:
            reduce_scatter(buffers.pooled, pooled, self._group)
            return
        own = [self._own] * self._problem.world_size
        all_to_all(buffers.pooled, pooled, self._counts, own, self._group)

    def _finish(
        self, buffers: _Buffers, mark: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        by_sample = buffers.pooled[:, : len(out)].transpose(0, 1)
        if self._problem.shard_dim == 1 and self._problem.mode == "mean":
            lengths = offsets.diff().clamp(min=1)
            factors = (1 << _halvings(lengths)) / lengths + mark
            return torch.mul(by_sample, factors.t()[:, :, None], out=out)
        return torch.add(by_sample, mark.t()[:, :, None], out=out)

    def steps(self, *tensors: Any) -> list[Step]:
        weight, indices, offsets, weights, out = tensors
        batch, buffers = len(out), self._sized[len(out)]
        blocks = self._problem.world_size * self._own
        pooled = [weight.new_zeros(blocks, batch + 1, weight.shape[-1])]  # by the step before
        mark = [weight.new_zeros(offsets.shape[0], batch)]
        empty, nothing = self._sized[0], pooled[0][:, :1].contiguous()

        def pack() -> None:
            mark[0] = self._pack(buffers, indices, offsets, weights)

        def look_up() -> None:
            pooled[0] = self._look_up(buffers, weight, batch)

        return [
            Step("pack", "copy", pack, memory_bytes=2 * buffers.sent.nbytes),
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
                lambda: self._finish(buffers, mark[0], offsets, out),
                memory_bytes=2 * out.nbytes,
            ),
        ]


def _flat(begins: torch.Tensor, first_index: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Where bags of several tables [tables, batch + 1] begin, as of one; `flat` has a 0 before."""
    torch.add(begins, first_index[: len(begins)], out=flat[1:].view(begins.shape))
    return flat


def _with_padding(table: torch.Tensor) -> torch.Tensor:
    """The table's row r as row 2 * r; between the first two is one that nobody asks for.

    Torch leaves out one row of a table, also where it holds infinity, by which a factor of 0 is
    NaN. A copy with a row more would take as much memory again.
    """
    rows, dim = table.shape
    if rows == 1:
        table, rows = table.expand(2, dim).contiguous(), 2
    return table.as_strided((2 * rows - 1, dim), (dim // 2, 1), table.storage_offset())


def _of_indices(begins: torch.Tensor, capacity: int) -> torch.Tensor:
    """float32 [ranks, own tables, capacity]: by what rows are multiplied on the way to a mean."""
    place = torch.arange(capacity, dtype=torch.int32, device=begins.device)
    place = place.expand(*begins.shape[:2], -1).contiguous()
    bag = torch.searchsorted(begins[:, :, 1:].contiguous(), place, right=True)
    halvings = _halvings(begins.diff()).gather(2, bag.clamp(max=begins.shape[2] - 2))
    return 1 / (1 << halvings)


def _halvings(lengths: torch.Tensor) -> torch.Tensor:
    """int32: how often the sum of a bag is halved before it travels, so that it does not overflow.

    Unlike a division by the length, that is exact; 2 ** -24 is float16's smallest.
    """
    return torch.frexp(lengths.float()).exponent.clamp(max=24)


class Baseline(Variant):
    """The library, called as an expert would."""

    plan_class = BaselinePlan
    fused = False
    is_library = True


VARIANT = Baseline()
