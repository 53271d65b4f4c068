"""Relates the ranks' clocks to that of rank 0, by ping-pong before and after a measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from taxfree._runtime.collectives import vote
from taxfree_kernels.device.peers import Group
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_tune.profiling import step_clock
from taxfree_tune.taxes import Alignment

_ROUNDS = 100  # of a comparison of clocks
_CLOCK_READS = 2000


@dataclass(frozen=True)
class ClockComparison:
    """A rank's clock against that of rank 0.

    Args:
        at_ns: own clock then.
        offset_ns: own clock minus rank 0's.
        error_ns: half of the shortest round trip.
    """

    at_ns: int
    offset_ns: int
    error_ns: float


def compare_clocks(fabric: Fabric) -> ClockComparison:
    """Compare this rank's clock with that of rank 0; collective."""
    if not fabric.has_graphs:  # all ranks read the clock of one machine
        return ClockComparison(time.perf_counter_ns(), 0, 0.0)
    return exchange_clocks(fabric, _ROUNDS)


def exchange_clocks(fabric: Fabric, rounds: int) -> ClockComparison:
    """Compare this rank's clock with that of rank 0 over `rounds` round trips; collective."""
    compared = compare_with_peers(fabric, rounds)
    log = torch.zeros(1, dtype=torch.int64, device=fabric.device)
    clock_kernel(fabric, step_clock.read_clock)(log, 0)
    return [ClockComparison(int(log), 0, 0.0), *compared][fabric.rank]


def compare_with_peers(fabric: Fabric, rounds: int) -> list[ClockComparison]:
    """Compare the clock of each rank but 0 with rank 0's, pair by pair; collective.

    It uses the pool's signals with generations of its own: the pool is reset before and after.

    Returns:
        By rank, from 1 on; the same on every rank.
    """
    fabric.pool.reset()
    log = torch.zeros(rounds, 2, dtype=torch.int64, device=fabric.device)
    play = clock_kernel(
        fabric, step_clock.exchange_clocks, GROUP=Group(fabric.world_size, fabric.backend)
    )
    comparisons = []
    for peer in range(1, fabric.world_size):
        fabric.barrier()
        if fabric.rank in (0, peer):
            other = peer if fabric.rank == 0 else 0
            play(log, fabric.pool.control, fabric.heap_bases, fabric.rank, other, 1, rounds)
        fabric.barrier()
        fabric.pool.check()
        both = vote(fabric.group, log.tolist())
        comparisons.append(compare(both[0], both[peer]))
    fabric.pool.reset()
    return comparisons


def compare(lower: Sequence[Sequence[int]], higher: Sequence[Sequence[int]]) -> ClockComparison:
    """Compare two clocks by their readings in a ping-pong.

    Args:
        lower: before the signal was sent and after the answer came, by round, in nanoseconds.
        higher: two readings between those, by round.
    """
    # The first rounds include compilation and wake-up: the shortest round is the most exact.
    before, after, between = min(
        ((sent, came, read) for (sent, came), (read, _) in zip(lower, higher, strict=True)),
        key=lambda round: round[1] - round[0],
    )
    return ClockComparison(between, between - (before + after) // 2, (after - before) / 2)


def aligned(
    by_rank: Sequence[tuple[ClockComparison, ClockComparison]], clock_step_ns: float
) -> Alignment:
    """How clocks relate, from a comparison before and one after, by rank."""
    comparisons = list(zip(*by_rank, strict=True))
    return Alignment(
        at_ns=np.array([[comparison.at_ns for comparison in row] for row in comparisons]),
        offset_ns=np.array([[comparison.offset_ns for comparison in row] for row in comparisons]),
        error_ns=np.array([[comparison.error_ns for comparison in row] for row in comparisons]).max(
            axis=0
        ),
        step_ns=clock_step_ns,
    )


def clock_step(fabric: Fabric) -> float:
    """Resolution of this device's clock, in nanoseconds."""
    log = torch.zeros(1, dtype=torch.int64, device=fabric.device)
    clock_kernel(fabric, step_clock.clock_step)(log, _CLOCK_READS if fabric.has_graphs else 10)
    return float(log.item())


def clock_kernel(fabric: Fabric, function: Any, **constants: Any) -> Kernel:
    """One of the kernels of `step_clock`, of one program."""
    options = {"num_warps": 1} if fabric.has_graphs else {}
    return Kernel(function, 1, constants or {"BACKEND": fabric.backend}, options)
