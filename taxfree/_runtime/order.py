"""Calls of a runtime follow one another: one thread at a time, and in order across streams."""

from __future__ import annotations

import threading

import torch

from taxfree.errors import UsageError


class OneThread:
    """A context for one thread at a time; another is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "two threads call the same runtime at once", "let one thread make all calls"
            )
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._lock.release()

    @property
    def is_within(self) -> bool:
        """Whether this thread is in the context."""
        return self._owner == threading.get_ident()


class StreamOrder:
    """Lets each call follow the last one, when they come on different streams.

    Within a captured graph, a call follows the last one of the same graph. Whoever replays graphs
    orders them with each other and with other calls: a graph cannot wait for what is not in it.
    """

    def __init__(self) -> None:
        self._last: dict[bool, torch.cuda.Stream] = {}  # whether it was captured -> its stream

    def follow(self, capturing: bool) -> None:
        """Make the current stream wait for the last call."""
        stream = torch.cuda.current_stream()
        last = self._last.get(capturing)
        self._last[capturing] = stream
        if last is None or last == stream:
            return
        if capturing:
            with torch.cuda.stream(last):
                if not torch.cuda.is_current_stream_capturing():
                    return  # it was another graph's
        stream.wait_stream(last)
