"""Work beside the caller's, for memory that outlives a call.

A caller may route the allocations of its thread, or of its stream, to a pool of its own: with
``torch.cuda.use_mem_pool``, or as Inductor does before it captures a graph. Inductor takes what
stays there for a leak, and a graph's pool is freed with the graph. Of two pools, one inside the
other, some versions of PyTorch serve the outer one. So what stays is allocated on another thread,
on the default stream, for which no caller's pool is in force; nor is a caller's inference mode.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")


def aside(device: torch.device, work: Callable[[], _T]) -> _T:
    """The result of `work`, which runs beside the caller; not while a graph is captured.

    It is ordered after what the current stream has been given, and it is done when this returns.
    """
    is_gpu = device.type == "cuda"
    before = torch.cuda.current_stream(device).record_event() if is_gpu else None

    def run() -> _T:
        if before is None:
            return work()
        torch.cuda.set_device(device)
        stream = torch.cuda.current_stream()
        stream.wait_event(before)
        try:
            return work()
        finally:
            stream.synchronize()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, run).result()
