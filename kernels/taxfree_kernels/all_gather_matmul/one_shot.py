"""One kernel gathers A over symmetric memory; the vendor's matmul follows.

An engine that uses symmetric memory would do this. The collective's latency shrinks to one signal,
the copy out of the inbox does the re-layout for gather_dim 1, and two launches remain.

Protocol. Sender programs as in ``push``; after them, one program per (source, chunk) waits for its
chunk and copies it from the inbox to its place in A. Every rank waits for every peer in each call,
so the two slots of the pool suffice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.fused import Gather, InputShard, push_chunk
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.several import GatheringPlan, SeveralWeights
from taxfree_kernels.all_gather_matmul.spaces import send_block
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Memory
from taxfree_kernels.device.tiles import select
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.spaces import nearest_first
from taxfree_kernels.variant import Config, Plan, Space, Step, resized
from taxfree_kernels.vendor import matmul_into


@triton.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _gather(
    a_ptr, own_rows, gathered_ptr, memory, rank, m, k, shard_rows, shard_columns,
    GROUP: tl.constexpr, GATHER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(memory, rank)
    senders = GATHER.CHUNKS * (GROUP.WORLD - 1)
    if program < senders:
        shard = InputShard(a_ptr, own_rows, shard_rows, shard_columns)
        push_chunk(program, shard, slot_ptr, peers, GROUP, GATHER)
    else:
        chunk = (program - senders) // GROUP.WORLD
        source = (rank + (program - senders) % GROUP.WORLD) % GROUP.WORLD
        chunk_rows = tl.cdiv(shard_rows, GATHER.CHUNKS)
        first_row = tl.where(GATHER.GATHER_DIM == 0, source * shard_rows, 0)
        begin = chunk * chunk_rows
        end = min(min(begin + chunk_rows, shard_rows), m - first_row)
        arrived = rank >= 0
        if source != rank:
            arrived = sync.wait(peers, chunk, source, GROUP)
        inbox_block_ptr = slot_ptr + source.to(tl.int64) * shard_rows * shard_columns
        block_ptr = select(source == rank, a_ptr, inbox_block_ptr, 16 if ALIGNED else 2)
        first_column = tl.where(GATHER.GATHER_DIM == 0, 0, source * shard_columns)
        target_ptr = gathered_ptr + first_row.to(tl.int64) * k + first_column
        for start in range(begin * shard_columns, end * shard_columns, GATHER.SEND_BLOCK):
            offsets = start + tl.arange(0, GATHER.SEND_BLOCK)
            mask = offsets < end * shard_columns
            tile = tl.load(block_ptr + offsets, mask=mask)
            tile = tl.where(arrived, tile, float("nan"))
            tl.store(
                target_ptr + offsets // shard_columns * k + offsets % shard_columns, tile, mask=mask
            )
    sync.leave(memory.control_ptr)


class OneShotPlan(GatheringPlan):
    """Our gather into a buffer, then the vendor's matmul on it."""

    launches = 2

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        dtype = getattr(torch, problem.dtype)
        world, chunks = problem.world_size, config["CHUNKS"]
        self._problem, self._rank = problem, fabric.rank
        slots = fabric.pool.slots(problem.gathered_elements, dtype)
        self._memory = Memory(*slots, fabric.pool.control, None, None, fabric.heap_bases)
        self._a = fabric.workspace.scratch(((problem.m, problem.k), dtype))
        self._gather = Kernel(
            _gather,
            grid=chunks * (2 * world - 1),
            constants={
                "GROUP": Group(world, fabric.backend),
                "GATHER": Gather(problem.gather_dim, chunks, send_block(problem, fabric.hardware)),
                "ALIGNED": problem.shard_columns % 8 == 0,
            },
        )
        self._sized = fabric.workspace.by_size(self._of_size)

    def _of_size(self, m: int) -> tuple[torch.Tensor, Kernel, int]:
        """The buffer for A, the gather kernel for m rows, and this rank's number of rows."""
        problem, (whole,) = resized(self._problem, m=m), self._a()
        last_args = (
            whole, self._memory, self._rank, m, problem.k, problem.shard_rows, problem.shard_columns
        )  # fmt: skip
        kernel = self._gather.resized(self._gather.grid, last_args)
        return whole[:m], kernel, problem.rows_of(self._rank)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size][1],)

    def gathered(self, a: torch.Tensor, m: int) -> torch.Tensor:
        whole, gather, own_rows = self._sized[m]
        gather(a, own_rows)
        return whole

    def steps(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> list[Step]:
        gathered, gather, own_rows = self._sized[out.shape[0]]
        *args, _, shard_columns = gather.last_args
        without_rows = gather.resized(gather.grid, (*args, 0, shard_columns))
        return [
            Step(
                "gather",
                "collective",
                lambda: gather(a, own_rows),
                latency_probe=lambda: without_rows(a, 0),
            ),
            Step(
                "matmul",
                "consumer",
                lambda: matmul_into(out, gathered, weight, bias),
                reads=gathered,
                memory_bytes=gathered.nbytes,
            ),
        ]


class OneShot(SeveralWeights):
    """Our one-shot gather, then the vendor's matmul."""

    name = "one_shot"
    fused = False

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        return spaces.unsupported_reason(problem)

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return {"CHUNKS": spaces.send_space(problem, hardware)["CHUNKS"]}

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        counts = self.space(problem, hardware)["CHUNKS"]
        order = nearest_first(counts, spaces.sending_chunks(problem))
        return [{"CHUNKS": count} for count in order]

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        return OneShotPlan(problem, fabric, config)


VARIANT = OneShot()
