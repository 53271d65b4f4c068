"""Synchronisation of all fused kernels: signals between ranks, arrivals within a rank.

Every kernel of a call works in one *generation*: an int64 that starts at 1, only grows, and lives
in the pool's control block in device memory, so that a captured graph can be replayed. A signal
word holds the generation of the last message on its (channel, source); it is never cleared. It has
64 bits, because a 32-bit word left unused for 2^31 calls would appear to be from the future.

Messages without signals are in :mod:`taxfree_kernels.device.packets`. Raw atomics and polls appear
only in these two modules and in :mod:`taxfree_kernels.device.abort`. ``docs/memory-model.md`` gives
the reason for each line: the drain of stores, the barrier, and a form of poll that compilers keep.
Assembly checks verify the compiled form, the happens-before checker verifies the protocol.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from taxfree_kernels.device import trace
from taxfree_kernels.device.abort import abort, is_aborted
from taxfree_kernels.device.clock import interpreted_only
from taxfree_kernels.device.control import GENERATION, LIMIT, ONE_CALL, SIGNALS
from taxfree_kernels.device.dialects import for_each, lanes
from taxfree_kernels.device.fences import drain_stores
from taxfree_kernels.device.peers import translate


@interpreted_only
def yield_and_clock_us() -> int:
    """Yield the core, which other ranks may share; return the time in microseconds."""
    time.sleep(0)
    return time.monotonic_ns() // 1000


@triton.jit
def running_generation(control_ptr):
    """The generation of the running call.

    Constant until this program leaves: all the others together add less than ONE_CALL.
    """
    if trace.TIMELINE != "":
        trace.note(control_ptr, trace.STARTED, 0, None)
    done = tl.atomic_add(control_ptr + GENERATION, 0, sem="relaxed", scope="gpu")
    return done // ONE_CALL + 1


@triton.jit
def leave(control_ptr, generations=1):
    """Count this program out of the call; when all have left, the next generation begins.

    Every program of a call's last kernel leaves exactly once, after its last use of the
    generation. The result of the atomic is not used, so nothing waits for it.

    Args:
        generations: the number that the call takes, the same on all ranks; more than one only in
            a kernel of one program.
    """
    if trace.TIMELINE != "":
        trace.note(control_ptr, trace.DONE, 0, None)
    count_out(control_ptr + GENERATION, generations)


@triton.jit
def count_out(count_ptr, calls):
    """Add `calls` times ONE_CALL to a word, all programs of the launch together."""
    others = tl.num_programs(0) - 1
    share = tl.where(tl.program_id(0) == 0, calls * ONE_CALL - others, 1)
    tl.atomic_add(count_ptr, share.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def _poll(words, want, mask, SEM: tl.constexpr):
    """The minimum of `words` - `want`: negative while any word is behind."""
    lead = tl.atomic_add(words, for_each(words, 0), sem=SEM, scope="sys", mask=mask) - want
    if mask is not None:
        lead = tl.where(mask, lead, 0)
    if len(words.shape) > 0:
        lead = tl.min(lead, 0)
    return lead


@triton.jit
def signal(peers, channel, peer, GROUP: tl.constexpr, mask=None):
    """Signal `peer`, on `channel`, that all stores of this program so far are complete.

    Args:
        channel, peer: scalars, or blocks of one shape, which signal with one instruction.
        mask: lanes that signal; for blocks.
    """
    own_word = peers.control_ptr + SIGNALS + channel * GROUP.WORLD + peers.rank
    word = translate(own_word, peers, peer)
    drain_stores(GROUP)
    tl.debug_barrier()
    generation = for_each(word, peers.generation)
    tl.atomic_xchg(word, generation, sem="release", scope="sys", mask=mask)
    if trace.TIMELINE != "":
        trace.note(peers.control_ptr, trace.SENT, peer, mask)


@triton.jit
def wait(peers, channel, source, GROUP: tl.constexpr, mask=None):
    """Wait until `source` has signalled the generation on `channel`; then its stores are visible.

    Args:
        channel, source: scalars, or blocks of one shape, which are all waited for in one poll.
        mask: lanes that are waited for; for blocks.

    Returns:
        Whether the signal arrived. False after the timeout, or at once if the pool is aborted: the
        program must then write NaN, and still call :func:`leave`.
    """
    if trace.TIMELINE != "":
        trace.note(peers.control_ptr, trace.WAIT_BEGAN, source, mask)
    words = peers.control_ptr + SIGNALS + channel * GROUP.WORLD + source
    limit = tl.load(peers.control_ptr + LIMIT)
    # An acquire per poll is free on NVIDIA; on AMD it would invalidate the caches each time.
    POLL: tl.constexpr = "relaxed" if GROUP.BACKEND == "hip" else "acquire"
    lead = _poll(words, peers.generation, mask, POLL)
    if lead < 0:
        if is_aborted(peers.control_ptr):
            limit = tl.cast(0, tl.int64)
    ticks = tl.cast(0, tl.int64)
    if GROUP.BACKEND == "interpreter":
        start = tl.full((), yield_and_clock_us(), tl.int64)  # uptime exceeds int32
    while (lead < 0) & (ticks < limit):
        lead = _poll(words, peers.generation, mask, POLL)
        if GROUP.BACKEND == "interpreter":
            ticks = tl.full((), yield_and_clock_us() - start, tl.int64)
        else:
            ticks += 1
    if POLL == "relaxed":  # some compilers delete an acquire whose result is not used
        lead = _poll(words, peers.generation, mask, "acquire")
    arrived = lead >= 0
    if lead < 0:
        _abort_on_signals(peers, words, channel, source, mask, GROUP)
    tl.debug_barrier()
    if trace.TIMELINE != "":
        trace.note(peers.control_ptr, trace.WAIT_ENDED, source, mask)
    return arrived


@triton.jit
def _abort_on_signals(peers, words, channel, source, mask, GROUP: tl.constexpr):
    """Time out; report the signal that is furthest behind."""
    none = tl.cast(0, tl.int64)
    lead = tl.atomic_add(words, for_each(words, 0), sem="relaxed", scope="sys", mask=mask)
    lead -= peers.generation
    late_channel = none + channel
    late_source = none + source
    if len(words.shape) > 0:
        if mask is not None:
            lead = tl.where(mask, lead, 1)
        lane = lanes(words.shape[0])
        latest = tl.min(tl.where(lead == tl.min(lead, 0), lane, words.shape[0]), 0)
        late_channel = tl.max(tl.where(lane == latest, late_channel, 0), 0)
        late_source = tl.max(tl.where(lane == latest, late_source, 0), 0)
        lead = tl.min(lead, 0)
    abort(peers, late_channel, late_source, peers.generation + lead, GROUP)


@triton.jit
def arrive(counter_ptr, programs, GROUP: tl.constexpr):
    """Count this program in; true in the last of `programs`, which then sees all their stores.

    The last one leaves the counter at 0 for the next launch.
    """
    drain_stores(GROUP)
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = before == programs - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    return is_last


@triton.jit
def ticket(counter_ptr):
    """A ticket: the number of programs that took one before this program."""
    return tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
