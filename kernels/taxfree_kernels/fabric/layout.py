"""The layout of an arena: control words, LL packets, Lamport words, payload slots."""

from __future__ import annotations

_ALIGNMENT = 256  # bytes; more than any vector access or bulk copy needs

#: Largest slot of LL packets, of which a pool has two: 256 KiB of payload from each of 8 ranks.
#: Larger messages gain nothing from carrying their flags.
LL_SLOT_BYTES = 4 << 20

#: Largest slot of Lamport words, of which a pool has three: both shots of an all-reduce of 4 MiB.
LAMPORT_SLOT_BYTES = 8 << 20

_CONTROL_BYTES = 1 << 20

#: In a heap that is smaller than it should be, a slot of words takes at most 1 / WORDS_SHARE of
#: what is free: payload matters more.
WORDS_SHARE = 16


def aligned(size: int) -> int:
    """The bytes that a block of `size` bytes takes: the next block begins there."""
    return size + -size % _ALIGNMENT


def aligned_down(size: int) -> int:
    """The largest block that fits `size` bytes without a rest."""
    return size - size % _ALIGNMENT


def arena_bytes(slot_bytes: int) -> int:
    """Size of an arena whose pool has payload slots of `slot_bytes`, and full slots of words."""
    words = 2 * LL_SLOT_BYTES + 3 * LAMPORT_SLOT_BYTES
    return max(2 * aligned(slot_bytes) + words, WORDS_SHARE * LAMPORT_SLOT_BYTES) + _CONTROL_BYTES
