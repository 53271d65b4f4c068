"""How fast this device polls, so that the bound of a wait can be given in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync

if TYPE_CHECKING:
    from taxfree_kernels.fabric.base import Fabric

_POLLS = 20_000  # some 15 ms


@triton.jit
def _wait_for_nobody(control_ptr, heap_bases, BACKEND: tl.constexpr):
    sync.wait(control_ptr, 0, 0, 1, heap_bases, 0, WORLD=1, BACKEND=BACKEND)


def polls_per_second(fabric: Fabric) -> float:
    """Polls per second of one waiting program, by letting it time out on a private word."""
    report = fabric.host_words(sync.REPORT_WORDS)
    control = torch.zeros(sync.SIGNALS.value + 1, dtype=torch.int64, device=fabric.device)
    control[sync.LIMIT.value] = _POLLS
    control[sync.STATUS.value] = report.data_ptr()
    bases = control.new_tensor([control.data_ptr()])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _wait_for_nobody[(1,)](control, bases, BACKEND=fabric.backend)  # compiles, wakes the clocks
    control[sync.ABORT.value] = 0
    begin.record()
    _wait_for_nobody[(1,)](control, bases, BACKEND=fabric.backend)
    end.record()
    torch.cuda.synchronize(fabric.device)
    return _POLLS / (begin.elapsed_time(end) * 1e-3)
