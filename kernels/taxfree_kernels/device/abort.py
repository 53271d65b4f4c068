"""Timeouts: a wait that exceeds its bound reports its source, and aborts every peer's pool."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device.control import ABORT, PEER_ABORTED, REPORTED, STATUS, TIMED_OUT
from taxfree_kernels.device.fences import drain_stores
from taxfree_kernels.device.peers import translate


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
