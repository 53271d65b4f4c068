"""The symmetric heap, the pool of inboxes that the plans of one stream share, and a barrier.

An arena holds control words, LL packets, Lamport words, and payload slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import peers, sync
from taxfree_kernels.device.peers import CHANNELS, LAMPORT_SLOT_BYTES, LL_SLOT_BYTES, Group, Peers
from taxfree_kernels.errors import HeapExhausted, PeerTimeout
from taxfree_kernels.fabric.base import ALIGNMENT, aligned
from taxfree_kernels.launch import Kernel

if TYPE_CHECKING:
    from taxfree_kernels.fabric.base import Fabric

_CONTROL_BYTES = 1 << 20

#: In a heap that is smaller than it should be, a slot of words takes at most 1 / WORDS_SHARE of
#: what is free: payload matters more.
WORDS_SHARE = 16


def aligned_down(size: int) -> int:
    """The largest block that fits `size` bytes without a rest."""
    return size - size % ALIGNMENT


def arena_bytes(slot_bytes: int) -> int:
    """Size of an arena whose pool has payload slots of `slot_bytes`, and full slots of words."""
    words = 2 * LL_SLOT_BYTES + 3 * LAMPORT_SLOT_BYTES
    return max(2 * aligned(slot_bytes) + words, WORDS_SHARE * LAMPORT_SLOT_BYTES) + _CONTROL_BYTES


class SymmetricHeap:
    """Sub-allocates one arena in call order; the same calls give the same layout on every rank.

    Args:
        arena: uint8 [heap_bytes] on the device, at `heap_bases[rank]`.
    """

    def __init__(self, arena: torch.Tensor) -> None:
        self._arena = arena
        self._used = 0

    @property
    def free_bytes(self) -> int:
        return self._arena.numel() - self._used

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements of `dtype`, aligned to 256 bytes.

        Raises:
            HeapExhausted: they do not fit.
        """
        size = aligned(count * dtype.itemsize)
        if size > self.free_bytes:
            raise HeapExhausted(
                f"the symmetric heap has {self.free_bytes} bytes left, {size} are needed",
                "give a larger heap_bytes",
            )
        block = self._arena[self._used : self._used + count * dtype.itemsize]
        self._used += size
        return block.view(dtype)

    def offset_of(self, block: torch.Tensor) -> int:
        """Bytes from the begin of the arena to a block of it; the same on every rank."""
        return block.data_ptr() - self._arena.data_ptr()


