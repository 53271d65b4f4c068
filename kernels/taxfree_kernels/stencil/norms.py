"""Squared norms: sums of tiles' squares in the order of tiles, then of ranks, in float64."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import translate

_ADDED = tl.constexpr(1024)  # tiles whose squares are added at once


@triton.jit
def sum_of_tiles(squares_ptr, tiles):
    """The sum of float64 [tiles]."""
    lanes = tl.arange(0, _ADDED)
    squares = tl.zeros((_ADDED,), tl.float64)
    for first in range(0, tiles, _ADDED):
        squares += tl.load(squares_ptr + first + lanes, mask=first + lanes < tiles, other=0.0)
    return tl.sum(squares, 0)


@triton.jit
def finish(
    squares_ptr, sums_ptr, norms_ptr, tiles, norms, peers,
    GROUP: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Exchange sums with all ranks, and store the squared norms; one program of each rank calls it.

    Without norms all ranks signal, and wait for, all peers as well.

    Args:
        squares_ptr: float64 [norms, tiles].
        sums_ptr: float64 [norms, WORLD] in symmetric memory that nobody uses.
        norms_ptr: float32 [norms].
    """
    if HAS_NORMS:
        for norm in range(norms):
            total = sum_of_tiles(squares_ptr + norm * tiles, tiles)
            own_ptr = sums_ptr + norm * GROUP.WORLD + peers.rank
            for peer in tl.static_range(GROUP.WORLD):
                tl.store(translate(own_ptr, peers, peer), total)
    sync.signal_everybody(peers, 1, GROUP)
    arrived = sync.wait_for_everybody(peers, 1, GROUP)
    if HAS_NORMS:
        for norm in range(norms):
            total = tl.load(sums_ptr + norm * GROUP.WORLD)
            for source in tl.static_range(1, GROUP.WORLD):
                total += tl.load(sums_ptr + norm * GROUP.WORLD + source)
            total = tl.where(arrived, total.to(tl.float32), float("nan"))
            tl.store(norms_ptr + norm, total)
