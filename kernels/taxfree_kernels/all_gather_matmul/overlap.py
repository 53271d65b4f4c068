"""Copy engines gather A while the vendor's matmul computes the rows that are already here.

Removes most of the bulk-synchronous tax where there are many rows, and leaves the compute units to
the matmul: the own rows first, then those of each peer as they come. Costs two launches a copy and
two a part of the matmul, and copies take microseconds to start: not for few rows.

Protocol. The addresses of copies are fixed when a graph is captured, so they cannot take turns
between the two payload slots: all go to the first one. On both sides of the call it is free:

- Before: a kernel on a copying stream signals all ranks that this one has entered the call, behind
  all that the caller's stream was given earlier, and waits for the same from all peers. Copies come
  after it. So nobody reads an earlier payload any more. This is also the full exchange that the
  proof of the two slots asks of each call.
- After: the call takes one generation or two, so that the next one is odd, and uses the second
  slot. The one after that finds, as always, that all ranks have left this call.

Each copy is followed on its stream by a kernel that signals it; on the caller's stream a kernel
waits for the rows of a part before that part is multiplied. Copying streams wait only for peers to
enter, and entering waits for nobody: however the device shares itself among the streams, all copies
are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.tile import wait_for_rows
from taxfree_kernels.device import sync
from taxfree_kernels.device.exchange import signal_everybody, wait_for_everybody
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options, copy_to_peer
from taxfree_kernels.variant import Config, Plan, Space, Variant
from taxfree_kernels.vendor import matmul_into


@triton.jit(do_not_specialize=["rank"])
def _enter(
    control_ptr, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Tell all ranks that this one has left its earlier calls; wait until all peers have."""
    generation = sync.running_generation(control_ptr)
    signal_everybody(control_ptr, CHUNKS, generation, heap_bases, rank, WORLD, BACKEND)
    wait_for_everybody(
        control_ptr, CHUNKS, generation, heap_bases, rank, WORLD, BACKEND, BUT_SELF=True
    )


@triton.jit(do_not_specialize=["rank", "chunk", "peer"])
def _announce(
    control_ptr, heap_bases, rank, chunk, peer, WORLD: tl.constexpr, BACKEND: tl.constexpr
):
    """Tell a peer that a chunk has been copied."""
    generation = sync.running_generation(control_ptr)
    sync.signal(
        control_ptr, chunk, peer, generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND
    )


