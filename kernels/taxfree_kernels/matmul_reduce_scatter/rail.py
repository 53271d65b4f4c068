"""For ranks of several nodes: fused inside each node, the library between nodes, on shards.

The shards of all ranks are cut into pieces. Of a piece of each shard, the ranks of a node sum their
products, so that each has the pieces of its own number, of all nodes; the rail sums these, and each
node keeps its own. The rail sums one piece while the node computes the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from taxfree_kernels.launch import is_compiling
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.nodes import NodesFabric, Rail
from taxfree_kernels.variant import Config, Plan
from taxfree_kernels.vendor import reduce_scatter


class RailPlan(Plan):
    """Per piece: a copy that orders the rows, a sum inside the node, one over the rail."""

    def __init__(self, problem: MatmulReduceScatter, fabric: NodesFabric, config: Config) -> None:
        self._problem, self._nodes, self._chunks = problem, fabric, config["CHUNKS"]
        dtype, rows = getattr(torch, problem.dtype), -(-problem.shard_rows // self._chunks)
        of_nodes = len(fabric.names) * rows
        shapes = (
            (self._chunks, fabric.ranks_per_node * of_nodes * problem.k),
            (self._chunks, of_nodes * problem.n),
        )
        self._buffers = fabric.workspace.scratch(*((shape, dtype) for shape in shapes))
        self.launches = 3 * self._chunks

    def connect(self) -> None:
        problem, nodes = self._problem, self._nodes
        inside = replace(problem, world_size=nodes.ranks_per_node)
        nodes.prepare(inside, problem.world_size * -(-problem.shard_rows // self._chunks))

    def run(self, *tensors: Any) -> torch.Tensor:
        x, weight, out = tensors
        if is_compiling():
            return out
        nodes, (ordered, summed) = self._nodes, self._buffers()
        count, ranks, rows = len(nodes.names), nodes.ranks_per_node, -(-len(out) // self._chunks)
        by_owner = x.view(count, ranks, len(out), -1)
        works = []
        for chunk, begin in enumerate(range(0, len(out), rows)):
            piece = by_owner[:, :, begin : begin + rows].transpose(0, 1)
            shape = piece.shape
            part = ordered[chunk, : piece.numel()].view(shape).copy_(piece).view(-1, shape[-1])
            shard = summed[chunk, : count * shape[2] * out.shape[1]].view(-1, out.shape[1])
            nodes.sum_in_node(part, weight, shard)
            works.append(reduce_scatter(out[begin : begin + rows], shard, nodes.rail, beside=True))
        for work in works:
            work.wait()
        return out


VARIANT = Rail(RailPlan)
