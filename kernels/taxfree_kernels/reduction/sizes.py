"""Sizes of partial sums, of their inboxes and of launches, from a problem and a config.

Part of what is measured, so included in the kernels' hash; what is searched is in
:mod:`taxfree_kernels.reduction.spaces`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config

if TYPE_CHECKING:
    from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce


def padded_columns(n: int) -> int:
    """Columns of a row in an inbox: a multiple of 16, so that each row starts at 16 bytes."""
    return -(-n // 16) * 16


def padded_elements(m: int, n: int) -> int:
    """Elements of an inbox for [m, n]: a multiple of 256 bytes in any type."""
    return -(-m * padded_columns(n) // 128) * 128


def tiles_of(m: int, n: int, block_m: int, block_n: int) -> int:
    """Tiles that [m, n] is in, those at its ends as large as the others."""
    return -(-m // block_m) * -(-n // block_n)


def tiles_per_signal(tiles: int, config: Config) -> int:
    """How many tiles share a signal."""
    return int(-(-tiles // config["SIGNALS"]))


def staggered_tiles(hardware: Hardware, config: Config) -> int:
    """How many tiles two programs share, so that tiles end one after the other; 0 for none."""
    return max(1, hardware.compute_units // 2) if config["STAGGERED"] else 0


def lanes_of(hardware: Hardware, config: Config, words: int) -> int:
    """Lanes, a power of two, of a block [ranks, lanes] that holds `words` words of each rank.

    Each thread loads 16 bytes; with at least that many lanes per thread, it holds the same lanes of
    all ranks and adds them by itself.
    """
    if hardware.backend == "interpreter":
        return 2 * words  # more than there are, as on a GPU where rows are few
    return max(words, 4 * config["num_warps"] * hardware.warp_size)


def block_row(problem: MatmulAllReduce) -> int:
    """Lanes for a row that is normalised; 0 when none is."""
    return power_of_2(problem.n, 1) if problem.rms_norm else 0
