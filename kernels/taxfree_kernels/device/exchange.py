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
def signal_by_chiplet(
    program, programs, counters_ptr, peers, GROUP: tl.constexpr, XCDS: tl.constexpr
):
    """Count this program's stores in; the last program of its chiplet signals all ranks for all.

    So there is one release at system scope for each chiplet, instead of one for each program. The
    channel is the chiplet of the first `programs` ids: `program` % XCDS. Where the hardware assigns
    programs in another way, the signal is as right, because arrivals order stores of all chiplets.

    Args:
        program: its id, or its number in a launch whose first programs are these.
        counters_ptr: int32 [XCDS], 0 between launches.
    """
    chiplet = program % XCDS
    members = (programs + XCDS - 1 - chiplet) // XCDS
    if sync.arrive(counters_ptr + chiplet, members, GROUP):
        signal_everybody(peers, chiplet, GROUP)


@triton.jit
def wait_for_everybody(peers, channel, GROUP: tl.constexpr, BUT_SELF: tl.constexpr = False):
    """Wait until all ranks (BUT_SELF: all peers) have signalled; return whether they have."""
    return wait_for_channels(peers, channel, channel + 1, GROUP, 1, BUT_SELF)


@triton.jit
def wait_for_channels(
    peers, begin, end, GROUP: tl.constexpr, MOST: tl.constexpr, BUT_SELF: tl.constexpr = False,
    XCDS: tl.constexpr = 0,
):  # fmt: skip
    """Like :func:`wait_for_everybody`, on channels [begin, end), at most MOST, in one poll.

    If XCDS, these are numbers of programs that signal by :func:`signal_by_chiplet`.
    """
    lane = tl.arange(0, triton.next_power_of_2(GROUP.WORLD * MOST))
    source, channel = lane % GROUP.WORLD, begin + lane // GROUP.WORLD
    needed = channel < end
    if BUT_SELF:
        needed = needed & (source != peers.rank)
    channel = tl.where(needed, channel, begin)
    if XCDS:
        channel = channel % XCDS
    return sync.wait(peers, channel, source, GROUP, mask=needed)
