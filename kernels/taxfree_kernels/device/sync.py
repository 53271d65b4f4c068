"""Synchronisation of all fused kernels: signals between ranks, arrivals within a rank.

Every kernel of a call works in one *generation*: an int64 that starts at 1, only grows, and lives
in the pool's control block in device memory, so that a captured graph can be replayed. A signal
word holds the generation of the last message on its (channel, source); it is never cleared. It has
64 bits, because a 32-bit word left unused for 2^31 calls would appear to be from the future.

Messages without signals are in :mod:`taxfree_kernels.device.packets`. Raw atomics and polls appear
only in these two modules. ``docs/memory-model.md`` gives the reason for each line: the drain of
stores, the barrier, and a form of poll that compilers keep.
Assembly checks verify the compiled form, the happens-before checker verifies the protocol.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._semantic import GluonSemantic

from taxfree_kernels.device.peers import (
    ABORT,
    GENERATION,
    LIMIT,
    LOG,
    NO_CHANNEL,
    ONE_CALL,
    PEER_ABORTED,
    REPORTED,
    SIGNALS,
    STATUS,
    TIMED_OUT,
    Peers,
    translate,
)

_F = TypeVar("_F", bound=Callable[..., object])


def interpreted_only(function: _F) -> _F:
    """Marks a plain Python function, so that a jitted one may name it in a branch not compiled."""
    function.__triton_builtin__ = True  # type: ignore[attr-defined]
    return function


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
    if TIMELINE != "":
        note(control_ptr, STARTED, 0, None)
    done = tl.atomic_add(control_ptr + GENERATION, 0, sem="relaxed", scope="gpu")
    return done // ONE_CALL + 1


@triton.jit
def running_slot(memory, rank):
    """The peers of the running call, and its slot of two."""
    generation = running_generation(memory.control_ptr)
    peers = Peers(memory.control_ptr, memory.heap_bases, rank, generation)
    slot_ptr = tl.multiple_of(memory.inbox_ptr + (generation % 2) * memory.stride_slot, 16)
    return peers, slot_ptr


@triton.jit
def leave(control_ptr, generations=1):
    """Count this program out of the call; when all have left, the next generation begins.

    Every program of a call's last kernel leaves exactly once, after its last use of the
    generation. The result of the atomic is not used, so nothing waits for it.

    Args:
        generations: the number that the call takes, the same on all ranks; more than one only in
            a kernel of one program.
    """
    if TIMELINE != "":
        note(control_ptr, DONE, 0, None)
    count_out(control_ptr + GENERATION, generations)


@triton.jit
def count_out(count_ptr, calls):
    """Add `calls` times ONE_CALL to a word, all programs of the launch together."""
    others = tl.num_programs(0) - 1
    share = tl.where(tl.program_id(0) == 0, calls * ONE_CALL - others, 1)
    tl.atomic_add(count_ptr, share.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def _poll(words, want, mask, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """The minimum of `words` - `want`: negative while any word is behind."""
    lead = tl.atomic_add(words, for_each(words, 0), sem=SEM, scope=SCOPE, mask=mask) - want
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
    if TIMELINE != "":
        note(peers.control_ptr, SENT, peer, mask)


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
    if TIMELINE != "":
        note(peers.control_ptr, WAIT_BEGAN, source, mask)
    words = peers.control_ptr + SIGNALS + channel * GROUP.WORLD + source
    limit = tl.load(peers.control_ptr + LIMIT)
    # An acquire per poll is free on NVIDIA; on AMD it would invalidate the caches each time.
    POLL: tl.constexpr = "relaxed" if GROUP.BACKEND == "hip" else "acquire"
    lead = _poll(words, peers.generation, mask, POLL, "sys")
    if lead < 0:
        if is_aborted(peers.control_ptr):
            limit = tl.cast(0, tl.int64)
    ticks = tl.cast(0, tl.int64)
    if GROUP.BACKEND == "interpreter":
        start = tl.full((), yield_and_clock_us(), tl.int64)  # uptime exceeds int32
    while (lead < 0) & (ticks < limit):
        lead = _poll(words, peers.generation, mask, POLL, "sys")
        if GROUP.BACKEND == "interpreter":
            ticks = tl.full((), yield_and_clock_us() - start, tl.int64)
        else:
            ticks += 1
    if POLL == "relaxed":  # some compilers delete an acquire whose result is not used
        lead = _poll(words, peers.generation, mask, "acquire", "sys")
    arrived = lead >= 0
    if lead < 0:
        _abort_on_signals(peers, words, channel, source, mask, GROUP)
    tl.debug_barrier()
    if TIMELINE != "":
        note(peers.control_ptr, WAIT_ENDED, source, mask)
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


@triton.jit
def count_units(counter_ptr, units, GROUP: tl.constexpr):
    """Add to a counter of this rank, behind all stores of this program so far."""
    drain_stores(GROUP)
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, units, sem="release", scope="gpu")


@triton.jit
def wait_for_units(counter_ptr, units, peers, GROUP: tl.constexpr, mask=None):
    """Wait until a counter has reached `units`; then the stores of who counted are visible.

    The programs that are waited for may themselves wait for peers. So the bound is half as long
    again, and it is their wait that is reported.

    Args:
        counter_ptr: a scalar, or a block of counters, which are all waited for in one poll.
        mask: counters that are waited for; for blocks.

    Returns:
        Whether it has; see :func:`wait`.
    """
    POLL: tl.constexpr = "relaxed" if GROUP.BACKEND == "hip" else "acquire"  # as in `wait`
    # At `gpu` scope Triton polls by atomics of buffers, which before 3.9 release, not acquire.
    SCOPE: tl.constexpr = "sys" if GROUP.BACKEND == "hip" else "gpu"
    limit = tl.load(peers.control_ptr + LIMIT)
    limit += limit // 2
    lead = _poll(counter_ptr, units, mask, POLL, SCOPE)
    ticks = tl.cast(0, tl.int64)
    if GROUP.BACKEND == "interpreter":
        start = tl.full((), yield_and_clock_us(), tl.int64)
    while (lead < 0) & (ticks < limit):
        if is_aborted(peers.control_ptr):
            limit = tl.cast(0, tl.int64)
        lead = _poll(counter_ptr, units, mask, POLL, SCOPE)
        if GROUP.BACKEND == "interpreter":
            ticks = tl.full((), yield_and_clock_us() - start, tl.int64)
        else:
            ticks += 1
    if POLL == "relaxed":
        lead = _poll(counter_ptr, units, mask, "acquire", SCOPE)
    if lead < 0:
        none = tl.cast(0, tl.int64)
        abort(peers, NO_CHANNEL, none + peers.rank, peers.generation - 1, GROUP)
    tl.debug_barrier()
    return lead >= 0


@triton.jit
def signal_everybody(peers, channel, GROUP: tl.constexpr):
    """Signal all ranks, including this one, that this program's stores are complete."""
    lane = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))
    peer = lane % GROUP.WORLD
    signal(peers, channel, peer, GROUP, mask=lane == peer)


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
    if arrive(counters_ptr + chiplet, members, GROUP):
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
    return wait(peers, channel, source, GROUP, mask=needed)


