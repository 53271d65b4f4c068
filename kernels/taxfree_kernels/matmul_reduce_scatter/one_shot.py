"""The vendor's matmul, then one kernel that scatters and sums over symmetric memory.

An engine with symmetric memory would do this. The collective's latency shrinks to one signal, the
stores into the inboxes do the re-layout for scatter_dim 1, and two launches remain.

Protocol. Sender programs have the lowest ids: each stores a chunk of this rank's partial sum of a
peer's shard, in the problem's own dtype, into that peer's inbox, signals the peer, and never waits.
The programs above them each wait for a chunk of this rank's shard from all peers and add the
partial sums in rank order. Each chunk, even an empty one, is signalled to, and waited for from,
every peer in every call, so the two slots of the pool suffice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers, translate
from taxfree_kernels.device.sync import wait_for_everybody
from taxfree_kernels.device.tiles import select
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.spaces import padded_elements
from taxfree_kernels.reduction.sums import SumPlan, bounds_of_chunk
from taxfree_kernels.variant import Config, Space, Variant


@triton.jit
def in_partial_sum(offsets, owner, n, shard_rows, shard_columns, SCATTER_DIM: tl.constexpr):
    """Offsets in a partial sum [m, n] of elements at `offsets` of a shard, counted row by row."""
    if SCATTER_DIM == 0:
        return owner.to(tl.int64) * shard_rows * n + offsets
    row, column = offsets // shard_columns, offsets % shard_columns
    return row.to(tl.int64) * n + owner * shard_columns + column


@triton.jit(do_not_specialize=["rank", "m", "shard_rows"])
def _one_shot(
    partial_ptr, out_ptr, inbox_ptr, slot_elements, stride_source, control_ptr, heap_bases, rank, m,
    n, shard_rows, shard_columns, GROUP: tl.constexpr, SCATTER_DIM: tl.constexpr,
    CHUNKS: tl.constexpr, SEND_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot_ptr = tl.multiple_of(inbox_ptr + (generation % 2) * slot_elements, 16)
    senders = CHUNKS * (GROUP.WORLD - 1)
    num_vec16 = tl.cdiv(shard_rows * shard_columns, 16)
    if program < senders:
        chunk = program // (GROUP.WORLD - 1)
        peer = (rank + 1 + program % (GROUP.WORLD - 1)) % GROUP.WORLD
        begin, end = bounds_of_chunk(chunk, 0, num_vec16, CHUNKS)
        count = elements_of_shard(peer, m, shard_rows, shard_columns, SCATTER_DIM)
        own_ptr = slot_ptr + rank.to(tl.int64) * stride_source
        target_ptr = translate(own_ptr, peers, peer)
        for start in range(begin * 16, end * 16, SEND_BLOCK):
            offsets = start + tl.arange(0, SEND_BLOCK)
            mask = (offsets < end * 16) & (offsets < count)
            source = in_partial_sum(offsets, peer, n, shard_rows, shard_columns, SCATTER_DIM)
            tl.store(target_ptr + offsets, tl.load(partial_ptr + source, mask=mask), mask=mask)
        sync.signal(peers, chunk, peer, GROUP)
    else:
        chunk = program - senders
        begin, end = bounds_of_chunk(chunk, 0, num_vec16, CHUNKS)
        count = elements_of_shard(rank, m, shard_rows, shard_columns, SCATTER_DIM)
        arrived = wait_for_everybody(peers, chunk, GROUP, BUT_SELF=True)
        for start in range(begin * 16, end * 16, SEND_BLOCK):
            offsets = start + tl.arange(0, SEND_BLOCK)
            mask = (offsets < end * 16) & (offsets < count)
            sum_offsets = in_partial_sum(offsets, rank, n, shard_rows, shard_columns, SCATTER_DIM)
            total = tl.zeros((SEND_BLOCK,), tl.float32)
            for source in tl.static_range(GROUP.WORLD):
                inbox_block_ptr = slot_ptr + source * stride_source
                source_ptr = select(rank == source, partial_ptr, inbox_block_ptr, 16)
                part = source_ptr + tl.where(rank == source, sum_offsets, offsets)
                total += tl.load(part, mask=mask, other=0.0).to(tl.float32)
            total = tl.where(arrived, total, float("nan"))
            stored = (offsets < end * 16) & (offsets < shard_rows * shard_columns)
            tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=stored)
    sync.leave(control_ptr)


@triton.jit
def elements_of_shard(rank, m, shard_rows, shard_columns, SCATTER_DIM: tl.constexpr):
    """Elements of the shard of a rank that lie in rows below m."""
    rows = shard_rows
    if SCATTER_DIM == 0:
        rows = max(0, min(m - rank * shard_rows, shard_rows))
    return rows * shard_columns


class OneShotPlan(SumPlan):
    """The vendor's matmul, then our scatter and sum."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, problem.elements)
        self._inbox = fabric.pool.slots(problem.inbox_elements, getattr(torch, problem.dtype))
        self._ranks = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        self._kernel = Kernel(
            _one_shot,
            grid=config["CHUNKS"] * problem.world_size,
            constants={
                "GROUP": Group(problem.world_size, fabric.backend),
                "SCATTER_DIM": problem.scatter_dim,
                "CHUNKS": config["CHUNKS"],
                "SEND_BLOCK": config["SEND_BLOCK"],
            },
            options=compile_options(fabric.backend, config),
        )

    def _launch(self, problem: MatmulReduceScatter) -> tuple[int, tuple[Any, ...]]:
        rows, columns = problem.shard_rows, problem.shard_columns
        sizes = (problem.m, problem.n, rows, columns)
        stride_source = padded_elements(rows, columns)
        return self._kernel.grid, (*self._inbox, stride_source, *self._ranks, *sizes)


class OneShot(Variant):
    """Vendor matmul, our reduce-scatter."""

    plan_class = OneShotPlan
    fused = False

    def unsupported_reason(self, problem: MatmulReduceScatter, hardware: Hardware) -> str | None:
        return spaces.exchange_unsupported_reason(problem)

    def space(self, problem: MatmulReduceScatter, hardware: Hardware) -> Space:
        return spaces.send_space(hardware, spaces.MOST_SIGNALS)

    def seed_configs(
        self, problem: MatmulReduceScatter, hardware: Hardware
    ) -> list[dict[str, Any]]:
        sent = spaces.partial_bytes(problem) // problem.world_size
        return spaces.first_sends(self.space(problem, hardware), sent, problem.shard_columns)


VARIANT = OneShot()
