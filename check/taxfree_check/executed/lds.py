"""LDS, the memory that a workgroup shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from taxfree_check.executed.encoding import compiled
from taxfree_check.executed.errors import BadAccess
from taxfree_check.executed.lanes import Lanes
from taxfree_check.executed.tactics import POISON


@compiled(cache=True)
def _load(words: Any, end: int, places: Any, size: int, loaded: Any) -> int:
    """Returns the first place that does not lie before `end`, or is not aligned; else -1."""
    for lane in range(len(places)):
        address = places[lane]
        if address + size > end or address % min(size, 4):
            return address
        for index in range(len(loaded)):
            loaded[index, lane] = words[address // 4 + index]
        if size < 4:
            loaded[0, lane] = loaded[0, lane] >> 8 * (address % 4) & (1 << 8 * size) - 1
    return -1


@compiled(cache=True)
def _store(words: Any, end: int, places: Any, size: int, values: Any) -> int:
    """Likewise."""
    mask, count = (1 << 8 * size) - 1, values.shape[1]
    for lane in range(len(places)):
        address = places[lane]
        if address + size * count > end or address % size:
            return address
        shift = 8 * (address % 4)
        for index in range(count):
            kept = words[address // 4 + index] & ~(mask << shift)
            words[address // 4 + index] = kept | (values[lane, index] & mask) << shift
    return -1


class SharedMemory:
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

    def load(self, places: Lanes, size: int) -> Lanes:
        """uint32 [words, lane] of `size` bytes each lane; `places` are int64."""
        loaded = np.empty((max(size // 4, 1), len(places)), np.uint32)
        self._require(_load(self.words, self.size, places, size, loaded), size)
        return loaded

    def store(self, places: Lanes, values: Lanes) -> None:
        """Values [lane, elements] of uint32, or of fewer bytes."""
        words, size = values.astype(np.uint32, "C"), values.itemsize
        bad = _store(self.words, self.size, places, size, words)
        self._require(bad, size * values.shape[1])

    def _require(self, bad: int, size: int) -> None:
        if bad < 0:
            return
        if bad + size > self.size:
            raise BadAccess(f"access of {size} bytes at {bad} of {self.size} of LDS")
        raise BadAccess(f"an access of {size} bytes to LDS is not aligned")
