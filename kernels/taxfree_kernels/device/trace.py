"""The program trace: the time of each program's events, in device memory.

It is compiled only if TIMELINE is set; every call of :func:`note` is guarded by that switch.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from taxfree_kernels.device.clock import clock_ns
from taxfree_kernels.device.control import LOG

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


@triton.jit
def note(control_ptr, event, peer, mask):
    """Log when this program reached an event; for one peer, only the last time is kept."""
    log = tl.load(control_ptr + LOG)
    if log != 0:
        at = (tl.program_id(0) * EVENTS + event) * PEERS + peer
        times = tl.cast(log, tl.pointer_type(tl.int64))
        tl.store(times + at, clock_ns(TIMELINE), mask=mask)
