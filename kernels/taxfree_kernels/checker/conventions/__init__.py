"""Conventions of the field, simulated: how kernels reach the memory of their peers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def installed(world: Any) -> Iterator[None]:
    yield
