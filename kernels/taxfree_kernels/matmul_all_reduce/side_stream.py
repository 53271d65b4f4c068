"""A second stream, for kernels that move data while the vendor's matmul computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """Work beside the current stream, forked from it and joined to it by events.

    Its programs go first where a compute unit falls free: they are few, and peers wait for them. On
    the host, and within a simulation, there is one order only.

    Args:
        device: of the fabric.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Within the context, work comes after all that the current stream has been given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all forked work."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
