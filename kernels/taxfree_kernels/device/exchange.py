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
    WORLD: tl.constexpr, BACKEND: tl.constexpr, BUT_SELF: tl.constexpr = False,
):  # fmt: skip
    """Wait until all ranks have signalled; BUT_SELF: all but this one. Returns whether they did."""
    return wait_for_channels(
        control_ptr, channel, channel + 1, generation, heap_bases, rank, WORLD, BACKEND, 1, BUT_SELF
    )


@triton.jit
def wait_for_channels(
    control_ptr, begin, end, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, MOST: tl.constexpr, BUT_SELF: tl.constexpr = False,
):  # fmt: skip
    """As :func:`wait_for_everybody`, on channels [begin, end), at most MOST, in one poll."""
    lane = tl.arange(0, triton.next_power_of_2(WORLD * MOST))
    source, channel = lane % WORLD, begin + lane // WORLD
    needed = channel < end
    if BUT_SELF:
        needed = needed & (source != rank)
    return sync.wait(
        control_ptr, tl.where(needed, channel, begin), source, generation, heap_bases, rank,
        mask=needed, WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip
