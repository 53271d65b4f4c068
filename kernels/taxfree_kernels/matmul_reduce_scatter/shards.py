"""Device functions of the fused variants that map a tile's elements to the ranks' shards."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class OutputShard(NamedTuple):
    """Sizes of a rank's shard and of its place in an inbox, in elements or words.

    Args:
        columns: of the shard, in elements.
        stride_source: from one source's shard to the next.
        stride_row: from row to row, if it is not the width of all tiles of the columns.
    """

    columns: Any
    stride_source: Any
    stride_row: Any = None


@triton.jit
def tiles_of_shards(
    m, shard_columns, GROUP: tl.constexpr, SCATTER_DIM: tl.constexpr, TILE: tl.constexpr
):
    """Numbers of tiles: rows and columns of the whole sum, columns of a shard.

    Columns of tiles never cross from one rank's shard to the next; rows of tiles may.
    """
    owner_tiles = tl.cdiv(shard_columns, TILE.BLOCK_N)
    tiles_n = owner_tiles * GROUP.WORLD if SCATTER_DIM == 1 else owner_tiles
    return tl.cdiv(m, TILE.BLOCK_M), tiles_n, owner_tiles


@triton.jit
def owner_of_tile(
    rows, tile_n, owner_tiles, shard_rows, shard_columns, GROUP: tl.constexpr,
    SCATTER_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The ranks that own a tile's rows, and the positions in their shards.

    Returns:
        The owners, a block like `rows`, or one for all rows; the rows in the owners' shards; the
        owners' first column in the whole sum; the tile's first column in their shards.
    """
    if SCATTER_DIM == 0:
        owner = tl.minimum(rows // shard_rows, GROUP.WORLD - 1)
        shard_row = rows - owner * shard_rows
        first_col = 0
    else:
        owner = tile_n // owner_tiles
        shard_row = rows
        first_col = owner * shard_columns
    return owner, shard_row, first_col, tile_n % owner_tiles * BLOCK_N
