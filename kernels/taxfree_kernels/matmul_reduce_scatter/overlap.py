"""Copy engines scatter one part of the partial sum while the vendor's matmul computes the next.

Removes most of the bulk-synchronous tax and leaves the compute units to the matmul: peers' shards
first, beginning with the next rank's, this rank's own last, then the sum of all ranks' parts. Costs
two launches per copy, and copies take microseconds to start, so it suits many rows.

Protocol. That of :mod:`taxfree_kernels.copies`: each chunk of a peer's shard is signalled to that
peer. The kernel that adds waits for all chunks of all peers, and comes after all copies of this
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.copies import PeerCopies, parts_of, rows_of_chunk
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.device.sync import wait_for_channels
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.reduction.fused import with_sources
from taxfree_kernels.reduction.spaces import padded_elements
from taxfree_kernels.spaces import copy_space, first_copies
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized
from taxfree_kernels.vendor import matmul_into

_BLOCK, _INTERPRETED_BLOCK = 2048, 64  # elements that a program adds at a time
_PROGRAMS = 4  # adding programs for each compute unit


@triton.jit(do_not_specialize=["channel", "rank", "first", "count", "size"])
def _add(
    partial_ptr, out_ptr, inbox, control_ptr, channel, heap_bases, rank,
    first, count, size, GROUP: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add all ranks' partial sums of this rank's shard, in rank order.

    Args:
        partial_ptr: this rank's partial sum.
        inbox: a pointer to [WORLD, stride_source], and stride_source.
        channel: the first of CHUNKS channels of the peers' signals.
        first: start of the shard in the output; `first`, `count`, `size` in units of 16 elements.
        count: part of the shard in rows of the sum; the rest, up to `size`, is zero.
    """
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    wait_for_channels(peers, channel, channel + CHUNKS, GROUP, CHUNKS, BUT_SELF=True)
    for start in range(tl.program_id(0) * BLOCK, size * 16, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask, elements = offsets < count * 16, first * 16 + offsets
        total = tl.zeros((BLOCK,), tl.float32)
        total = with_sources(total, offsets, mask, partial_ptr, inbox[0], inbox[1], rank, GROUP)
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + elements, total, mask=offsets < size * 16)


@dataclass(frozen=True)
class _Message:
    """A chunk of a peer's shard that is sent to it.

    Args:
        rows: of all ranks' shards, one below the other.
        source, target: these rows, here and in the peer's memory.
    """

    peer: int
    chunk: int
    rows: slice
    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class _Part:
    """One matmul, and the messages that follow it.

    Args:
        rows, columns: of x, and of the weight.
        product: the matmul's output.
    """

    rows: slice
    columns: slice
    product: torch.Tensor
    messages: list[_Message]


@dataclass(frozen=True)
class _Sized:
    """The work of calls of one size.

    Args:
        empty: chunks without rows, whose signals are also waited for.
        partial: this rank's partial sum of its own shard.
    """

    empty: list[_Message]
    parts: list[_Part]
    partial: torch.Tensor
    add: Kernel