# -- fences of one backend, which Triton does not emit itself -----------------------------------


@triton.jit
def drain_stores(GROUP: tl.constexpr):
    """Wait for this wave's stores; used before a barrier and a release."""
    # On CDNA only the wave that issues the release waits for its own stores at the fence; every
    # wave has to wait for its own before the barrier.
    if GROUP.BACKEND == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def before_tma_loads(GROUP: tl.constexpr):
    """Fence between a wait and TMA loads of the data that was waited for.

    The stores and the acquire belong to the generic proxy, TMA to the async proxy.
    """
    if GROUP.BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "fence.proxy.async.global;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


# -- programmatic dependent launch --------------------------------------------------------------
# On NVIDIA, the launch of a kernel, and whatever it does before it needs the results of the one
# before, overlap with that one's last programs. On other devices, and after an ordinary launch,
# these functions do nothing.


@triton.jit
def gdc_launch_dependents(GROUP: tl.constexpr):
    """Allow the next kernel to start once all programs of this one have called this."""
    if GROUP.BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def gdc_wait(GROUP: tl.constexpr):
    """Wait until the preceding kernel has ended and its stores are visible.

    Nothing that the preceding kernel stores may be loaded before this call.
    """
    if GROUP.BACKEND == "cuda" and _is_launched_early():
        tl.inline_asm_elementwise(
            "griddepcontrol.wait;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def _is_launched_early(_semantic: Any = None) -> Any:
    """Whether the kernel being compiled has `launch_pdl`; always true when interpreted."""
    return tl.constexpr(_semantic is None or _semantic.builder.options.launch_pdl)


_is_launched_early.__triton_builtin__ = True  # type: ignore[attr-defined]


# -- timeouts -----------------------------------------------------------------------------------
# A wait that exceeds its bound reports its source, and aborts every peer's pool.


@triton.jit
def is_aborted(control_ptr):
    """Whether this rank's pool is aborted; the results of its calls may then be garbage."""
    return tl.atomic_add(control_ptr + ABORT, 0, sem="relaxed", scope="sys") != 0


@triton.jit
def abort(peers, late_channel, late_source, seen, GROUP: tl.constexpr):
    """Report the wait, once per rank, and abort the pool of every peer.

    Args:
        late_channel, late_source: the missing signal; of several, the one furthest behind.
        seen: the generation in the signal word.
    """
    none = tl.cast(0, tl.int64)
    aborted = tl.atomic_xchg(peers.control_ptr + ABORT, 1 + late_source, sem="relaxed", scope="sys")
    lost = tl.where(aborted == 0, late_source, aborted - 1)
    if tl.atomic_xchg(peers.control_ptr + REPORTED, 1, sem="relaxed", scope="gpu") == 0:
        report = tl.cast(tl.load(peers.control_ptr + STATUS), tl.pointer_type(tl.int64))
        tl.store(report + 1, none + peers.rank)
        tl.store(report + 2, none + tl.program_id(0))
        tl.store(report + 3, none + late_channel)
        tl.store(report + 4, late_source)
        tl.store(report + 5, peers.generation)
        tl.store(report + 6, seen)
        tl.store(report + 7, lost)
        drain_stores(GROUP)
        tl.debug_barrier()
        code = none + tl.where(aborted == 0, TIMED_OUT, PEER_ABORTED)
        tl.atomic_xchg(report, code, sem="release", scope="sys")
        for step in range(1, GROUP.WORLD):
            peer = (peers.rank + step) % GROUP.WORLD
            abort_ptr = translate(peers.control_ptr + ABORT, peers, peer)
            tl.atomic_xchg(abort_ptr, 1 + lost, sem="relaxed", scope="sys")


# -- what device functions say differently in Triton and in Gluon, whose blocks have layouts ----
# In Triton these add nothing, so both kinds of kernels call the functions above.


def lanes(count: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """``tl.arange(0, count)``; in Gluon, in a layout of the warps that execute the call."""
    if not isinstance(_semantic, GluonSemantic):
        return tl.arange(0, count, _semantic=_semantic)
    warps = _semantic.num_warps(_generator)
    layout = gl.BlockedLayout([1], [32], [getattr(warps, "value", warps)], [0])
    return gl.arange(0, count, layout, _semantic=_semantic)


def for_each(block: Any, value: Any, _semantic: Any = None) -> Any:
    """`value`, a scalar, for each element of `block`; Gluon of Triton 3.6 does not broadcast it."""
    if not isinstance(_semantic, GluonSemantic) or not block.type.is_block():
        return value
    value = _semantic.to_tensor(value)
    return _semantic.splat(value, block.type.get_block_shapes(), block.type.layout)


lanes.__triton_builtin__ = True  # type: ignore[attr-defined]
for_each.__triton_builtin__ = True  # type: ignore[attr-defined]


# -- the device's clocks, and the program trace -------------------------------------------------
# Time is `%globaltimer` on NVIDIA, whose step depends on GPU and driver (32 ns to 1 us), the 100
# MHz counter of `s_memrealtime` on AMD, and the monotonic clock of the host when interpreted.
# Clocks of different GPUs are unrelated. The trace is [program, event, peer], int64 nanoseconds in
# device memory.

_AMD_TICK_NS = tl.constexpr(10)
#: The backend whose clock is read, or "" for off; like interpretation, fixed when kernels are
#: defined. When off, none of it is compiled, because every call of :func:`note` is guarded by it.
TIMELINE = tl.constexpr(os.environ.get("TAXFREE_TIMELINE", ""))
PEERS = tl.constexpr(16)  # maximum number of ranks
STARTED = tl.constexpr(0)
SENT = tl.constexpr(1)  # the peer's data has been stored and, if there is a signal, signalled
WAIT_BEGAN = tl.constexpr(2)
WAIT_ENDED = tl.constexpr(3)
DONE = tl.constexpr(4)
EVENTS = tl.constexpr(5)


@interpreted_only
def _host_clock_ns() -> int:
    return time.perf_counter_ns()


@triton.jit
def _counter(PTX: tl.constexpr, CDNA: tl.constexpr, BACKEND: tl.constexpr):
    """What an instruction reads, int64; nanoseconds of the host when interpreted."""
    if BACKEND == "cuda":
        now = tl.inline_asm_elementwise(PTX, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    elif BACKEND == "hip":
        now = tl.inline_asm_elementwise(CDNA, "=s", [], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = tl.full((), _host_clock_ns(), tl.int64)
    return now


@triton.jit
def clock_ns(BACKEND: tl.constexpr):
    """This device's time in nanoseconds, int64."""
    now = _counter("mov.u64 $0, %globaltimer;", "s_memrealtime $0\n\ts_waitcnt lgkmcnt(0)", BACKEND)
    if BACKEND == "hip":
        now = _AMD_TICK_NS * now
    return now


@triton.jit
def cycles(BACKEND: tl.constexpr):
    """Cycles of this program's compute unit, int64; nanoseconds when interpreted."""
    return _counter("mov.u64 $0, %clock64;", "s_memtime $0\n\ts_waitcnt lgkmcnt(0)", BACKEND)


@triton.jit
def note(control_ptr, event, peer, mask):
    """Log when this program reached an event; for one peer, only the last time is kept."""
    log = tl.load(control_ptr + LOG)
    if log != 0:
        index = (tl.program_id(0) * EVENTS + event) * PEERS + peer
        times = tl.cast(log, tl.pointer_type(tl.int64))
        tl.store(times + index, clock_ns(TIMELINE), mask=mask)
