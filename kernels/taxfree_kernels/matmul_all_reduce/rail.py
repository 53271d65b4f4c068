"""For ranks of several nodes: fused inside each node, the library between nodes, on shards.

Rows are cut into chunks. Of each, the node's ranks sum their products, so that each has a shard of
the rows; the rail sums the shards of all nodes; and the node's ranks gather them. The rail sums one
chunk while the node computes the next, and a chunk is gathered beside both. Each rank sends a
shard over the rail, not the whole sum.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric, Scratch
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.matmul_all_reduce.baseline import BaselinePlan
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.nodes import NodesFabric, Rail
from taxfree_kernels.variant import Config, Plan, Step
from taxfree_kernels.vendor import all_reduce


class RailPlan(BaselinePlan):
    """Per chunk: a sum inside the node, one over the rail, a gather inside the node."""

    def __init__(self, problem: MatmulAllReduce, fabric: NodesFabric, config: Config) -> None:
        self._problem, self._nodes, self._chunks = problem, fabric, config["CHUNKS"]
        super().__init__(problem, fabric, config)
        self._adds_bias = fabric.own_node == 0
        self.launches = 3 * self._chunks + problem.residual

    def _reserve(self, problem: MatmulAllReduce, fabric: Fabric) -> Scratch:
        """The same, and for each chunk a shard, and its rows where ranks share them unevenly."""
        rows = self._shard_rows(-(-problem.m // self._chunks))
        elements = problem.elements if problem.residual else 1
        shard = (self._chunks, rows, problem.n)
        whole = (self._chunks, rows * self._nodes.ranks_per_node, problem.n)
        dtype = getattr(torch, problem.dtype)
        return fabric.workspace.scratch(((elements,), dtype), (shard, dtype), (whole, dtype))

    def connect(self) -> None:
        p, nodes = self._problem, self._nodes
        inside = MatmulReduceScatter(
            m=p.m, n=p.n, k=p.k, dtype=p.dtype, world_size=nodes.ranks_per_node,
            weight_layout=p.weight_layout,
        )  # fmt: skip
        nodes.prepare(inside, -(-p.m // self._chunks))

    def steps(self, *tensors: Any) -> list[Step]:
        return Plan.steps(self, *tensors)

    def _reduce(self, partial: torch.Tensor) -> None:
        """The sum is made chunk by chunk, as they are multiplied."""

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        total: torch.Tensor,
        *scales: torch.Tensor,
    ) -> None:
        if is_compiling():
            return
        nodes, (_, shards, wholes) = self._nodes, self._scratch()
        rows = -(-len(x) // self._chunks)
        summed: list[tuple[torch.Tensor, ...]] = []
        sums, gathers = [], []
        for chunk, begin in enumerate(range(0, len(x), rows)):
            part, target = x[begin : begin + rows], total[begin : begin + rows]
            count = self._shard_rows(len(part))
            # A chunk that the ranks of a node share evenly is gathered where it belongs.
            is_even = count * nodes.ranks_per_node == len(part)
            whole = target if is_even else wholes[chunk, : count * nodes.ranks_per_node]
            shard = target if nodes.ranks_per_node == 1 else shards[chunk, :count]
            nodes.sum_in_node(part, weight, shard)
            if bias is not None and self._adds_bias:
                shard.add_(bias)
            summed.append((shard, whole, target))
            sums.append(all_reduce(shard, nodes.rail, beside=True))
            if chunk:
                gathers.append(self._gather(sums[chunk - 1], *summed[chunk - 1]))
        gathers.append(self._gather(sums[-1], *summed[-1]))
        for work, (_, whole, target) in zip(gathers, summed, strict=True):
            if work is not None:
                nodes.wait_in_node(work)
            if whole is not target:
                target.copy_(whole[: len(target)])

    def _gather(
        self, work: Any, shard: torch.Tensor, whole: torch.Tensor, target: torch.Tensor
    ) -> Any:
        """Gather a chunk once its rail is done; None where a rank has all of it."""
        work.wait()
        return None if shard is target else self._nodes.share_in_node(whole, shard)

    def _shard_rows(self, rows: int) -> int:
        return -(-rows // self._nodes.ranks_per_node)


VARIANT = Rail(RailPlan)
