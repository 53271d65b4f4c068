"""The layout of an arena: control words, LL packets, Lamport words, payload slots."""

from __future__ import annotations

ALIGNMENT = 256  # bytes; more than any vector access or bulk copy needs

#: Largest slot of LL packets, of which a pool has two: 256 KiB of payload from each of 8 ranks.
#: Larger messages gain nothing from carrying their flags.
FLAG_BYTES = 4 << 20

#: Largest slot of Lamport words, of which a pool has three: both shots of an all-reduce of 4 MiB.
BARE_BYTES = 8 << 20

_CONTROL_BYTES = 1 << 20

#: In a heap that is smaller than it should be, a slot of words takes at most 1 / WORDS_SHARE of
#: what is free: payload matters more.
WORDS_SHARE = 16


def arena_bytes(slot_bytes: int) -> int:
    """Size of an arena whose pool has payload slots of `slot_bytes`, and full slots of words."""
    slot = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
    words = 2 * FLAG_BYTES + 3 * BARE_BYTES
    return max(2 * slot + words, WORDS_SHARE * BARE_BYTES) + _CONTROL_BYTES
