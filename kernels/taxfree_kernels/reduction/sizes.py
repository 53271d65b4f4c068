"""Sizes of partial sums, of their inboxes and of launches, from a problem and a config.

They decide what is measured for a config; the search space is in
:mod:`taxfree_kernels.reduction.spaces`.
"""

from __future__ import annotations

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config


def padded_columns(n: int) -> int:
    """Columns of a row in an inbox: a multiple of 16, so that rows are 16-byte aligned."""
    return -(-n // 16) * 16


def padded_elements(m: int, n: int) -> int:
    """Elements of an inbox for [m, n]: a multiple of 256 bytes in any type."""
    return -(-m * padded_columns(n) // 128) * 128


def tiles_of(m: int, n: int, block_m: int, block_n: int) -> int:
    """Number of tiles of [m, n], including partial ones."""
    return -(-m // block_m) * -(-n // block_n)


def tiles_per_signal(tiles: int, config: Config) -> int:
    """Number of tiles that share a signal."""
    return int(-(-tiles // config["SIGNALS"]))


def staggered_tiles(hardware: Hardware, config: Config) -> int:
    """Number of tiles that two programs share if tiles are staggered, else 0."""
    return max(1, hardware.compute_units // 2) if config["STAGGERED"] else 0


def lanes_of(hardware: Hardware, config: Config, words: int) -> int:
    """Lanes, a power of two, of a block [ranks, lanes] that holds `words` words of each rank.

    Each thread loads 16 bytes. With enough lanes, each thread holds the same lanes of all ranks,
    and adds them without other threads.
    """
    if hardware.backend == "interpreter":
        return 2 * words  # more lanes than words, as on a GPU with few rows
    return max(words, 4 * config["num_warps"] * hardware.warp_size)
