"""Copy engines scatter partial sums during the vendor's matmul, then gather the owners' sums.

Removes most of the bulk-synchronous tax where there are many rows, and leaves the compute units to
the matmul. The rows are cut into PARTS: while one part is multiplied, earlier parts are scattered,
added and gathered; only the last part's addition and gathering are exposed. Costs two launches per
copy, and copies take microseconds to start: not for few rows.

Protocol. That of :mod:`taxfree_kernels.partial_sums.copied` for each part, of whose rows each rank
owns a shard. Having added its shard, on a side stream, a rank meets all ranks there and fetches the
rows that peers own. So the kernels that wait are the additions and meetings of the parts, one after
the other, each ordered after this rank's copies of the same part.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from taxfree_kernels.copies import CopyStreams, PeerCopies, rows_of_chunk
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.copied import CopiedSum, adding_kernel, slot_elements
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized


class _Part:
    """Some rows of the output: their sum, and the sources of the rows that peers own."""

    def __init__(self, rows: slice, copied: CopiedSum, shards: MatmulReduceScatter, fabric: Fabric):
        self.rows, self.sum, self.fetched = rows, copied, []
        for distance in range(1, fabric.world_size):
            peer = (fabric.rank + distance) % fabric.world_size
            owned = rows_of_chunk(shards, peer, 0, 1)
            source = fabric.peer_view(copied.result, peer)[: owned.stop - owned.start]
            self.fetched.append((owned, source))


class OverlapPlan(Plan):
    """For each part, matmuls and copies; then, overlapping the next part, a sum and copies."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        self._problem, self._fabric, self._config = problem, fabric, config
        dtype, parts = getattr(torch, problem.dtype), _parts(problem, config)
        self._slot, _ = fabric.pool.slots(sum(_slots(problem, parts)), dtype)
        self._first_meeting = config["CHUNKS"] * len(parts)
        channels = self._first_meeting + len(parts)
        self._copies = PeerCopies(fabric, channels, config["STREAMS"])
        self._fetches = CopyStreams(fabric, config["STREAMS"])
        self._adding = fabric.side_stream()
        partial_sums = (_shards(problem, rows) for rows in parts)
        self._partial_sums = fabric.workspace.scratch(
            *(((each.world_size * each.shard_rows * each.n,), dtype) for each in partial_sums)
        )
        self._add = adding_kernel(fabric, config, problem.bias, problem.residual, is_whole=True)
        self._sized = fabric.workspace.by_size(self._of_size)
        top = self._sized[problem.m]
        fetched = sum(1 + len(part.fetched) for part in top)
        self.launches = 2 + fetched + sum(part.sum.launches for part in top)

    def _of_size(self, m: int) -> list[_Part]:
        problem, fabric, found = resized(self._problem, m=m), self._fabric, []
        parts = _parts(problem, self._config)
        sizes = _slots(problem, parts)
        slots = self._slot[: sum(sizes)].split(sizes)
        for number, (rows, slot, partial) in enumerate(
            zip(parts, slots, self._partial_sums(), strict=True)
        ):
            shards, channel = _shards(problem, rows), number * self._config["CHUNKS"]
            copied = CopiedSum(
                shards, fabric, self._config, self._copies, slot, partial, self._add, channel,
                is_whole=True,
            )  # fmt: skip
            found.append(_Part(rows, copied, shards, fabric))
        return found

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._add, *self._copies.kernels)

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        x, weight, bias, residual, _, _, out = tensors
        assert x is not None
        assert weight is not None
        assert out is not None
        self._copies.begin()
        for number, part in enumerate(self._sized[x.shape[0]]):
            rows, target = part.rows, out[part.rows]
            part.sum.multiply(x[rows], weight)
            with self._adding.forked():
                self._copies.join()
                part.sum.add(bias, None if residual is None else residual[rows], target)
                self._copies.meet(self._first_meeting + number)
                self._fetches.follow()
            for owned, source in part.fetched:
                self._fetches.copy(target[owned], source)
        for streams in (self._copies, self._adding, self._fetches):
            streams.join()
        self._copies.finish(out)
        return out


def _slots(problem: MatmulAllReduce, parts: list[slice]) -> list[int]:
    """Elements of the slot that each part uses."""
    return [slot_elements(_shards(problem, rows), is_whole=True) for rows in parts]


def _parts(problem: MatmulAllReduce, config: Config) -> list[slice]:
    """The rows of the output that are exchanged together."""
    count = config["PARTS"]
    ends = [problem.m * part // count for part in range(count + 1)]
    return [slice(*each) for each in pairwise(ends)]


def _shards(problem: MatmulAllReduce, rows: slice) -> MatmulReduceScatter:
    """How the sum of some rows is sharded over the ranks."""
    return MatmulReduceScatter(
        rows.stop - rows.start, problem.n, problem.k, 0,
        problem.dtype, problem.world_size, problem.weight_layout,
    )  # fmt: skip


class Overlap(Variant):
    """Copy engines scatter and gather during the vendor's matmul."""

    name = "overlap"

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.rms_norm:
            return "what is fetched is not normalised"
        return spaces.refuses_copies(problem, problem.n) or spaces.refuses_parts(problem)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return spaces.parts_space(problem, hardware)

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_parts(problem, self.space(problem, hardware))

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
