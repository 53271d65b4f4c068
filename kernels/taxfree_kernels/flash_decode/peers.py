"""Device functions for blocks of peers: several ranks' memory as the target of one store."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def every_rank(rank, GROUP: tl.constexpr):
    """A block of all ranks, and its mask; the next rank is first, so that targets are spread."""
    lanes: tl.constexpr = triton.next_power_of_2(GROUP.WORLD)
    lane = tl.arange(0, lanes)
    return (rank + 1 + lane) % GROUP.WORLD, lane < GROUP.WORLD


@triton.jit
def at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH: tl.constexpr):
    """Rows of the same [., WIDTH] at several addresses: pointers, values and mask of one store.

    Args:
        peer_ptrs, peer_mask: where row 0 is, for each of a block of peers.
        tile: [ROWS, next_power_of_2(WIDTH)]; row, row_mask: [ROWS].
    """
    column = tl.arange(0, tile.shape[1])
    offsets = row[:, None] * WIDTH + column[None, :]
    mask = row_mask[:, None] & (column < WIDTH)[None, :]
    peers: tl.constexpr = peer_ptrs.shape[0]
    tile = tl.broadcast_to(tile[None, :, :], (peers, tile.shape[0], tile.shape[1]))
    return (
        peer_ptrs[:, None, None] + offsets[None, :, :],
        tile,
        peer_mask[:, None, None] & mask[None, :, :],
    )


@triton.jit
def store_at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH: tl.constexpr):
    """Store rows at several peers; arguments as of :func:`at_peers`."""
    ptrs, tile, mask = at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH)
    tl.store(ptrs, tile.to(peer_ptrs.dtype.element_ty), mask=mask)
