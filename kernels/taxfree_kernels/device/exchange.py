"""Device functions for signals among all ranks of a group."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync


@triton.jit
def signal_everybody(peers, channel, GROUP: tl.constexpr):
    """Signal all ranks, including this one, that this program's stores are complete."""
    lane = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))
    peer = lane % GROUP.WORLD
    sync.signal(peers, channel, peer, GROUP, mask=lane == peer)


@triton.jit
def wait_for_everybody(peers, channel, GROUP: tl.constexpr, BUT_SELF: tl.constexpr = False):
    """Wait until all ranks (BUT_SELF: all peers) have signalled; return whether they have."""
    return wait_for_channels(peers, channel, channel + 1, GROUP, 1, BUT_SELF)


@triton.jit
def wait_for_channels(
    peers, begin, end, GROUP: tl.constexpr, MOST: tl.constexpr, BUT_SELF: tl.constexpr = False
):
    """Like :func:`wait_for_everybody`, on channels [begin, end), at most MOST, in one poll."""
    lane = tl.arange(0, triton.next_power_of_2(GROUP.WORLD * MOST))
    source, channel = lane % GROUP.WORLD, begin + lane // GROUP.WORLD
    needed = channel < end
    if BUT_SELF:
        needed = needed & (source != peers.rank)
    return sync.wait(peers, tl.where(needed, channel, begin), source, GROUP, mask=needed)
