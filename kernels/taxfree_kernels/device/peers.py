"""The ranks of a group and the translation of addresses into their memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


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
