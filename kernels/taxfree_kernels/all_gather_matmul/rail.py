"""For ranks of several nodes: fused inside each node, the library between nodes, on shards.

Each rank gets over the rail the shards of its own number from the other nodes, in pieces. The
node's ranks then gather and multiply the rows of one node after the other: their own first, while
the rail brings the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.nodes import NodesFabric, Rail
from taxfree_kernels.variant import Config, Plan
from taxfree_kernels.vendor import all_gather


class RailPlan(Plan):
    """A gather over the rail for each piece, and a matmul inside the node for each of its nodes."""

    def __init__(self, problem: AllGatherMatmul, fabric: NodesFabric, config: Config) -> None:
        self._problem, self._nodes, self._chunks = problem, fabric, config["CHUNKS"]
        dtype, rows = getattr(torch, problem.dtype), -(-problem.shard_rows // self._chunks)
        pieces = (self._chunks, len(fabric.names), rows * problem.k)
        product = (fabric.ranks_per_node * rows * problem.n if self._chunks > 1 else 0,)
        self._buffers = fabric.workspace.scratch((pieces, dtype), (product, dtype))
        self.launches = 1 + self._chunks * (len(fabric.names) + (self._chunks > 1))

    def connect(self) -> None:
        problem, ranks = self._problem, self._nodes.ranks_per_node
        most = ranks * problem.shard_rows  # of the own node, at once
        self._nodes.prepare(replace(problem, m=most, world_size=ranks), most)

    def run(self, *tensors: Any) -> torch.Tensor:
        a, weight, bias, out = tensors
        if is_compiling():
            return out
        nodes, (buffer, product) = self._nodes, self._buffers()
        count, ranks, rows = len(nodes.names), nodes.ranks_per_node, -(-len(a) // self._chunks)
        by_node = out.view(count, ranks, len(a), -1)
        pieces = []
        for chunk, begin in enumerate(range(0, len(a), rows)):
            piece = a[begin : begin + rows]
            gathered = buffer[chunk].view(-1)[: count * piece.numel()].view(count, *piece.shape)
            work = all_gather(gathered.flatten(0, 1), piece, nodes.rail, beside=True)
            pieces.append((begin, gathered, work))
        nodes.gather_in_node(a, weight, bias, by_node[nodes.own_node].flatten(0, 1))
        for begin, gathered, work in pieces:
            work.wait()
            for node in range(count):
                if node == nodes.own_node:
                    continue
                target = by_node[node, :, begin : begin + rows]
                if self._chunks == 1:
                    nodes.gather_in_node(gathered[node], weight, bias, target.flatten(0, 1))
                    continue
                part = product[: target.numel()].view(target.shape)
                nodes.gather_in_node(gathered[node], weight, bias, part.flatten(0, 1))
                target.copy_(part)
        return out


VARIANT = Rail(RailPlan)
