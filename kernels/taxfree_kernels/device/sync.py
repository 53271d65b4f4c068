"""Synchronisation primitives of all fused kernels: signals between ranks, arrivals within a rank.

Every kernel of a call works in one *generation*: an int64 that starts at 1, only grows, and lives
in the pool's control block in device memory, so that a captured graph can be replayed. A signal
word holds the generation of the last message on its (channel, source); it is never cleared. It has
64 bits, because a 32-bit word left unused for 2^31 calls would appear to be from the future.

Messages can also do without a signal: `send` and `receive` exchange words that themselves show
whether they have arrived. *LL packets* are 8 bytes, stored and loaded atomically: 4 bytes
of payload and the lower half of the generation. *Lamport words* are 4 bytes of payload: a word that
has not arrived is EMPTY, and the calls that use such words reset them to EMPTY, in turns.

Raw atomics, and polls of any kind, appear in this file only. The rules behind each line (which
store drain, which barrier, which form of poll survives which compiler) are in
``docs/memory-model.md``; the compiled form is checked in the assembly, the protocol by the
happens-before checker.
"""

from __future__ import annotations

import os
import time
from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device.clock import clock_ns, interpreted_only

# -- layout of a pool's control block, in int64 words -----------------------------------------
GENERATION = tl.constexpr(0)  # of the last finished call, in units of ONE_CALL
LIMIT = tl.constexpr(2)  # bound of a wait, in ticks
ABORT = tl.constexpr(3)  # 1 + the rank that was lost; written by peers too; 0 while all is well
REPORTED = tl.constexpr(4)  # not 0: one program of this rank has written the report
STATUS = tl.constexpr(5)  # address of the report, in host memory
LOG = tl.constexpr(6)  # address of the timeline; 0 for none
TURN = tl.constexpr(7)  # calls with Lamport words that have finished, in units of ONE_CALL
USED = tl.constexpr(8)  # [2]: Lamport words of a slot used by the last two such calls, by turn % 2
SIGNALS = tl.constexpr(16)  # signal words [channel, source]

#: What the programs of one call add to GENERATION in total; larger than any grid.
ONE_CALL = tl.constexpr(1 << 24)

#: A Lamport word that has not arrived. As one 32-bit or two 16-bit floats it is NaN.
EMPTY = tl.constexpr(-1)
#: Sent in place of a payload that equals EMPTY; NaN as well.
_OTHER_NAN = tl.constexpr(0x7FFFFFFF)
_EMPTIED = tl.constexpr(4096)  # words at a time: at least 16 bytes of each thread

# -- layout of a timeout report, in int64 words -----------------------------------------------
REPORT_WORDS = 8  # code, rank, program, channel, source, wanted, seen, lost
TIMED_OUT = tl.constexpr(1)
PEER_ABORTED = tl.constexpr(2)
NO_CHANNEL = tl.constexpr(-1)  # in the place of a channel: waited for words

# -- the timeline, [program, event, peer] in int64 nanoseconds --------------------------------
#: The backend whose clock is read, or "" for off; like interpretation, fixed when kernels are
#: defined. When off, none of it is compiled.
TIMELINE = tl.constexpr(os.environ.get("TAXFREE_TIMELINE", ""))
PEERS = tl.constexpr(16)  # maximum number of ranks
STARTED = tl.constexpr(0)
SENT = tl.constexpr(1)  # the peer's data has been stored and, if there is a signal, signalled
WAIT_BEGAN = tl.constexpr(2)
WAIT_ENDED = tl.constexpr(3)
DONE = tl.constexpr(4)
EVENTS = tl.constexpr(5)


@interpreted_only
def _yield_and_clock_us() -> int:
    """Give the core to the other ranks, which may share it; then the time in microseconds."""
    time.sleep(0)
    return time.monotonic_ns() // 1000


@triton.jit
def _note(control_ptr, event, peer, mask):
    """Log when this program reached an event; for one peer, only the last time is kept."""
    log = tl.load(control_ptr + LOG)
    if log != 0:
        at = (tl.program_id(0) * EVENTS + event) * PEERS + peer
        times = tl.cast(log, tl.pointer_type(tl.int64))
        tl.store(times + at, clock_ns(TIMELINE), mask=mask)


