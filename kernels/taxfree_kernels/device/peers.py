"""The ranks of a group: the control block of each one's pool, and addresses in their memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# -- layout of a pool's control block, in int64 words -----------------------------------------
GENERATION = tl.constexpr(0)  # of the last finished call, in units of ONE_CALL
LIMIT = tl.constexpr(2)  # bound of a wait, in ticks
ABORT = tl.constexpr(3)  # 1 + the rank that was lost; written by peers too; 0 while all is well
REPORTED = tl.constexpr(4)  # nonzero: one program of this rank has written the report
STATUS = tl.constexpr(5)  # address of the report, in host memory
LOG = tl.constexpr(6)  # address of the timeline; 0 for none
TURN = tl.constexpr(7)  # calls with Lamport words that have finished, in units of ONE_CALL
USED = tl.constexpr(8)  # [2]: Lamport words of a slot used by the last two such calls, by turn % 2
SIGNALS = tl.constexpr(16)  # signal words [channel, source]

#: Signal words of each source: one for each tile, where programs wait for tiles one by one.
CHANNELS = 256

#: Largest slot of LL packets, of which a pool has two: 256 KiB of payload from each of 8 ranks.
#: Larger messages gain nothing from carrying their flags.
LL_SLOT_BYTES = 4 << 20

#: Largest slot of Lamport words, of which a pool has three: both shots of an all-reduce of 4 MiB.
LAMPORT_SLOT_BYTES = 8 << 20

#: The total that the programs of one call add to GENERATION; larger than any grid.
ONE_CALL = tl.constexpr(1 << 24)

# -- layout of a timeout report, in int64 words -----------------------------------------------
REPORT_WORDS = 8  # code, rank, program, channel, source, wanted, seen, lost
TIMED_OUT = tl.constexpr(1)
PEER_ABORTED = tl.constexpr(2)
NO_CHANNEL = tl.constexpr(-1)  # instead of a channel: the wait was for words

#: A Lamport word that has not arrived. As one 32-bit or two 16-bit floats it is NaN.
EMPTY = tl.constexpr(-1)


class Group(NamedTuple):
    """The constants of a group of ranks: a kernel's ``GROUP: tl.constexpr``.

    Args:
        WORLD: the number of ranks.
        BACKEND: "cuda", "hip" or "interpreter".
    """

    WORLD: int
    BACKEND: str


class Peers(NamedTuple):
    """The run-time values to address and signal peers; a kernel makes it from its arguments.

    For address translation alone, `control_ptr` and `generation` may be None.

    Args:
        control_ptr: int64, the control block of this rank's pool.
        heap_bases: int64 [WORLD], the address of each rank's arena as seen by this rank.
        rank: this rank's number.
        generation: the running call's; see :func:`taxfree_kernels.device.sync.running_generation`.
    """

    control_ptr: Any
    heap_bases: Any
    rank: Any
    generation: Any


class Memory(NamedTuple):
    """The memory that a plan gives its kernel, as run-time arguments.

    Args:
        inbox_ptr: the first slot, in symmetric memory; `stride_slot` elements to the next.
        control_ptr, heap_bases: see :class:`Peers`.
        partials_ptr: float32, shares of tiles of which programs share K; None without tiles.
        counters_ptr: int32, 0 between launches: one for each tile, then others.
    """

    inbox_ptr: Any
    stride_slot: Any
    control_ptr: Any
    partials_ptr: Any
    counters_ptr: Any
    heap_bases: Any


@triton.jit
def translate(ptr, peers, peer):
    """The address at which this rank sees `peer`'s copy of the symmetric object at `ptr`.

    `ptr` and `peer` are scalars or blocks. The result keeps the known alignment of `ptr`: arenas
    are page-aligned, and the hint is placed on the shift, because a hint on the result of a call
    is lost when the call is inlined.
    """
    shift = tl.load(peers.heap_bases + peer) - tl.load(peers.heap_bases + peers.rank)
    shift = tl.multiple_of(shift, 256)
    return tl.cast(tl.cast(ptr, tl.pointer_type(tl.int8)) + shift, ptr.dtype)
