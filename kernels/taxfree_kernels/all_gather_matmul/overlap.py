"""Copy engines gather A while the vendor's matmul computes on the rows that have arrived.

Removes most of the bulk-synchronous tax and leaves the compute units to the matmul: this rank's
rows first, then those of each peer as they arrive. Costs two launches per copy and two per part of
the matmul, and copies take microseconds to start, so it suits many rows.

Protocol. That of :mod:`taxfree_kernels.copies`. Each copy of the shard is signalled to the peer
that receives it. On the caller's stream, a kernel waits for the rows of a part before that part is
multiplied. It follows this rank's copies of the same part to its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import spaces
from taxfree_kernels.all_gather_matmul.fused import Gather, wait_for_rows
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.several import Biases, SeveralWeights, SeveralWeightsPlan
from taxfree_kernels.copies import PeerCopies, rows_of_shard
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import first_streams, nearest_first, per_copy_space
from taxfree_kernels.variant import Config, Space, resized
from taxfree_kernels.vendor import multiply_into, try_fp8

_ROWS_AT_ONCE = 1024


@triton.jit(do_not_specialize=["rank", "row", "row_end", "m", "shard_rows"])
def _await(
    control_ptr, heap_bases, rank, m, shard_rows, row, row_end,
    GROUP: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Wait for rows [row, row_end)."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    wait_for_rows(row, row_end, 0, 0, peers, m, shard_rows, GROUP, GATHER)


_Message = tuple[int, tuple[torch.Tensor, ...]]  # a peer, and the place of the shard in its memory


@dataclass(frozen=True)
class _Calls:
    """The work of calls of one size.

    Args:
        own_rows: this rank's rows of the output.
        parts: parts of the peers' rows: the messages to send before it, the rows, and the place
            where they arrive, in fp8 with that of their scales.
        last_messages: messages to send after the last part.
        await_args: arguments of the waiting kernel before the rows.
    """

    own_rows: slice
    parts: list[tuple[list[_Message], slice, tuple[torch.Tensor, ...]]]
    last_messages: list[_Message]
    await_args: tuple[Any, ...]


class OverlapPlan(SeveralWeightsPlan):
    """Copies on side streams, each with a signal; per part of the rows a wait and a matmul."""

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        self._problem, self._fabric = problem, fabric
        self._shards_per_wait = config["SHARDS_PER_WAIT"]
        try_fp8(problem, fabric.device, problem.bias)
        dtype = getattr(torch, problem.factor_dtype(fabric.hardware.architecture))
        self._inbox, _ = fabric.pool.slots(problem.inbox_elements, dtype)
        self._copies = PeerCopies(fabric, config["STREAMS"])
        group = Group(problem.world_size, fabric.backend)
        self._await = Kernel(
            _await,
            1,
            {"GROUP": group, "GATHER": Gather(problem.gather_dim, CHUNKS=1)},
            compile_options(fabric.backend, {"num_warps": 1}),
        )
        self._sized = fabric.workspace.by_size(self._of_size)
        self.launches = 3 + 2 * (problem.world_size - 1) + 2 * len(self._sized[problem.m].parts)

    def _of_size(self, m: int) -> _Calls:
        problem, fabric = resized(self._problem, m=m), self._fabric
        world, rank = problem.world_size, fabric.rank
        inbox = self._inboxes(problem)
        own_rows = rows_of_shard(problem, rank)
        # in the order in which peers need the shard; each rank begins with another peer
        peers = [(rank - distance) % world for distance in range(1, world)]
        messages = [
            (peer, tuple(fabric.peer_view(each, peer)[own_rows] for each in inbox))
            for peer in peers
        ]
        parts, begin = [], 0
        owners = [(rank + distance) % world for distance in range(1, world)]
        for rows, end in self._parts(problem, owners):
            parts.append((messages[begin:end], rows, tuple(each[rows] for each in inbox)))
            begin = end
        await_args = (fabric.pool.control, fabric.heap_bases, rank, m, problem.shard_rows)
        return _Calls(own_rows, parts, messages[begin:], await_args)

    def _inboxes(self, problem: AllGatherMatmul) -> tuple[torch.Tensor, ...]:
        """A in the inbox, and behind it the scales that travel with its rows."""
        rows = self._inbox[: problem.gathered_elements].view(-1, problem.k)
        if not problem.scale_columns:
            return (rows,)
        count = problem.world_size * problem.shard_rows * problem.scale_columns
        scales = self._inbox[problem.inbox_elements - 4 * count : problem.inbox_elements]
        return rows, scales.view(torch.float32).view(-1, problem.scale_columns)

    def _parts(self, problem: AllGatherMatmul, owners: list[int]) -> list[tuple[slice, int]]:
        """The rows of each matmul, of some owners in turn, and the owners before its end.

        A part that wraps around to row 0 becomes two; shards without rows do not form parts.
        """
        parts: list[tuple[slice, int]] = []
        for number, owner in enumerate(owners):
            rows = rows_of_shard(problem, owner)
            if number % self._shards_per_wait and parts and parts[-1][0].stop == rows.start:
                parts[-1] = slice(parts[-1][0].start, rows.stop), number + 1
            elif rows.start < rows.stop:
                parts.append((rows, number + 1))
        return parts

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._await, *self._copies.kernels)

    def run(self, *tensors: Any) -> torch.Tensor:
        a, weight, bias, *scales, out = tensors
        self._multiply(a, [(out, weight, bias)], scales)
        return out

    def run_several(
        self, a: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, returns_a: bool
    ) -> list[torch.Tensor]:
        m = a.shape[0] * self._problem.world_size
        outs = [a.new_empty(m, weight.shape[1]) for weight in weights]
        kept = [a.new_empty(m, a.shape[1])] if returns_a else []
        self._multiply(a, list(zip(outs, weights, biases, strict=True)), (), *kept)
        return outs + kept

    def _multiply(
        self, a: torch.Tensor, products: Sequence[Any], scales: Any, *kept: torch.Tensor
    ) -> None:
        """Gather A and multiply it.

        Args:
            products: an output, a weight, and a bias or None of each matmul.
            kept: where A is wanted.
        """
        calls, own = self._sized[len(products[0][0])], (a, *scales[:1])

        def multiply(rows: slice, factor: torch.Tensor, *of_both: torch.Tensor) -> None:
            is_fast = self._problem.fast_accumulation
            for out, weight, bias in products:
                multiply_into(out[rows], factor, weight, bias, *of_both, is_fast=is_fast)
            for whole in kept:
                whole[rows].copy_(factor)

        self._copies.begin()
        multiply(calls.own_rows, a, *scales)
        for messages, rows, arrived in calls.parts:
            self._send(messages, own)
            self._copies.join()
            self._await(*calls.await_args, rows.start, rows.stop)
            # with a scale of all of A
            multiply(rows, *arrived, *own[len(arrived) :], *scales[1:])
        self._send(calls.last_messages, own)
        self._copies.join()
        self._copies.finish(*(out for out, *_ in products), *kept)

    def _send(self, messages: list[_Message], own: tuple[torch.Tensor, ...]) -> None:
        for peer, targets in messages:
            self._copies.send(targets, own, peer)


class Overlap(SeveralWeights):
    """Copy engines gather during the vendor's matmul."""

    plan_class = OverlapPlan
    copies = True

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if problem.gather_dim == 1:
            return "parts of K would be rounded before they are added"
        if not problem.rows_of(problem.world_size - 1):
            # A wait for the last rows also waits for empty shards, and so for ranks that signal
            # those only after waits of their own: a deadlock.
            return "a shard without rows"
        return spaces.unsupported_reason(problem)

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        counts = per_copy_space(problem)
        return {"SHARDS_PER_WAIT": counts, "STREAMS": counts}

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        # the vendor's matmul is slow with fewer rows at once
        shards = nearest_first(per_copy_space(problem), -(-_ROWS_AT_ONCE // problem.shard_rows))
        streams = first_streams(problem)
        pairs = [(shards[0], count) for count in streams]
        if len(streams) > 1:
            pairs.insert(-1, (shards[1], streams[0]))
        return [{"SHARDS_PER_WAIT": count, "STREAMS": most} for count, most in pairs]


VARIANT = Overlap()