@triton.jit
def translate(ptr, heap_bases, rank, peer):
    """The address at which this rank sees `peer`'s copy of the symmetric object at `ptr`.

    `ptr` and `peer` are scalars or blocks. The result keeps the known alignment of `ptr`: arenas
    are page-aligned, and the hint is placed on the shift, because a hint on the result of a call
    is lost when the call is inlined.
    """
    shift = tl.load(heap_bases + peer) - tl.load(heap_bases + rank)
    shift = tl.multiple_of(shift, 256)
    return tl.cast(tl.cast(ptr, tl.pointer_type(tl.int8)) + shift, ptr.dtype)


@triton.jit
def _drain_stores(BACKEND: tl.constexpr):
    # On CDNA only the wave that issues the release waits for its own stores at the fence; every
    # wave has to wait for its own before the barrier.
    if BACKEND == "hip":
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, 0",
            "=v",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _poll(words, want, mask, SEM: tl.constexpr):
    """The least of `words` minus `want`: negative while any of them is behind."""
    lead = tl.atomic_add(words, 0, sem=SEM, scope="sys", mask=mask) - want
    if mask is not None:
        lead = tl.where(mask, lead, 0)
    if len(words.shape) > 0:
        lead = tl.min(lead, 0)
    return lead


@triton.jit
def signal(
    control_ptr, channel, peer, generation, heap_bases, rank, mask=None,
    WORLD: tl.constexpr = 1, BACKEND: tl.constexpr = "interpreter",
):  # fmt: skip
    """Tell `peer` that all this program has stored so far is complete, on `channel`.

    Args:
        channel, peer: scalars, or blocks of one shape to signal several peers with one instruction.
        generation: of the running call.
        mask: lanes that signal; for blocks.
    """
    word = translate(control_ptr + SIGNALS + channel * WORLD + rank, heap_bases, rank, peer)
    _drain_stores(BACKEND)
    tl.debug_barrier()
    tl.atomic_xchg(word, generation, sem="release", scope="sys", mask=mask)
    if TIMELINE != "":
        _note(control_ptr, SENT, peer, mask)


@triton.jit
def wait(
    control_ptr, channel, source, generation, heap_bases, rank, mask=None,
    WORLD: tl.constexpr = 1, BACKEND: tl.constexpr = "interpreter",
):  # fmt: skip
    """Wait until `source` has signalled `generation` on `channel`; then its stores are visible.

    Args:
        channel, source: scalars, or blocks of one shape to wait for all of them in one poll.
        mask: lanes that are waited for; for blocks.

    Returns:
        Whether it came. False after the timeout, or at once when this rank or a peer has already
        given up: the program then continues with garbage, must still count itself out, and
        writes NaN.
    """
    if TIMELINE != "":
        _note(control_ptr, WAIT_BEGAN, source, mask)
    words = control_ptr + SIGNALS + channel * WORLD + source
    limit = tl.load(control_ptr + LIMIT)
    # An acquire per poll is free on NVIDIA; on AMD it would invalidate the caches each time.
    POLL: tl.constexpr = "relaxed" if BACKEND == "hip" else "acquire"
    lead = _poll(words, generation, mask, POLL)
    if lead < 0:
        if is_aborted(control_ptr):
            limit = tl.zeros((), tl.int64)
    ticks = tl.zeros((), tl.int64)
    if BACKEND == "interpreter":
        start = tl.full((), _yield_and_clock_us(), tl.int64)  # uptime exceeds int32
    while (lead < 0) & (ticks < limit):
        lead = _poll(words, generation, mask, POLL)
        if BACKEND == "interpreter":
            ticks = tl.full((), _yield_and_clock_us() - start, tl.int64)
        else:
            ticks += 1
    if POLL == "relaxed":  # some compilers delete an acquire whose result is not used
        lead = _poll(words, generation, mask, "acquire")
    arrived = lead >= 0
    if lead < 0:
        _abort(control_ptr, words, channel, source, generation, mask, heap_bases, rank,
                 WORLD, BACKEND)  # fmt: skip
    tl.debug_barrier()
    if TIMELINE != "":
        _note(control_ptr, WAIT_ENDED, source, mask)
    return arrived


