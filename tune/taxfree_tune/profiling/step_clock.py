"""Kernels that use the device's clock: log it between launches, compare clocks."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Peers
from taxfree_kernels.device.sync import clock_ns


@triton.jit(do_not_specialize=["index"])
def read_clock(log_ptr, index, BACKEND: tl.constexpr):
    """Store the time at `index` of an int64 log; one program."""
    tl.store(log_ptr + index, clock_ns(BACKEND))


@triton.jit
def empty(log_ptr):
    """An empty kernel, to measure the cost of a launch."""


@triton.jit(do_not_specialize=["reads"])
def clock_step(log_ptr, reads, BACKEND: tl.constexpr):
    """Store the smallest step of the clock between two of `reads` readings, int64 [1]."""
    least = tl.full((), 1 << 40, tl.int64)
    last = clock_ns(BACKEND)
    for _ in range(reads):
        now = clock_ns(BACKEND)
        moved = now - last
        least = tl.where((moved > 0) & (moved < least), moved, least)
        last = now
    tl.store(log_ptr, least)


@triton.jit(do_not_specialize=["rank", "peer", "first_round", "rounds"])
def exchange_clocks(
    log_ptr, control_ptr, heap_bases, rank, peer, first_round, rounds, GROUP: tl.constexpr
):
    """Ping-pong with `peer` in which both log their clocks; the lower rank begins.

    The lower rank's two readings enclose one reading of the higher rank: the offset between their
    clocks is that reading minus the midpoint of the two, to within half the round trip.

    Args:
        log_ptr: int64 [rounds, 2]: lower rank: the times before the signal is sent and after the
            answer came; higher rank: one time in between, twice.
        first_round: generation of the first signal; later rounds count up from there.
    """
    BACKEND: tl.constexpr = GROUP.BACKEND
    first = tl.zeros((), tl.int64) + first_round
    generation = first
    arrived = rounds > 0
    while (generation < first + rounds) & arrived:
        peers = Peers(control_ptr, heap_bases, rank, generation)
        before = clock_ns(BACKEND)
        if rank < peer:
            sync.signal(peers, 0, peer, GROUP)
        arrived = sync.wait(peers, 0, peer, GROUP)
        after = clock_ns(BACKEND)
        if rank > peer:
            before = after
            sync.signal(peers, 0, peer, GROUP)
        tl.store(log_ptr + 2 * (generation - first), before)
        tl.store(log_ptr + 2 * (generation - first) + 1, after)
        generation += 1
