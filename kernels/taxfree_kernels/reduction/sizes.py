"""Sizes of partial sums and of their inboxes."""

from __future__ import annotations


def padded_columns(n: int) -> int:
    """Columns of a row in an inbox: a multiple of 16, so that each row starts at 16 bytes."""
    return -(-n // 16) * 16


def padded_elements(m: int, n: int) -> int:
    """Elements of an inbox for [m, n]: a multiple of 256 bytes in any type."""
    return -(-m * padded_columns(n) // 128) * 128


def tiles_of(m: int, n: int, block_m: int, block_n: int) -> int:
    """Tiles that [m, n] is in, those at its ends as large as the others."""
    return -(-m // block_m) * -(-n // block_n)
