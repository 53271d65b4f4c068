"""The vendor's matmul, then one kernel that sums over symmetric memory in two shots.

Each rank owns a block of the output: all ranks send it their partial sums of that block, it adds
them and sends the result to all. Every link carries 2 / world_size of the bytes of one shot, at the
cost of one more signal, so it suits many rows. The owner adds bias and residual; two launches
remain.

Protocol. Three roles, in order of program id. Senders store a chunk of this rank's partial sum of a
peer's block into that peer's inbox, signal the peer, and never wait. Reducers wait for a chunk of
this rank's block from all peers, add in rank order, store the result into the output and into every
peer's second inbox, and signal every rank on channels of their own. Copiers wait for the reducer of
a peer's chunk and copy the result into the output. Reducers wait only for senders of peers, copiers
only for reducers of peers, so any order that starts low ids first makes progress. All ranks get the
bits that the owner computed. Each chunk, even an empty one, is waited for from every peer in every
call, so the two slots of the pool suffice for both inboxes.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.device.peers import Memory
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.rms_norm import NormAfter
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import Epilogue
from taxfree_kernels.reduction.sums import SumPlan, addends_of, two_shot_kernel
from taxfree_kernels.variant import Config, Space, Variant


class TwoShotPlan(SumPlan):
    """The vendor's matmul, then our two-shot sum."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        block_vec16, num_vec16 = _sixteens(problem)
        super().__init__(problem, fabric, 16 * num_vec16)
        elements = 16 * (problem.world_size * block_vec16 + num_vec16)
        slots = fabric.pool.slots(elements, getattr(torch, problem.dtype))
        memory = Memory(*slots, fabric.pool.control, None, None, fabric.heap_bases)
        self._ranks = memory, fabric.rank
        epilogue = Epilogue(problem.bias, problem.residual)
        self._kernel = two_shot_kernel(fabric, config, epilogue)

    def _launch(self, problem: MatmulAllReduce) -> tuple[int, tuple[Any, ...]]:
        sizes = (*_sixteens(problem), problem.elements, problem.n)
        return self._kernel.grid, (*self._ranks, *sizes)

    def add_up(self, partial: torch.Tensor, kernel: Kernel, *rest: torch.Tensor | None) -> None:
        bias, residual, _, _, out = rest
        kernel(partial, addends_of(bias, residual, out), out)


def _sixteens(problem: MatmulAllReduce) -> tuple[int, int]:
    """Elements of the block that a rank adds, and of the sum, in units of 16."""
    num_vec16 = -(-problem.elements // 16)
    return -(-num_vec16 // problem.world_size), num_vec16


class TwoShot(Variant):
    """Vendor matmul, our two-shot all-reduce."""

    plan_class = TwoShotPlan
    fused = False

    def unsupported_reason(self, problem: MatmulAllReduce, hardware: Hardware) -> str | None:
        return spaces.exchange_unsupported_reason(problem)

    def space(self, problem: MatmulAllReduce, hardware: Hardware) -> Space:
        return spaces.send_space(hardware, spaces.MOST_SIGNALS // 2)  # half are for results

    def seed_configs(self, problem: MatmulAllReduce, hardware: Hardware) -> list[dict[str, Any]]:
        sent = spaces.partial_bytes(problem) // problem.world_size
        configs = spaces.first_sends(self.space(problem, hardware), sent, problem.n)
        most = spaces.most_sent(problem)
        return [{**config, "SEND_BLOCK": min(config["SEND_BLOCK"], most)} for config in configs]


class TwoShotNormAfter(NormAfter, TwoShot):
    """Vendor matmul, our two-shot all-reduce, a kernel that normalises."""


VARIANT = TwoShotNormAfter()
