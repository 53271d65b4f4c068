"""Measures the poll rate of a device, which converts the bound of a wait from seconds to polls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import peers, sync
from taxfree_kernels.device.peers import Group, Peers

if TYPE_CHECKING:
    from taxfree_kernels.fabric.base import Fabric

_POLLS = 20_000  # some 15 ms


@triton.jit
def _wait_for_nobody(control_ptr, heap_bases, GROUP: tl.constexpr):
    sync.wait(Peers(control_ptr, heap_bases, 0, 1), 0, 0, GROUP)


def polls_per_second(fabric: Fabric) -> float:
    """Polls per second of one waiting program, by letting it time out on a private word."""
    report = fabric.host_words(peers.REPORT_WORDS)
    block = torch.zeros(peers.SIGNALS.value + 1, dtype=torch.int64, device=fabric.device)
    block[peers.LIMIT.value] = _POLLS
    block[peers.STATUS.value] = report.data_ptr()
    bases = block.new_tensor([block.data_ptr()])
    group = Group(1, fabric.backend)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _wait_for_nobody[(1,)](block, bases, GROUP=group)  # compiles, and raises the clocks
    block[peers.ABORT.value] = 0
    begin.record()
    _wait_for_nobody[(1,)](block, bases, GROUP=group)
    end.record()
    torch.cuda.synchronize(fabric.device)
    return _POLLS / (begin.elapsed_time(end) * 1e-3)
