"""The paper's push: one kernel sends the shard to every inbox; a second waits for each source.

Removes the bulk-synchronous tax only: a rank's tiles start as their sources arrive, whatever the
other ranks do; but there are two launches, and the second starts only after the first has sent all.
Protocol and payload lifetime are those of ``push``; the second kernel ends the call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import fused
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.push import _push
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, resized


@triton.jit(do_not_specialize=["rank", "own_rows", "shard_rows"])
def _send(
    a_ptr, own_rows, memory, rank, shard_rows, shard_columns,
    GROUP: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    peers, slot_ptr = sync.running_slot(memory, rank)
    shard = fused.InputShard(a_ptr, own_rows, shard_rows, shard_columns)
    fused.push_chunk(tl.program_id(0), shard, slot_ptr, peers, GROUP, GATHER)


class PushTwoKernelPlan(fused.FusedGatherPlan):
    """The send kernel, then the tiles of ``push`` without senders."""

    launches = 2

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config, _push, senders=0)
        self._send = Kernel(
            _send,
            grid=config["CHUNKS"] * (problem.world_size - 1),
            constants={
                "GROUP": Group(problem.world_size, fabric.backend),
                "GATHER": fused.Gather(problem.gather_dim, config["CHUNKS"], config["SEND_BLOCK"]),
            },
        )
        self._sends = fabric.workspace.by_size(self._send_of_size)

    def _send_of_size(self, m: int) -> Kernel:
        problem = resized(self._problem, m=m)
        last_args = (self._memory, self._rank, problem.shard_rows, problem.shard_columns)
        return self._send.resized(self._send.grid, last_args)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sends[size], *super().kernels(size))

    def run(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        _, own_rows, _ = self._sized[out.shape[0]]
        self._sends[out.shape[0]](a, own_rows)
        return super().run(a, weight, bias, out)


class PushTwoKernel(fused.FusedGatherVariant):
    """Two kernels on one stream."""

    plan_class = PushTwoKernelPlan
    searched = False

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if problem.is_fp8:
            return "its senders send rows without scales"
        return super().unsupported_reason(problem, hardware)


VARIANT = PushTwoKernel()