@triton.jit(do_not_specialize=["rank", "row", "row_end", "m", "shard_rows"])
def _await(
    control_ptr, heap_bases, rank, row, row_end, m, shard_rows,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Wait for rows [row, row_end)."""
    generation = sync.running_generation(control_ptr)
    wait_for_rows(
        row, row_end, 0, 0, control_ptr, generation, heap_bases, rank, m, shard_rows,
        WORLD, BACKEND, 0, CHUNKS,
    )  # fmt: skip


@triton.jit
def _finish(control_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    """End the call; the output is NaN if it may be garbage."""
    if sync.has_given_up(control_ptr):
        for start in range(0, elements, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + at, float("nan"), mask=at < elements)
    generation = sync.running_generation(control_ptr)
    sync.leave(control_ptr, 1 + generation % 2)  # whatever comes next is odd


@dataclass(frozen=True)
class _Message:
    """A chunk of the shard on its way to a peer.

    Args:
        rows: of the shard.
        target: where they go, in the peer's memory.
    """

    peer: int
    chunk: int
    rows: slice
    target: torch.Tensor


class OverlapPlan(Plan):
    """Copies on side streams, each announced; a matmul per part of the rows, behind a wait."""

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        world, rank, chunks = problem.world_size, fabric.rank, config["CHUNKS"]
        dtype = getattr(torch, problem.dtype)
        inbox, _ = fabric.pool.slots(problem.gathered_elements, dtype)
        self._inbox = inbox.view(world * problem.shard_rows, problem.k)
        self._own = _rows_of_chunk(problem, rank, 0, 1)
        self._parts = [
            (rows, self._inbox[rows])
            for rows in _parts(problem, rank, chunks, config["CHUNKS_PER_WAIT"])
        ]
        self._messages = list(self._messages_of(problem, fabric, chunks))
        self._streams = [fabric.side_stream() for _ in range(config["STREAMS"])]
        self._ends = (fabric.pool.control, fabric.heap_bases, rank)
        self._shape = (problem.m, problem.shard_rows)
        ranks = {"WORLD": world, "BACKEND": fabric.backend}
        options = compile_options(fabric.backend, {"num_warps": 1})
        self._enter = Kernel(_enter, 1, ranks | {"CHUNKS": chunks}, options)
        self._announce = Kernel(_announce, 1, ranks, options)
        self._await = Kernel(_await, 1, ranks | {"CHUNKS": chunks}, options)
        self._finish = Kernel(_finish, 1, {"BLOCK": 1024}, options)
        self.launches = 3 + 2 * len(self._messages) + 2 * len(self._parts)

    def _messages_of(
        self, problem: AllGatherMatmul, fabric: Fabric, chunks: int
    ) -> Iterator[_Message]:
        """In the order in which peers need them; each rank begins with another peer."""
        world, rank = problem.world_size, fabric.rank
        for distance, chunk in product(range(1, world), range(chunks)):
            peer = (rank - distance) % world
            rows, begin = _rows_of_chunk(problem, rank, chunk, chunks), rank * problem.shard_rows
            target = fabric.peer_view(self._inbox, peer)[rows]
            yield _Message(peer, chunk, slice(rows.start - begin, rows.stop - begin), target)

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        first, *others = self._streams
        with first.forked():
            self._enter(*self._ends)
            for stream in others:
                stream.fork()
        matmul_into(out[self._own], a, weight, bias)
        for message, stream in zip(self._messages, cycle(self._streams), strict=False):
            with stream.entered():
                copy_to_peer(message.target, a[message.rows])
                self._announce(*self._ends, message.chunk, message.peer)
        for rows, arrived in self._parts:
            self._await(*self._ends, rows.start, rows.stop, *self._shape)
            matmul_into(out[rows], arrived, weight, bias)
        for stream in self._streams:
            stream.join()
        self._finish(self._ends[0], out, out.numel())
        return out


def _rows_of_chunk(problem: AllGatherMatmul, source: int, chunk: int, chunks: int) -> slice:
    """Which rows of the gathered A a chunk of a rank's shard is; the last ones may be empty."""
    per_chunk, rows = -(-problem.shard_rows // chunks), problem.rows_of(source)
    first = source * problem.shard_rows
    begin, end = (first + min(each * per_chunk, rows) for each in (chunk, chunk + 1))
    return slice(begin, end)


def _parts(problem: AllGatherMatmul, rank: int, chunks: int, chunks_per_wait: int) -> list[slice]:
    """The peers' rows in parts of so many chunks, in the order in which they come.

    A part that goes on at row 0 is two.
    """
    pieces = [
        _rows_of_chunk(problem, (rank + distance) % problem.world_size, chunk, chunks)
        for distance, chunk in product(range(1, problem.world_size), range(chunks))
    ]
    parts: list[slice] = []
    for number, piece in enumerate(pieces):
        goes_on = number % chunks_per_wait > 0 and parts and parts[-1].stop == piece.start
        if goes_on:
            parts[-1] = slice(parts[-1].start, piece.stop)
        elif piece.start < piece.stop:
            parts.append(piece)
    return parts


class Overlap(Variant):
    """Copy engines gather beside the vendor's matmul."""

    name = "overlap"

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.world_size == 1:
            return "one rank has no peers"
        if problem.gather_dim == 1:
            return "parts of K would be rounded before they are added"
        return None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return spaces.overlap_space(problem, hardware)

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_overlaps(problem, self.space(problem, hardware))

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
