"""Messages without signals: words that show by themselves whether they have arrived.

*LL packets* are 8 bytes, stored and loaded atomically: 4 bytes of payload and the lower half of the
generation. *Lamport words* are 4 bytes of payload: a word that has not arrived is EMPTY, and each
call that uses such words resets those of the previous one to EMPTY.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import EMPTY, LIMIT, NO_CHANNEL, ONE_CALL, TURN, USED
from taxfree_kernels.device.sync import abort, count_out, is_aborted, yield_and_clock_us

#: Sent in place of a payload that equals EMPTY; NaN as well.
_OTHER_NAN = tl.constexpr(0x7FFFFFFF)
EMPTIED = tl.constexpr(4096)  # words at a time: at least 16 bytes of each thread


@triton.jit
def send(peers, words, payload, peer, mask=None):
    """Store words in a peer's memory, without drain, barrier, release or signal.

    Each word shows only its own arrival, not that of this program's other stores.

    Args:
        words: pointers to int64 in the current slot of the peer's LL packets, or to int32
            in that of its Lamport words.
        payload: int32, for each word. A payload that equals EMPTY becomes another NaN.
        peer: the receiver, for the timeline.
        mask: words that are sent.
    """
    if words.dtype.element_ty == tl.int32:
        word = tl.where(payload == EMPTY, _OTHER_NAN, payload)
    else:
        word = (peers.generation << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)
    # A plain store may stay in a cache of this device. In PTX this is still a weak store: that
    # words do not tear relies on the hardware, which stores an aligned word in one piece.
    tl.store(words, word, mask=mask, cache_modifier=".wt")
    if sync.TIMELINE != "":
        sync.note(peers.control_ptr, sync.SENT, peer, None)


@triton.jit
def receive(peers, words, source, GROUP: tl.constexpr, mask=None):
    """Wait until all of `words` have arrived for the running call; return their payload.

    They are polled together, so all returned values come from the same poll. An LL packet
    has arrived when it holds the lower half of the generation; a packet that was last sent a
    multiple of 2^32 calls ago would pass as well. A Lamport word has arrived when it is not EMPTY.

    Args:
        words: a block of pointers to int64 in the current slot of this rank's LL packets,
            or to int32 in that of its Lamport words. All are loaded, even masked ones, so that
            loads can be wide; all must lie in the slot.
        source: the sender: a scalar, or a block that broadcasts to the shape of `words`.
        mask: words that are waited for.

    Returns:
        The payload, int32, and whether all have arrived: False in the same cases as for
        :func:`taxfree_kernels.device.sync.wait`.
    """
    shape: tl.constexpr = words.shape
    # With fewer words than threads, compilers let several threads load the same word, each seeing
    # its own value, and reload it for each layout. With copies, each thread has a word of its own.
    copies: tl.constexpr = max(1, _threads() // words.numel)
    if sync.TIMELINE != "":
        sync.note(peers.control_ptr, sync.WAIT_BEGAN, source, source != peers.rank)
    if copies > 1:
        addresses = _repeat(words.to(tl.int64), shape, copies)  # pointers cannot be reshaped
        words = tl.cast(addresses, words.dtype)
        source = _repeat(source, shape, copies)
        if mask is not None:
            mask = _repeat(mask, shape, copies)
    limit = tl.load(peers.control_ptr + LIMIT)
    seen = _load_words(words, GROUP)
    late = _count_late(seen, peers.generation, mask)
    if late > 0:
        if is_aborted(peers.control_ptr):
            limit = tl.cast(0, tl.int64)
    ticks = tl.cast(0, tl.int64)
    if GROUP.BACKEND == "interpreter":
        start = tl.full((), yield_and_clock_us(), tl.int64)  # uptime exceeds int32
    while (late > 0) & (ticks < limit):
        seen = _load_words(words, GROUP)
        late = _count_late(seen, peers.generation, mask)
        if GROUP.BACKEND == "interpreter":
            ticks = tl.full((), yield_and_clock_us() - start, tl.int64)
        else:
            ticks += 1
    if late > 0:
        _abort_on_words(peers, seen, source, mask, GROUP)
    payload = seen.to(tl.int32)
    if copies > 1:
        payload = tl.reshape(tl.max(payload, 0), shape)
    if sync.TIMELINE != "":
        sync.note(peers.control_ptr, sync.WAIT_ENDED, source, source != peers.rank)
    return payload, late == 0


def _threads(_semantic: Any = None) -> Any:
    """Threads of one program; 1 when interpreted."""
    if _semantic is None:
        return 1
    options = _semantic.builder.options
    return tl.constexpr(options.num_warps * options.warp_size)


_threads.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def _repeat(block, shape, copies: tl.constexpr):
    """`copies` rows of a flattened block, [copies, numel], after broadcasting it to `shape`."""
    whole = tl.broadcast_to(block, shape)
    return tl.broadcast_to(tl.reshape(whole, (1, whole.numel)), (copies, whole.numel))


@triton.jit
def _load_words(words, GROUP: tl.constexpr):
    # Relaxed loads at system scope, up to 16 bytes wide; atomics that add 0 would stay single.
    if GROUP.BACKEND == "hip":
        tl.debug_barrier()  # without one between two polls, LLVM merges their buffer loads
        seen = tl.load(words, volatile=True, cache_modifier=".cv")
    else:
        seen = tl.load(words, volatile=True)
    return seen


@triton.jit
def _count_late(seen, generation, mask):
    """The number of words that have not arrived."""
    late = _is_late(seen, generation)
    if mask is not None:
        late = late & mask
    return tl.sum(late.to(tl.int32))


@triton.jit
def _is_late(seen, generation):
    """A mask of the LL packets without this generation, or of the EMPTY Lamport words."""
    if seen.dtype == tl.int32:
        late = seen == EMPTY
    else:
        late = ((seen ^ (generation << 32)) >> 32) != 0
    return late


@triton.jit
def _abort_on_words(peers, seen, source, mask, GROUP: tl.constexpr):
    """Time out; report the word furthest behind. For EMPTY words the lag is unknown."""
    if seen.dtype == tl.int32:
        behind = _is_late(seen, peers.generation).to(tl.int64)
    else:
        behind = (peers.generation - (seen >> 32)) & 0xFFFFFFFF
    if mask is not None:
        behind = tl.where(mask, behind, 0)
    most = tl.max(behind)
    sources = behind * 0 + source  # of one shape, in Gluon too
    late_source = tl.max(tl.where(behind == most, sources, 0))
    abort(peers, NO_CHANNEL, late_source, peers.generation - most, GROUP)


@triton.jit
def running_turn(control_ptr):
    """The number of earlier calls with Lamport words; constant until this call leaves the turn.

    Turn t uses slot t % 3 of Lamport words.
    """
    return tl.atomic_add(control_ptr + TURN, 0, sem="relaxed", scope="gpu") // ONE_CALL


@triton.jit
def empty_last_turn(control_ptr, slots_ptr, stride_slot, turn, used, share, shares):
    """Reset the Lamport words of the previous turn to EMPTY: share `share` of `shares`.

    Peers send to this slot again in turn + 2.

    Args:
        slots_ptr: int32, the first of three slots, `stride_slot` apart.
        used: words from the start of a slot that this call uses on any rank.
    """
    if share == 0:
        tl.store(control_ptr + USED + turn % 2, used)
    last = tl.cdiv(tl.load(control_ptr + USED + (turn + 1) % 2), 4) * 4  # 16 bytes at a time
    slot_ptr = tl.multiple_of(slots_ptr + (turn + 2) % 3 * stride_slot, 16)
    lanes = tl.arange(0, EMPTIED)
    for first in range(share * EMPTIED, last, shares * EMPTIED):
        empty = tl.full((EMPTIED,), EMPTY, tl.int32)
        tl.store(slot_ptr + first + lanes, empty, mask=first + lanes < last, cache_modifier=".wt")


@triton.jit
def leave_turn(control_ptr):
    """Count this program out of a turn of Lamport words, before it leaves the call."""
    count_out(control_ptr + TURN, 1)
