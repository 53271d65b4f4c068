"""Copy engines that move data between ranks while the compute units multiply.

For plans that use the vendor's matmul with many rows: a copy takes microseconds to start, but uses
no compute unit. Copies run on side streams. A kernel after each copy signals the receiver.

Protocol. The addresses of copies are fixed when a graph is captured, so copies cannot alternate
between the two payload slots: all go to the first slot. It is unused before and after the call:

- Before: a kernel on a copy stream, ordered after all earlier work on the caller's stream, signals
  all ranks that this one has entered the call, and waits for the same signal from all peers. Copies
  follow it, so no rank still reads an earlier payload. The proof for two slots requires that all
  ranks exchange signals in each call; this kernel does so.
- After: the call takes one or two generations, so that the next one is odd and uses the second
  slot. The call after that finds, as always, that all ranks have left this call.

A captured graph, or a device with few queues, may serialise work that no events order, in any
order. Therefore an event orders each wait for peers' copies of a part after this rank's copies of
that part, and parts follow one another. Consider the rank that waits for the earliest part: its
peers have copied that part, or have no earlier wait left to block them. This holds if each part has
rows of each shard that is waited for, or if there is one wait, behind all copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.device.sync import is_aborted, signal_everybody, wait_for_everybody
from taxfree_kernels.launch import Kernel, compile_options, copy_between_ranks, is_compiling
from taxfree_kernels.variant import Sharded

if TYPE_CHECKING:
    import torch

    from taxfree_kernels.fabric.base import Fabric, SideStream


@triton.jit(do_not_specialize=["rank", "channel"])
def _meet(control_ptr, heap_bases, rank, channel, GROUP: tl.constexpr):
    """Barrier: signal all ranks that this stream is here, and wait for all peers."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    signal_everybody(peers, channel, GROUP)
    wait_for_everybody(peers, channel, GROUP, BUT_SELF=True)


@triton.jit(do_not_specialize=["rank", "channel", "peer"])
def _announce(control_ptr, heap_bases, rank, channel, peer, GROUP: tl.constexpr):
    """Signal a peer that the copies before this kernel are complete."""
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    sync.signal(peers, channel, peer, GROUP)


@triton.jit
def _spoil(control_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    """Fill an output with NaN if a wait failed."""
    if is_aborted(control_ptr):
        for start in range(0, elements, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + offsets, float("nan"), mask=offsets < elements)


@triton.jit
def _finish(control_ptr, out_ptr, elements, BLOCK: tl.constexpr):
    """End the call; fill the output with NaN if a wait failed.

    It has one program: with several, the generation would change while they leave.
    """
    _spoil(control_ptr, out_ptr, elements, BLOCK)
    generation = sync.running_generation(control_ptr)
    sync.leave(control_ptr, 1 + generation % 2)  # the next generation is odd


#: channels: of signals that a copy is complete, and of the entry barrier
COPIED, _ENTERED = 0, 1


class PeerCopies:
    """Copies into peers' memory, on side streams, and the call that consists of them.

    Args:
        fabric: whose pool the plan uses.
        streams: number of streams; copies use them round-robin.
    """

    def __init__(self, fabric: Fabric, streams: int) -> None:
        self._streams = [fabric.side_stream() for _ in range(streams)]
        self._sent = 0
        self._ends = (fabric.pool.control, fabric.heap_bases, fabric.rank)
        group = {"GROUP": Group(fabric.world_size, fabric.backend)}
        options = compile_options(fabric.backend, {"num_warps": 1})  # fits beside a matmul
        self._meet = Kernel(_meet, 1, group, options)
        self._announce = Kernel(_announce, 1, group, options)
        self._spoil = Kernel(_spoil, 1, {"BLOCK": 1024}, options)
        self._finish = Kernel(_finish, 1, {"BLOCK": 1024}, options)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of any call."""
        return self._meet, self._announce, self._finish

    def begin(self) -> None:
        """Enter the call; copies start after all ranks have entered."""
        first, *others = self._streams
        self._sent = 0
        with first.forked():
            self._meet(*self._ends, _ENTERED)
            for stream in others:
                stream.fork()

    def follow(self) -> None:
        """Make the next copy, and what its stream does then, wait for the current stream's work."""
        self._stream_of_next().fork()

    def send(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], peer: int
    ) -> None:
        """Copy to each target on the next stream, then signal the peer."""
        with self._stream_of_next().entered():
            for target, source in zip(targets, sources, strict=False):
                copy_between_ranks(target, source)
            self._announce(*self._ends, COPIED, peer)
        self._sent += 1

    def _stream_of_next(self) -> SideStream:
        return self._streams[self._sent % len(self._streams)]

    def join(self) -> None:
        """Make the current stream wait for all copies."""
        for stream in self._streams:
            stream.join()

    def finish(self, *outs: torch.Tensor) -> None:
        """End the call on the caller's stream, which has joined; if a wait failed, with NaN."""
        *others, last = outs
        for out in outs if is_compiling() else others:  # what is compiled may be called with more
            self._spoil(self._ends[0], out, out.numel())
        self._finish(self._ends[0], last, last.numel())


def rows_of_shard(problem: Sharded, owner: int) -> slice:
    """The rows of a rank's shard, counted in all ranks' shards concatenated; maybe none."""
    first = owner * problem.shard_rows
    return slice(first, first + problem.rows_of(owner))
