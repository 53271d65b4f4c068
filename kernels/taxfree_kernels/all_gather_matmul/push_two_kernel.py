"""The paper's push: one kernel sends the shard to every inbox; a second waits for each source.

Removes the bulk-synchronous tax only: a rank's tiles start as their sources arrive, whatever the
other ranks do; but there are two launches, and the second starts only after the first has sent all.
Protocol and payload lifetime are those of ``push``; the second kernel ends the call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul.fused import FusedPlan, FusedVariant
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.push import _push
from taxfree_kernels.all_gather_matmul.tile import push_chunk
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, Plan, resized


@triton.jit(do_not_specialize=["rank", "own_rows", "shard_rows"])
def _send(
    a_ptr, own_rows, inbox_ptr, slot_elements, control_ptr, heap_bases, rank, shard_rows,
    shard_columns, GROUP: tl.constexpr, CHUNKS: tl.constexpr, SEND_BLOCK: tl.constexpr,
):  # fmt: skip
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot_ptr = tl.multiple_of(inbox_ptr + (generation % 2) * slot_elements, 16)
    push_chunk(
        tl.program_id(0), a_ptr, own_rows, slot_ptr, peers, shard_rows, shard_columns, GROUP,
        CHUNKS, SEND_BLOCK,
    )  # fmt: skip


class PushTwoKernelPlan(FusedPlan):
    """The send kernel, then the tiles of ``push`` without senders."""

    launches = 2

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config, _push, 0, {"SENDERS": 0})
        self._ends = (*self._inbox, fabric.pool.control, fabric.heap_bases, fabric.rank)
        self._send = Kernel(
            _send,
            grid=config["CHUNKS"] * (problem.world_size - 1),
            constants={
                "GROUP": Group(problem.world_size, fabric.backend),
                "CHUNKS": config["CHUNKS"],
                "SEND_BLOCK": config["SEND_BLOCK"],
            },
        )
        self._sends = fabric.workspace.by_size(self._send_of_size)

    def _send_of_size(self, m: int) -> Kernel:
        problem = resized(self._problem, m=m)
        last_args = (*self._ends, problem.shard_rows, problem.shard_columns)
        return self._send.resized(self._send.grid, last_args)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sends[size], *super().kernels(size))

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        _, own_rows, _ = self._sized[out.shape[0]]
        self._sends[out.shape[0]](a, own_rows)
        return super().__call__(a, weight, bias, out)


class PushTwoKernel(FusedVariant):
    """Two kernels on one stream."""

    name = "push_two_kernel"
    searched = False

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        return PushTwoKernelPlan(problem, fabric, config)


VARIANT = PushTwoKernel()
