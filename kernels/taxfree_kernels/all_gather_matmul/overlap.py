"""Copy engines gather A while the vendor's matmul computes on the rows that have arrived.

Removes most of the bulk-synchronous tax and leaves the compute units to the matmul: this rank's
rows first, then those of each peer as they arrive. Costs two launches per copy and two per part of
the matmul, and copies take microseconds to start, so it suits many rows.

Protocol. That of :mod:`taxfree_kernels.copies`. Each copy of a chunk is signalled to the peer that
receives it. On the caller's stream, a kernel waits for the rows of a part before that part is
multiplied. It follows this rank's copies of the same part to its peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.fused import Gather, wait_for_rows
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.copies import PeerCopies, parts_of, rows_of_chunk
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import copy_space, first_copies
from taxfree_kernels.variant import Config, Plan, Space, Variant, resized
from taxfree_kernels.vendor import matmul_into


@triton.jit(do_not_specialize=["rank", "row", "row_end", "m", "shard_rows"])
def _await(
    control_ptr, heap_bases, rank, m, shard_rows, row, row_end,
    GROUP: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Wait for rows [row, row_end)."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    wait_for_rows(row, row_end, 0, 0, peers, m, shard_rows, GROUP, GATHER)


@dataclass(frozen=True)
class _Message:
    """A chunk of the shard that is sent to a peer.

    Args:
        rows: of the shard.
        target: their place in the peer's memory.
    """

    peer: int
    chunk: int
    rows: slice
    target: torch.Tensor


@dataclass(frozen=True)
class _Calls:
    """The work of calls of one size.

    Args:
        own_rows: this rank's rows of the output.
        parts: parts of the peers' rows: the messages to send before it, the rows, and the place
            where they arrive.
        last_messages: messages to send after the last part.
        await_args: arguments of the waiting kernel before the rows.
    """

    own_rows: slice
    parts: list[tuple[list[_Message], slice, torch.Tensor]]
    last_messages: list[_Message]
    await_args: tuple[Any, ...]

    @property
    def launches(self) -> int:
        messages = sum(len(sent) for sent, _, _ in self.parts) + len(self.last_messages)
        return 3 + 2 * messages + 2 * len(self.parts)


class OverlapPlan(Plan):
    """Copies on side streams, each with a signal; per part of the rows a wait and a matmul."""

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        self._problem, self._fabric, self._config = problem, fabric, config
        self._inbox, _ = fabric.pool.slots(problem.gathered_elements, getattr(torch, problem.dtype))
        self._copies = PeerCopies(fabric, config["CHUNKS"], config["STREAMS"])
        self._await = Kernel(
            _await,
            1,
            {
                "GROUP": Group(problem.world_size, fabric.backend),
                "GATHER": Gather(problem.gather_dim, config["CHUNKS"]),
            },
            compile_options(fabric.backend, {"num_warps": 1}),
        )
        self._sized = fabric.workspace.by_size(self._of_size)
        self.launches = self._sized[problem.m].launches

    def _of_size(self, m: int) -> _Calls:
        problem, fabric = resized(self._problem, m=m), self._fabric
        world, rank, chunks = problem.world_size, fabric.rank, self._config["CHUNKS"]
        inbox = self._inbox[: problem.gathered_elements].view(-1, problem.k)
        peers = [(rank + distance) % world for distance in range(1, world)]
        messages = list(self._messages_of(problem, inbox))
        parts = parts_of(problem, peers, chunks, self._config["CHUNKS_PER_WAIT"])
        begins = [0, *(part.chunks for part in parts)]
        return _Calls(
            own_rows=rows_of_chunk(problem, rank, 0, 1),
            parts=[
                (messages[begin : part.chunks], part.rows, inbox[part.rows])
                for begin, part in zip(begins, parts, strict=False)
            ],
            last_messages=messages[begins[-1] :],
            await_args=(fabric.pool.control, fabric.heap_bases, rank, m, problem.shard_rows),
        )

    def _messages_of(self, problem: AllGatherMatmul, inbox: torch.Tensor) -> Iterator[_Message]:
        """Messages in the order in which peers need them; each rank begins with another peer."""
        world, rank, chunks = problem.world_size, self._fabric.rank, self._config["CHUNKS"]
        for distance, chunk in product(range(1, world), range(chunks)):
            peer = (rank - distance) % world
            rows, begin = rows_of_chunk(problem, rank, chunk, chunks), rank * problem.shard_rows
            target = self._fabric.peer_view(inbox, peer)[rows]
            yield _Message(peer, chunk, slice(rows.start - begin, rows.stop - begin), target)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._await, *self._copies.kernels)

    def run(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        calls = self._sized[out.shape[0]]
        self._copies.begin()
        matmul_into(out[calls.own_rows], a, weight, bias)
        for messages, rows, arrived in calls.parts:
            self._send(messages, a)
            self._copies.join()
            self._await(*calls.await_args, rows.start, rows.stop)
            matmul_into(out[rows], arrived, weight, bias)
        self._send(calls.last_messages, a)
        self._copies.join()
        self._copies.finish(out)
        return out

    def _send(self, messages: list[_Message], a: torch.Tensor) -> None:
        for message in messages:
            self._copies.send(message.target, a[message.rows], message.chunk, message.peer)


class Overlap(Variant):
    """Copy engines gather during the vendor's matmul."""

    name = "overlap"

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if problem.gather_dim == 1:
            return "parts of K would be rounded before they are added"
        reason = spaces.unsupported_reason(problem)
        return reason or self.illegal_reason(problem, hardware, {"CHUNKS": 1})

    def illegal_reason(
        self, problem: AllGatherMatmul, hardware: Hardware, config: Config
    ) -> str | None:
        # A wait for the last rows also waits for empty chunks, and so for ranks that signal
        # those only after waits of their own: a deadlock.
        last = rows_of_chunk(
            problem, problem.world_size - 1, config["CHUNKS"] - 1, config["CHUNKS"]
        )
        return None if last.stop > last.start else "a chunk without rows"

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return copy_space(problem, hardware)

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        configs = first_copies(problem, self.space(problem, hardware), rows_at_once=1024)
        return [config for config in configs if not self.illegal_reason(problem, hardware, config)]

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
