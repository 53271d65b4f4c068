"""How an arena is shared out: control words, flag-in-data words, payload slots."""

from __future__ import annotations

ALIGNMENT = 256  # bytes; more than any vector access or bulk copy needs

#: Most that a pool keeps of each of its two slots of flag-in-data words: 256 KiB of payload from
#: each of 8 ranks. Larger messages gain nothing from carrying their flags.
FLAG_BYTES = 4 << 20

_CONTROL_BYTES = 1 << 20


#: Of a heap that is smaller than it should be, a slot of flag-in-data words is no more than this
#: part: payload matters more.
FLAG_SHARE = 16


def arena_bytes(slot_bytes: int) -> int:
    """An arena whose pool has payload slots of so many bytes, and all else in full."""
    slot = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
    return max(2 * slot + 2 * FLAG_BYTES, FLAG_SHARE * FLAG_BYTES) + _CONTROL_BYTES