class OverlapPlan(Plan):
    """A matmul per part, copies that overlap the next one, and one addition."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> None:
        self._problem, self._fabric, self._config = problem, fabric, config
        self._copies = PeerCopies(fabric, config["CHUNKS"], config["STREAMS"])
        dtype = getattr(torch, problem.dtype)
        self._slot, _ = fabric.pool.slots(problem.inbox_elements, dtype)
        shard = problem.shard_rows * problem.shard_columns
        self._shards = fabric.workspace.scratch(((problem.world_size * shard,), dtype))
        self._add = Kernel(
            _add,
            grid=0,
            constants={
                "GROUP": Group(fabric.world_size, fabric.backend),
                "CHUNKS": config["CHUNKS"],
                "BLOCK": _INTERPRETED_BLOCK if fabric.backend == "interpreter" else _BLOCK,
            },
            options=compile_options(fabric.backend, {"num_warps": 4}),
        )
        self._sized = fabric.workspace.by_size(self._of_size)
        messages = (problem.world_size - 1) * config["CHUNKS"]
        self.launches = len(self._sized[problem.m].parts) + 2 * messages + 3

    def _of_size(self, m: int) -> _Sized:
        problem, (shards,) = resized(self._problem, m=m), self._shards()
        fabric, chunks = self._fabric, self._config["CHUNKS"]
        world, rank = problem.world_size, fabric.rank
        rows, columns = problem.shard_rows, problem.shard_columns
        stride, num_vec16 = padded_elements(rows, columns), columns // 16
        inbox = self._slot[: world * stride]
        shards = shards[: world * rows * columns].view(world * rows, columns)
        messages = list(_messages(problem, fabric, chunks, shards, inbox.view(world, stride)))
        owners = [(rank + distance) % world for distance in range(1, world + 1)]
        own_rows = rows_of_chunk(problem, rank, 0, 1)
        last_args = (
            (inbox, stride), fabric.pool.control, 0, fabric.heap_bases, rank,
            0, (own_rows.stop - own_rows.start) * num_vec16, rows * num_vec16,
        )  # fmt: skip
        most = _PROGRAMS * fabric.hardware.compute_units
        grid = min(-(-rows * columns // self._add.constants["BLOCK"]), most)
        return _Sized(
            empty=[message for message in messages if message.rows.start == message.rows.stop],
            parts=[
                _part(problem, part.rows, shards, messages)
                for part in parts_of(problem, owners, chunks, self._config["CHUNKS_PER_WAIT"])
            ],
            partial=shards[rank * rows :],
            add=self._add.resized(grid, last_args),
        )

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._add, *self._copies.kernels)

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        sized = self._sized[x.shape[0]]
        self._copies.begin()
        self._send(sized.empty)
        for part in sized.parts:
            matmul_into(part.product, x[part.rows], weight[:, part.columns], None)
            self._copies.follow()
            self._send(part.messages)
        self._copies.join()
        sized.add(sized.partial, out)
        self._copies.finish(out)
        return out

    def _send(self, messages: list[_Message]) -> None:
        for message in messages:
            self._copies.send(message.target, message.source, message.chunk, message.peer)


def _messages(
    problem: MatmulReduceScatter,
    fabric: Fabric,
    chunks: int,
    shards: torch.Tensor,
    inbox: torch.Tensor,
) -> Iterator[_Message]:
    """Parts in the order of their matmuls; each rank begins with another peer."""
    world, rank = problem.world_size, fabric.rank
    for distance, chunk in product(range(1, world), range(chunks)):
        peer = (rank + distance) % world
        rows = rows_of_chunk(problem, peer, chunk, chunks)
        source = shards[rows]
        begin = (rows.start - peer * problem.shard_rows) * problem.shard_columns
        target = fabric.peer_view(inbox, peer)[rank][begin : begin + source.numel()]
        yield _Message(peer, chunk, rows, source, target.view(source.shape))


def _part(
    problem: MatmulReduceScatter, part: slice, shards: torch.Tensor, messages: list[_Message]
) -> _Part:
    """The part of all ranks' shards in these rows."""
    rows, columns = part, slice(0, problem.n)
    if problem.scatter_dim == 1:  # a part of a single rank's shard; all shards have the same rows
        owner, width = part.start // problem.m, problem.shard_columns
        rows = slice(part.start - owner * problem.m, part.stop - owner * problem.m)
        columns = slice(owner * width, (owner + 1) * width)
    within = [
        message
        for message in messages
        if part.start <= message.rows.start < message.rows.stop <= part.stop
    ]
    return _Part(rows, columns, shards[part], within)


class Overlap(Variant):
    """Copy engines scatter during the vendor's matmul."""

    name = "overlap"

    def unsupported_reason(self, problem: MatmulReduceScatter, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.shard_columns % 16:
            return "shards do not split into parts of aligned rows"
        if problem.elements > 1 << 30:
            return "its elements are counted in 32 bits"
        return None

    def space(self, problem: MatmulReduceScatter, hardware: Hardware) -> Space:
        space = copy_space(problem, hardware)
        if problem.scatter_dim == 1:  # shards are not rows of one matmul
            space = {**space, "CHUNKS_PER_WAIT": (1,)}
        return space

    def seed_configs(
        self, problem: MatmulReduceScatter, hardware: Hardware
    ) -> list[dict[str, Any]]:
        return first_copies(problem, self.space(problem, hardware), rows_at_once=512)

    def plan(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> Plan:
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
