"""Calls of a runtime follow one another: one thread at a time, and in order across streams."""

from __future__ import annotations

import threading
from threading import get_ident

import torch

from taxfree.errors import UsageError


class OneThread:
    """A context for one thread at a time; another is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def enter(self) -> None:
        """Enter it; a context manager takes a call three times as long."""
        if not self._lock.acquire(False):
            raise UsageError(
                "two threads call the same runtime at once", "let one thread make all calls"
            )
        self._owner = get_ident()

    def leave(self) -> None:
        self._owner = None
        self._lock.release()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *error: object) -> None:
        self.leave()

    @property
    def is_within(self) -> bool:
        """Whether this thread is in the context."""
        return self._owner == get_ident()


_NONE = None, None


class StreamOrder:
    """Lets each call follow the last one, when they come on different streams.

    Within a captured graph, a call follows the last one of the same graph. Whoever replays graphs
    orders them with each other and with other calls: a graph cannot wait for what is not in it.

    Args:
        device: of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        #: whether it was captured -> its stream, with the handle, which is faster to read
        self._last: dict[bool, tuple[int, torch.cuda.Stream]] = {}

    def follow(self) -> bool:
        """Make the current stream wait for the last call; returns whether it is captured."""
        handle = torch._C._cuda_getCurrentRawStream(self._device)
        # Nobody can capture the default stream, 0; of others the driver is asked.
        is_captured = handle != 0 and torch.cuda.is_current_stream_capturing()
        last_handle, last = self._last.get(is_captured, _NONE)
        if handle != last_handle:
            stream = torch.cuda.current_stream(self._device)
            self._last[is_captured] = handle, stream
            if last is not None and (not is_captured or _is_capturing(last)):
                stream.wait_stream(last)
        return is_captured


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether it still is, or again; else what it was given last is in another graph."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
