"""A second stream that moves data while the vendor's matmul computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """Work beside the current stream, forked from it and joined to it by events.

    It has high priority: its programs are few, and peers wait for them. On the host everything runs
    in one order.

    Args:
        device: of the fabric.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def fork(self) -> None:
        """Order later work here after all work that the current stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within the context this is the current stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Fork, and enter."""
        self.fork()
        with self.entered():
            yield

    def join(self) -> None:
        """Make the current stream wait for all work here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
