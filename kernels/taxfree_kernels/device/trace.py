"""The device's clocks, and the program trace: the time of each program's events, in device memory.

Time is `%globaltimer` on NVIDIA, whose step depends on GPU and driver (32 ns to 1 us), the 100 MHz
counter of `s_memrealtime` on AMD, and the monotonic clock of the host when interpreted. Clocks of
different GPUs are unrelated.

The trace is compiled only if TIMELINE is set; every call of :func:`note` is guarded by that switch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import triton
import triton.language as tl

from taxfree_kernels.device.peers import LOG

AMD_TICK_NS = tl.constexpr(10)

_F = TypeVar("_F", bound=Callable[..., object])


def interpreted_only(function: _F) -> _F:
    """Marks a plain Python function, so that a jitted one may name it in a branch not compiled."""
    function.__triton_builtin__ = True  # type: ignore[attr-defined]
    return function


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
        now = AMD_TICK_NS * now
    return now


@triton.jit
def cycles(BACKEND: tl.constexpr):
    """Cycles of this program's compute unit, int64; nanoseconds when interpreted."""
    return _counter("mov.u64 $0, %clock64;", "s_memtime $0\n\ts_waitcnt lgkmcnt(0)", BACKEND)


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
        index = (tl.program_id(0) * EVENTS + event) * PEERS + peer
        times = tl.cast(log, tl.pointer_type(tl.int64))
        tl.store(times + index, clock_ns(TIMELINE), mask=mask)
