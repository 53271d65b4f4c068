"""Device functions for signals among all ranks of a group."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync


@triton.jit
def signal_everybody(
    control_ptr, channel, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Tell all ranks, this one included, that what this program has stored is complete."""
    lane = tl.arange(0, triton.next_power_of_2(WORLD))
    peer = lane % WORLD
    sync.signal(
        control_ptr, channel, peer, generation, heap_bases, rank, mask=lane == peer,
        WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip


@triton.jit
def wait_for_everybody(
    control_ptr, channel, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks, this one included, have signalled; returns whether they did."""
    lane = tl.arange(0, triton.next_power_of_2(WORLD))
    source = lane % WORLD
    return sync.wait(
        control_ptr, channel, source, generation, heap_bases, rank, mask=lane == source,
        WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip


@triton.jit
def wait_for_peers(
    control_ptr, channel, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Wait until all other ranks have signalled on `channel`; returns whether they did."""
    lane = tl.arange(0, triton.next_power_of_2(WORLD))
    source = lane % WORLD
    return sync.wait(
        control_ptr, channel, source, generation, heap_bases, rank,
        mask=(lane == source) & (source != rank), WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip
