"""The 64 lanes of a wave: arrays of them, and masks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Lanes = np.ndarray[Any, np.dtype[Any]]

LANES = np.arange(64)
ALL = (1 << 64) - 1
WORD = (1 << 32) - 1


@lru_cache(maxsize=4096)
def lanes_of(bits: int) -> Lanes:
    """The 64 bits of a mask as booleans."""
    packed = np.frombuffer(bits.to_bytes(8, "little"), np.uint8)
    lanes = np.unpackbits(packed, bitorder="little").view(bool)
    lanes.flags.writeable = False
    return lanes
