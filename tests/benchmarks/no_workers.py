"""In the place of workers, where what they would find is made up."""

from __future__ import annotations

import contextlib
from typing import Any

from taxfree_kernels.hardware import KNOWN


class NoWorkers(contextlib.nullcontext[Any]):
    """A group of workers of the host that starts none."""

    hardware, world_size = KNOWN["cpu"], 2

    def __init__(self, *_: object) -> None:
        super().__init__(self)

    def call(self, *_: object) -> list[float]:
        return [1.0]