class Pool:
    """Control words and slots for messages, shared by all plans whose calls one stream orders.

    A pool counts calls, of whichever plan: the number of a call is its generation.

    Payload has two slots. Call g uses slot g % 2. In each call, every rank signals every peer and
    waits for every peer. A rank in call g has therefore heard from every peer in call g - 1. That
    peer had left call g - 2 by then, so nobody still reads slot g % 2. A call may instead use the
    first slot in every generation: it waits until all peers have entered the call, and makes the
    next generation odd when it leaves.

    LL packets have two slots of their own. No payload is stored there, so nothing can be mistaken
    for a packet of the running generation.

    Lamport words have three slots. Only calls that use them are counted: turn t uses slot t % 3,
    and empties the words that turn t - 1 left in the rank's own memory. All of these had arrived
    when turn t - 1 ended. A peer stores there again in turn t + 2. By then it has heard from every
    rank in turn t + 1, so every rank has ended turn t, and the words are empty.

    Args:
        fabric: the fabric whose heap holds the pool.
        slot_bytes, ll_bytes, lamport_bytes: size of one slot of payload, of LL packets and of
            Lamport words; None divides up the free part of the heap.
        timeout_s: timeout of a wait in seconds.
    """

    def __init__(
        self,
        fabric: Fabric,
        slot_bytes: int | None = None,
        ll_bytes: int | None = None,
        lamport_bytes: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._fabric = fabric
        words = peers.SIGNALS.value + CHANNELS * fabric.world_size
        self.control = fabric.heap.empty(words, torch.int64)
        share = aligned_down(fabric.heap.free_bytes // WORDS_SHARE)
        ll_bytes = min(LL_SLOT_BYTES, share) if ll_bytes is None else ll_bytes
        lamport_bytes = min(LAMPORT_SLOT_BYTES, share) if lamport_bytes is None else lamport_bytes
        self.ll_packets = fabric.heap.empty(2 * ll_bytes // 8, torch.int64)
        self.lamport_words = fabric.heap.empty(3 * lamport_bytes // 4, torch.int32)
        if slot_bytes is None:
            slot_bytes = aligned_down(fabric.heap.free_bytes // 2)
        self.slot_bytes = slot_bytes
        self._slots = fabric.heap.empty(2 * slot_bytes, torch.uint8)
        self._report = fabric.host_words(peers.REPORT_WORDS)
        self._code = self._report.numpy().data  # indexing a tensor takes a microsecond
        self.bound_waits(timeout_s)

    def slots(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """The first slot as `count` elements, and the elements from a slot to the next.

        Raises:
            HeapExhausted: `count` elements are more than a slot holds.
        """
        if count * dtype.itemsize > self.slot_bytes:
            raise HeapExhausted(
                f"an inbox of {count * dtype.itemsize} bytes does not fit a slot of "
                f"{self.slot_bytes} bytes",
                "give a larger heap_bytes: two slots of the largest problem",
            )
        slots = self._slots.view(dtype)
        return slots[:count], self.slot_bytes // dtype.itemsize

    def ll_slots(self, count: int) -> tuple[torch.Tensor, int]:
        """The first slot of LL packets as `count` int64, and how far the next slot is.

        Raises:
            HeapExhausted: `count` words are more than a slot holds.
        """
        return _words(self.ll_packets, 2, count, "LL packets")

    def lamport_slots(self, count: int) -> tuple[torch.Tensor, int]:
        """The first slot of Lamport words as `count` int32, and how far the next slot is.

        Raises:
            HeapExhausted: `count` words are more than a slot holds.
        """
        return _words(self.lamport_words, 3, count, "Lamport words")

    def check(self) -> None:
        """Check, without synchronising, whether a wait of this rank has timed out.

        Raises:
            PeerTimeout: it has; the pool is unusable until all ranks reset it.
        """
        if not self._code[0]:
            return
        code, rank, program, channel, source, wanted, seen, lost = self._report.tolist()
        where = "words" if channel == peers.NO_CHANNEL.value else f"channel {channel}"
        what = f"program {program}, {where}, generation {wanted}, seen {seen}"
        message = f"rank {rank} waited {self.timeout_s:g} s for rank {source} ({what})"
        is_secondary = code == peers.PEER_ABORTED.value
        if is_secondary:
            message = (
                f"rank {rank} aborted: a peer timed out on rank {lost}; "
                f"it waited for rank {source} ({what})"
            )
        hint = "see which rank died or is stuck; then `reset` on all ranks"
        raise PeerTimeout(message, hint, is_secondary)

    def check_at_rest(self) -> None:
        """Like :meth:`check`, with no call in flight on this rank; also finds peers' timeouts.

        A rank that is late by more than the timeout may take signals of its peers' later calls for
        those it waits for: its results are wrong, and it reports nothing.

        Raises:
            PeerTimeout: a wait of this rank, or of a peer, has timed out; the pool is unusable
                until all ranks reset it.
        """
        self.check()
        lost = int(self.control[peers.ABORT.value]) - 1
        if lost >= 0:
            raise PeerTimeout(
                f"a peer timed out on rank {lost}: results of rank {self._fabric.rank} since then "
                "may be wrong",
                "see why that rank came late or is stuck; then reset on all ranks",
                is_secondary=True,
            )

    def bound_waits(self, timeout_s: float) -> None:
        """Give waits another timeout, in seconds, and reset the pool; collective as `reset`."""
        self._limit, self.timeout_s = self._fabric.ticks(timeout_s), timeout_s
        self.reset()

    def reset(self, generation: int = 0) -> None:
        """Make the pool usable again; collective, with no call in flight on any rank."""
        self._fabric.barrier()
        self.control.fill_(generation)
        self.control[: peers.SIGNALS.value] = 0
        self.control[peers.GENERATION.value] = generation * peers.ONE_CALL.value
        self.control[peers.LIMIT.value] = self._limit
        self.control[peers.STATUS.value] = self._report.data_ptr()
        flag = generation % 2**32 << 32
        self.ll_packets.fill_(flag - 2**64 if flag >= 2**63 else flag)
        self.lamport_words.fill_(peers.EMPTY.value)
        self._report.zero_()
        self._fabric.barrier()


def _words(words: torch.Tensor, slots: int, count: int, what: str) -> tuple[torch.Tensor, int]:
    slot_words = words.numel() // slots
    if count > slot_words:
        raise HeapExhausted(
            f"{count} {what} do not fit a slot of {slot_words}",
            "give a larger heap_bytes, or send less at once",
        )
    return words[:count], slot_words


@triton.jit(do_not_specialize=["rank"])
def _barrier(control_ptr, heap_bases, rank, GROUP: tl.constexpr):
    generation = sync.running_generation(control_ptr)
    own = Peers(control_ptr, heap_bases, rank, generation)
    peer = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))
    others = (peer < GROUP.WORLD) & (peer != rank)
    peer = tl.where(others, peer, rank)
    sync.signal(own, 0, peer, GROUP, mask=others)
    sync.wait(own, 0, peer, GROUP, mask=others)
    sync.leave(control_ptr)


class DeviceBarrier:
    """A kernel that ends on every rank after it has begun on all of them: it aligns timed calls."""

    def __init__(self, fabric: Fabric, timeout_s: float) -> None:
        self.pool = Pool(fabric, slot_bytes=0, ll_bytes=0, lamport_bytes=0, timeout_s=timeout_s)
        self._kernel = Kernel(
            _barrier,
            grid=1,
            constants={"GROUP": Group(fabric.world_size, fabric.backend)},
            last_args=(self.pool.control, fabric.heap_bases, fabric.rank),
        )

    def __call__(self) -> None:
        self._kernel()
