"""LDS, the memory that a workgroup shares."""

from __future__ import annotations

import numpy as np

from taxfree_kernels.executed.errors import BadAccess
from taxfree_kernels.executed.lanes import Lanes
from taxfree_kernels.executed.tactics import POISON


class Shared:
    """The LDS of a workgroup; undefined until it is written.

    Args:
        size: bytes.
        poison: what words hold until then.

    Attributes:
        words: its contents, uint32.
    """

    def __init__(self, size: int, poison: int = POISON) -> None:
        self.size = size
        self.words = np.full(size // 4 + 1, poison, np.uint32)
        self._of: dict[int, Lanes] = {
            1: self.words.view(np.uint8),
            2: self.words.view(np.uint16),
            4: self.words,
        }

    def _check(self, places: Lanes, size: int) -> None:
        if not places.size:
            return
        last = int(np.maximum.reduce(places))
        if last + size > self.size:
            raise BadAccess(f"access of {size} bytes at {last} of {self.size} of LDS")
        if np.bitwise_or.reduce(places) & (min(size, 4) - 1):
            raise BadAccess(f"an access of {size} bytes to LDS is not aligned")

    def load(self, places: Lanes, size: int) -> Lanes:
        """uint32 [words, lane] of `size` bytes each lane."""
        self._check(places, size)
        if size < 4:
            return self._of[size][places // size].astype(np.uint32)[None]
        return self.words[(places >> 2) + np.arange(size // 4)[:, None]]

    def store(self, places: Lanes, values: Lanes) -> None:
        """Values [lane, elements] of uint32, or of fewer bytes."""
        size = values.itemsize
        self._check(places, size * values.shape[1])
        at = places if size == 1 else places // size
        self._of[size][at[:, None] + np.arange(values.shape[1])] = values
