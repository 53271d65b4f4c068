"""Copy engines scatter partial sums beside the vendor's matmul, and gather what owners have added.

Removes most of the bulk-synchronous tax where there are many rows, and leaves the compute units to
the matmul: only the addition of the own rows and the gathering of all others' are not hidden. Costs
two launches a copy, and copies take microseconds to start: not for few rows.

Protocol. That of :mod:`taxfree_kernels.partial_sums.copied`, each rank owning rows of the output.
When an owner has added, it meets all ranks; then each fetches the rows that peers own.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.copies import rows_of_chunk
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.copied import CopiedSum
from taxfree_kernels.spaces import copy_space, first_copies
from taxfree_kernels.variant import Config, Plan, Space, Variant


class OverlapPlan(Plan):
    """A matmul for each part, copies beside the next, one addition, and a copy from each peer."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        shards, world = _shards(problem), problem.world_size
        self._sum = CopiedSum(shards, fabric, config, problem.bias, problem.residual, is_whole=True)
        self._copies = self._sum.copies
        self._fetched = []
        for distance in range(1, world):
            peer = (fabric.rank + distance) % world
            rows = rows_of_chunk(shards, peer, 0, 1)
            source = fabric.peer_view(self._sum.result, peer)[: rows.stop - rows.start]
            self._fetched.append((rows, source))
        self.launches = self._sum.launches + len(self._fetched) + 2

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        x, weight, bias, residual, _, _, out = tensors
        assert x is not None
        assert weight is not None
        assert out is not None
        self._sum(x, weight, bias, residual, out)
        self._copies.meet()
        self._copies.follow()
        for rows, source in self._fetched:
            self._copies.fetch(out[rows], source)
        self._copies.join()
        self._copies.finish(out)
        return out


def _shards(problem: MatmulAllReduce) -> MatmulReduceScatter:
    """The rows that each rank adds up."""
    return MatmulReduceScatter(
        problem.m, problem.n, problem.k, 0, problem.dtype, problem.world_size, problem.weight_layout
    )


class Overlap(Variant):
    """Copy engines scatter and gather beside the vendor's matmul."""

    name = "overlap"

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.rms_norm:
            return "what is fetched is not normalised"
        if problem.m < 4 * problem.world_size:
            return "too few rows for each rank to own some"
        return spaces.refuses_copies(problem, problem.n)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return copy_space(_shards(problem), hardware)

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return first_copies(_shards(problem), self.space(problem, hardware), rows_at_once=512)

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
