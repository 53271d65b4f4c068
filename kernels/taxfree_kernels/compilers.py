"""Which Triton compiles: what one version spoils of kernels is refused there, with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_assumed: ContextVar[str | None] = ContextVar("assumed", default=None)


def is_triton(major: int, minor: int) -> bool:
    """Whether this release of Triton compiles."""
    version = _assumed.get()
    if version is None:
        import triton  # late: spaces are asked for without it

        version = triton.__version__
    return version.split(".")[:2] == [str(major), str(minor)]


@contextlib.contextmanager
def assuming(version: str) -> Iterator[None]:
    """Within the context, legality is that of another Triton, which other processes compile with.

    Args:
        version: such as "3.8.0".
    """
    token = _assumed.set(version)
    try:
        yield
    finally:
        _assumed.reset(token)
