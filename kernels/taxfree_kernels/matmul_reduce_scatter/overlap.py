"""Copy engines scatter what the vendor's matmul has computed while it computes the next part.

Removes most of the bulk-synchronous tax where there are many rows, and leaves the compute units to
the matmul: peers' shards first, this rank's own last, then the sum of what all ranks sent. Costs
two launches per copy, and copies take microseconds to start: not for few rows.

Protocol. That of :mod:`taxfree_kernels.partial_sums.copied`.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.copies import PeerCopies
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.copied import CopiedSum, adding_kernel, slot_elements
from taxfree_kernels.spaces import copy_space, first_copies
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized


class OverlapPlan(Plan):
    """A matmul for each part, copies that overlap the next one, and one addition."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> None:
        self._problem, self._fabric, self._config = problem, fabric, config
        self._copies = PeerCopies(fabric, config["CHUNKS"], config["STREAMS"])
        dtype = getattr(torch, problem.dtype)
        self._slot, _ = fabric.pool.slots(slot_elements(problem), dtype)
        shard = problem.shard_rows * problem.shard_columns
        self._shards = fabric.workspace.scratch(((problem.world_size * shard,), dtype))
        self._add = adding_kernel(fabric, config)
        self._sized = fabric.workspace.by_size(self._of_size)
        self.launches = self._sized[problem.m].launches + 2

    def _of_size(self, m: int) -> CopiedSum:
        problem, (shards,) = resized(self._problem, m=m), self._shards()
        return CopiedSum(
            problem, self._fabric, self._config, self._copies, self._slot, shards, self._add
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._add, *self._copies.kernels)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        copied = self._sized[x.shape[0]]
        self._copies.begin()
        copied.multiply(x, weight)
        self._copies.join()
        copied.add(None, None, out)
        self._copies.finish(out)
        return out


class Overlap(Variant):
    """Copy engines scatter during the vendor's matmul."""

    name = "overlap"

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        return spaces.refuses_copies(problem, problem.shard_columns)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        space = copy_space(problem, hardware)
        if problem.scatter_dim == 1:  # shards are not rows of one matmul
            space = {**space, "CHUNKS_PER_WAIT": (1,)}
        return space

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return first_copies(problem, self.space(problem, hardware), rows_at_once=512)

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