@triton.jit
def send(control_ptr, words, payload, peer, generation=None, mask=None):
    """Store words in a peer's memory; no other notification is needed.

    No drain, barrier, release or signal: each word itself shows that it has arrived. It says
    nothing about this program's other stores.

    Args:
        words: pointers to int64 in the current slot of the peer's LL packets, or to int32
            in that of its Lamport words.
        payload: int32, for each word. In a Lamport word EMPTY becomes another NaN.
        peer: the receiver, for the timeline.
        generation: of the running call; not used by Lamport words.
        mask: words that are sent.
    """
    if words.dtype.element_ty == tl.int32:
        word = tl.where(payload == EMPTY, _OTHER_NAN, payload)
    else:
        word = (generation << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)
    # A plain store may stay in a cache of this device. In PTX this is still a weak store: that
    # words do not tear relies on the hardware, which stores an aligned word in one piece.
    tl.store(words, word, mask=mask, cache_modifier=".wt")
    if TIMELINE != "":
        _note(control_ptr, SENT, peer, None)


@triton.jit
def receive(
    control_ptr, words, source, generation, heap_bases, rank, mask=None,
    WORLD: tl.constexpr = 1, BACKEND: tl.constexpr = "interpreter",
):  # fmt: skip
    """Wait until all of `words` have arrived for `generation`; return their payload.

    They are polled together, so all returned values come from the same poll. A LL packet
    has arrived when it holds the lower half of the generation: a word last sent exactly a multiple
    of 2^32 calls ago would pass. A Lamport word has arrived when it is not EMPTY.

    Args:
        words: a block of pointers to int64 in the current slot of this rank's LL packets,
            or to int32 in that of its Lamport words. All are loaded, even masked ones, so that
            loads can be wide; all must lie in the slot.
        source: the sender: a scalar, or a block that broadcasts to the shape of `words`.
        mask: words that are waited for.

    Returns:
        The payload, int32, and whether all have arrived; False as for :func:`wait`.
    """
    shape: tl.constexpr = words.shape
    # With fewer words than threads, compilers let several threads load the same word, each seeing
    # its own value, and reload it for each layout. With copies, each thread has a word of its own.
    copies: tl.constexpr = max(1, _threads() // words.numel)
    if TIMELINE != "":
        _note(control_ptr, WAIT_BEGAN, source, source != rank)
    if copies > 1:
        addresses = _repeat(words.to(tl.int64), shape, copies)  # pointers cannot be reshaped
        words = tl.cast(addresses, words.dtype)
        source = _repeat(source, shape, copies)
        if mask is not None:
            mask = _repeat(mask, shape, copies)
    limit = tl.load(control_ptr + LIMIT)
    seen = _load_words(words, BACKEND)
    late = _count_late(seen, generation, mask)
    if late > 0:
        if is_aborted(control_ptr):
            limit = tl.zeros((), tl.int64)
    ticks = tl.zeros((), tl.int64)
    if BACKEND == "interpreter":
        start = tl.full((), _yield_and_clock_us(), tl.int64)  # uptime exceeds int32
    while (late > 0) & (ticks < limit):
        seen = _load_words(words, BACKEND)
        late = _count_late(seen, generation, mask)
        if BACKEND == "interpreter":
            ticks = tl.full((), _yield_and_clock_us() - start, tl.int64)
        else:
            ticks += 1
    if late > 0:
        _abort_on_words(control_ptr, seen, source, generation, mask, heap_bases, rank,
                       WORLD, BACKEND)  # fmt: skip
    payload = seen.to(tl.int32)
    if copies > 1:
        payload = tl.reshape(tl.max(payload, 0), shape)
    if TIMELINE != "":
        _note(control_ptr, WAIT_ENDED, source, source != rank)
    return payload, late == 0


def _threads(_semantic: Any = None) -> Any:
    """Threads of one program; an interpreted one has no other than itself."""
    if _semantic is None:
        return 1
    options = _semantic.builder.options
    return tl.constexpr(options.num_warps * options.warp_size)


_threads.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def _repeat(block, shape, copies: tl.constexpr):
    """A block that broadcasts to `shape`, flat, as the rows of [copies, numel]."""
    whole = tl.broadcast_to(block, shape)
    return tl.broadcast_to(tl.reshape(whole, (1, whole.numel)), (copies, whole.numel))


@triton.jit
def _load_words(words, BACKEND: tl.constexpr):
    # Relaxed loads at system scope, up to 16 bytes wide; atomics adding 0 would remain atomics.
    if BACKEND == "hip":
        tl.debug_barrier()  # without one between two polls, LLVM merges their buffer loads
        found = tl.load(words, volatile=True, cache_modifier=".cv")
    else:
        found = tl.load(words, volatile=True)
    return found


@triton.jit
def _count_late(seen, generation, mask):
    """How many words have not come."""
    late = _is_late(seen, generation)
    if mask is not None:
        late = late & mask
    return tl.sum(late.to(tl.int32))


@triton.jit
def _is_late(seen, generation):
    """Which of LL packets do not have the generation, or of Lamport words are EMPTY."""
    if seen.dtype == tl.int32:
        late = seen == EMPTY
    else:
        late = ((seen ^ (generation << 32)) >> 32) != 0
    return late


@triton.jit
def is_aborted(control_ptr):
    """Whether this rank or a peer has given up waiting: what a call computes may be garbage."""
    return tl.atomic_add(control_ptr + ABORT, 0, sem="relaxed", scope="sys") != 0


@triton.jit
def before_tma_loads(BACKEND: tl.constexpr):
    """Fence between a wait and TMA loads of the data that was waited for.

    The stores and the acquire belong to the generic proxy, TMA to the async proxy.
    """
    if BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "fence.proxy.async.global;\n\tmov.u32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _abort(
    control_ptr, words, channel, source, want, mask, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Give up; the report names the signal that is furthest behind."""
    none = tl.zeros((), tl.int64)
    lead = tl.atomic_add(words, 0, sem="relaxed", scope="sys", mask=mask) - want
    late_channel = none + channel
    late_source = none + source
    if len(words.shape) > 0:
        if mask is not None:
            lead = tl.where(mask, lead, 1)
        lane = tl.arange(0, words.shape[0])
        latest = tl.min(tl.where(lead == tl.min(lead, 0), lane, words.shape[0]), 0)
        late_channel = tl.max(tl.where(lane == latest, late_channel, 0), 0)
        late_source = tl.max(tl.where(lane == latest, late_source, 0), 0)
        lead = tl.min(lead, 0)
    _report(control_ptr, late_channel, late_source, want, want + lead, heap_bases, rank,
            WORLD, BACKEND)  # fmt: skip


@triton.jit
def _abort_on_words(
    control_ptr, seen, source, want, mask, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Give up; the report names the word furthest behind. For EMPTY words the lag is unknown."""
    if seen.dtype == tl.int32:
        behind = _is_late(seen, want).to(tl.int64)
    else:
        behind = (want - (seen >> 32)) & 0xFFFFFFFF
    if mask is not None:
        behind = tl.where(mask, behind, 0)
    most = tl.max(behind)
    sources = tl.zeros_like(behind) + source
    late_source = tl.max(tl.where(behind == most, sources, 0))
    _report(control_ptr, NO_CHANNEL, late_source, want, want - most, heap_bases, rank,
            WORLD, BACKEND)  # fmt: skip


@triton.jit
def _report(
    control_ptr, late_channel, late_source, want, seen, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Report who waited for what, once per rank, and abort the pool of every peer."""
    none = tl.zeros((), tl.int64)
    aborted = tl.atomic_xchg(control_ptr + ABORT, 1 + late_source, sem="relaxed", scope="sys")
    lost = tl.where(aborted == 0, late_source, aborted - 1)
    if tl.atomic_xchg(control_ptr + REPORTED, 1, sem="relaxed", scope="gpu") == 0:
        report = tl.cast(tl.load(control_ptr + STATUS), tl.pointer_type(tl.int64))
        tl.store(report + 1, none + rank)
        tl.store(report + 2, none + tl.program_id(0))
        tl.store(report + 3, none + late_channel)
        tl.store(report + 4, late_source)
        tl.store(report + 5, want)
        tl.store(report + 6, seen)
        tl.store(report + 7, lost)
        _drain_stores(BACKEND)
        tl.debug_barrier()
        code = none + tl.where(aborted == 0, TIMED_OUT, PEER_ABORTED)
        tl.atomic_xchg(report, code, sem="release", scope="sys")
        for step in range(1, WORLD):
            peer = (rank + step) % WORLD
            abort = translate(control_ptr + ABORT, heap_bases, rank, peer)
            tl.atomic_xchg(abort, 1 + lost, sem="relaxed", scope="sys")


@triton.jit
def running_generation(control_ptr):
    """The generation of the running call.

    Stable until this program leaves: all the others together add less than ONE_CALL.
    """
    if TIMELINE != "":
        _note(control_ptr, STARTED, 0, None)
    done = tl.atomic_add(control_ptr + GENERATION, 0, sem="relaxed", scope="gpu")
    return done // ONE_CALL + 1


@triton.jit
def leave(control_ptr, generations=1):
    """Count this program out of the call; when all have left, the next generation begins.

    Every program of a call's last kernel leaves exactly once, after its last use of the
    generation. The result of the atomic is not used, so nothing waits for it.

    Args:
        generations: how many the call takes; the same on all ranks. More than one only in a kernel
            of one program.
    """
    if TIMELINE != "":
        _note(control_ptr, DONE, 0, None)
    _count_out(control_ptr + GENERATION, generations)


@triton.jit
def _count_out(count_ptr, calls):
    others = tl.num_programs(0) - 1
    share = tl.where(tl.program_id(0) == 0, calls * ONE_CALL - others, 1)
    tl.atomic_add(count_ptr, share.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def running_turn(control_ptr):
    """Calls of the pool that used Lamport words before this one; stable until it leaves the turn.

    Turn t uses slot t % 3 of Lamport words.
    """
    return tl.atomic_add(control_ptr + TURN, 0, sem="relaxed", scope="gpu") // ONE_CALL


@triton.jit
def empty_last_turn(control_ptr, slots_ptr, stride_slot, turn, used, share, shares):
    """Reset one of `shares` shares of the Lamport words that the previous turn used to EMPTY.

    What peers send there next belongs to turn + 2.

    Args:
        slots_ptr: int32, the first of three slots, `stride_slot` apart.
        used: words from the start of a slot that this call uses on any rank.
    """
    if share == 0:
        tl.store(control_ptr + USED + turn % 2, used)
    last = tl.cdiv(tl.load(control_ptr + USED + (turn + 1) % 2), 4) * 4  # 16 bytes at a time
    slot_ptr = tl.multiple_of(slots_ptr + (turn + 2) % 3 * stride_slot, 16)
    lanes = tl.arange(0, _EMPTIED)
    for first in range(share * _EMPTIED, last, shares * _EMPTIED):
        empty = tl.full((_EMPTIED,), EMPTY, tl.int32)
        tl.store(slot_ptr + first + lanes, empty, mask=first + lanes < last, cache_modifier=".wt")


@triton.jit
def leave_turn(control_ptr):
    """Count this program out of a turn of Lamport words, before it leaves the call."""
    _count_out(control_ptr + TURN, 1)


@triton.jit
def arrive(counter_ptr, programs, BACKEND: tl.constexpr):
    """Count this program in; True in the last of `programs`, which then sees all their stores.

    The last one leaves the counter at 0 for the next launch.
    """
    _drain_stores(BACKEND)
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = before == programs - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    return is_last


@triton.jit
def ticket(counter_ptr):
    """How many programs drew one before this: the order in which programs start."""
    return tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
