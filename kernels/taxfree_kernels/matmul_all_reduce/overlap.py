"""Copy engines carry the first shot of a sum while the vendor's matmul computes the next rows.

The reduce-scatter of the same name, whose last kernel is that of ``two_shot``: it adds this rank's
rows and sends the sums to all. So half of the exchange costs no time, and the matmul keeps all
compute units. Copies take microseconds to start, so it suits many rows.

Protocol. That of the reduce-scatter, then that of ``two_shot`` without its senders: its reducers
wait for all peers' copies, behind all copies of this rank. Sums, too, go to the first slot.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from taxfree_kernels.copies import COPIED
from taxfree_kernels.device.peers import Memory
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.rms_norm import NormAfter
from taxfree_kernels.matmul_reduce_scatter import overlap
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import Epilogue
from taxfree_kernels.reduction.sums import addends_of, two_shot_kernel
from taxfree_kernels.spaces import up_to, within
from taxfree_kernels.variant import ITEM_BYTES, Config, Space, Variant


class OverlapPlan(overlap.OverlapPlan):
    """Matmuls and copies of the reduce-scatter, one kernel that adds and sends."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        self._epilogue = Epilogue(problem.bias, problem.residual)
        super().__init__(_scattered(problem), fabric, config, others=problem.elements)

    def _adder(self, config: Config) -> Kernel:
        return two_shot_kernel(self._fabric, config, self._epilogue, COPIED)

    def _addition(
        self, problem: MatmulReduceScatter, shards: torch.Tensor
    ) -> tuple[torch.Tensor, Kernel]:
        fabric = self._fabric
        memory = Memory(self._slot, 0, fabric.pool.control, None, None, fabric.heap_bases)
        block, elements = problem.shard_rows * problem.n, problem.elements
        sizes = (block // 16, elements // 16, elements, problem.n)
        return shards, self._add.resized(self._add.grid, (memory, fabric.rank, *sizes))

    def run(self, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        bias, residual, _, _, *scales, out = rest
        partial, add = self._scatter(x, weight, *scales)
        add(partial, addends_of(bias, residual, out), out)
        self._copies.finish(out)
        return out


def _scattered(problem: MatmulAllReduce) -> MatmulReduceScatter:
    """Its reduce-scatter, of rows."""
    names = {field.name for field in fields(MatmulReduceScatter)} - {"scatter_dim"}
    return MatmulReduceScatter(**{name: getattr(problem, name) for name in names})


class Overlap(Variant):
    """Copy engines carry partial sums during the vendor's matmul."""

    plan_class = OverlapPlan
    copies = True

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        scattered = _scattered(problem)
        blocks = problem.world_size * scattered.kept_elements
        if (blocks + problem.elements) * ITEM_BYTES[problem.dtype] > problem.slot_bytes:
            return "equal numbers of rows for all ranks do not fit a slot"
        return overlap.VARIANT.unsupported_reason(scattered, hardware)

    def space(self, problem: MatmulAllReduce, hardware: Hardware) -> Space:
        # channels 0 and 1 are the copies'
        chunks = (2, 3) if hardware.backend == "interpreter" else (16, 32, 64, 120)
        return {
            **spaces.send_space(hardware, spaces.MOST_SIGNALS),
            "CHUNKS": chunks,
            **overlap.VARIANT.space(_scattered(problem), hardware),
            "STREAMS": up_to(problem.world_size - 1, (1, 2, 4, 8)),
        }

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        space, send_block = self.space(problem, hardware), spaces.most_sent(problem)
        needed = problem.elements // (problem.world_size * send_block)
        counts = [count for count in space["CHUNKS"][-2:] if count <= needed]
        guess = {"SEND_BLOCK": send_block, "num_warps": 8}
        return [
            within(space, {**guess, "CHUNKS": count, **copies})
            for count in reversed(counts or space["CHUNKS"][:1])
            for copies in overlap.VARIANT.seed_configs(_scattered(problem), hardware)
        ]


class OverlapNormAfter(NormAfter, Overlap):
    """Copy engines carry partial sums; another kernel normalises."""


VARIANT = OverlapNormAfter()
