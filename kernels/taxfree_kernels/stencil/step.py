"""What one step does with a tile of a rank's part; all variants run these device functions.

A rank's part of the domain is [rows, columns, depth]. Tiles cut it, and synchronise; a tile is
several blocks, one below the other, of [BLOCK_0, BLOCK_1, BLOCK_2] points. A part has four sides,
which have numbers: rows above and below, columns before and after. Whatever is sent of a side lies
where the receiver has its opposite side.

Neighbours are added in one order, and nothing is contracted: all variants, on any number of ranks,
have the same bits. Squares for norms are added in float64, so that those are the same in float32,
too, whatever the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.spaces import power_of_2, within
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Config, Space

SIDES = tl.constexpr(4)
ABOVE, BELOW, BEFORE, AFTER = map(tl.constexpr, range(4))


class Box(NamedTuple):
    """The constants of a rank's part, whose rows are a run-time value, and of its tiles.

    Args:
        COLUMNS, DEPTH: of the part.
        DOWN, ACROSS: ranks that share the rows, and the columns.
        BLOCK_0, BLOCK_1, BLOCK_2: points of a block.
        BLOCKS: of a tile, one below the other.
        SPLIT: blocks beside each other in each of them.
        QUADS: neighbours along the contiguous dimension are loaded for 4 points at a time.
        STREAMS: rows of a tile go through registers.
    """

    COLUMNS: int
    DEPTH: int
    DOWN: int
    ACROSS: int
    BLOCK_0: int
    BLOCK_1: int
    BLOCK_2: int
    BLOCKS: int
    SPLIT: int = 1
    QUADS: int = 0
    STREAMS: int = 0


class Block(NamedTuple):
    """A block of a tile, as run-time values.

    Args:
        first_row, first_column, first_layer: where it begins.
        row, column, layer: its points: [BLOCK_0, 1, 1], [1, BLOCK_1, 1] and [1, 1, BLOCK_2].
    """

    first_row: Any
    first_column: Any
    first_layer: Any
    row: Any
    column: Any
    layer: Any


@triton.jit
def tiles_of(rows, BOX: tl.constexpr):
    """Tiles of a part along its rows, its columns and its depth."""
    return (
        tl.cdiv(rows, BOX.BLOCK_0 * BOX.BLOCKS),
        tl.cdiv(BOX.COLUMNS, BOX.BLOCK_1 * BOX.SPLIT),
        tl.cdiv(BOX.DEPTH, BOX.BLOCK_2),
    )


@triton.jit
def sides_of(rows, BOX: tl.constexpr):
    """Tiles of a part at shared sides."""
    down, across, deep = tiles_of(rows, BOX)
    side_rows = tl.minimum(down, 2 * (BOX.DOWN > 1))
    side_columns = tl.minimum(across, 2 * (BOX.ACROSS > 1))
    return (side_rows * across + (down - side_rows) * side_columns) * deep


@triton.jit
def tile_at(place, backwards, rows, BOX: tl.constexpr):
    """The number of the tile at a place of the order: tiles at shared sides come first.

    `backwards` reverses the others: what the last step has used last is then used first.
    """
    down, across, deep = tiles_of(rows, BOX)
    layer, place = place % deep, place // deep
    side_rows = tl.minimum(down, 2 * (BOX.DOWN > 1))
    side_columns = tl.minimum(across, 2 * (BOX.ACROSS > 1))
    ends = side_rows * across
    sides = ends + (down - side_rows) * side_columns
    inner = place - sides
    if backwards:
        inner = down * across - 1 - sides - inner
    among = tl.maximum(place - ends, 0)
    width = tl.maximum(across - side_columns, 1)
    is_end, is_side = place < ends, place < sides
    of_side = tl.maximum(side_columns, 1)
    row = tl.where(is_side, side_rows + among // of_side, side_rows + inner // width)
    row = tl.where(is_end, place // across, row)
    column = tl.where(is_side, among % of_side, side_columns + inner % width)
    column = tl.where(is_end, place % across, column)
    if BOX.DOWN > 1:  # the last row of tiles, the first, the second ..
        row = (row + down - 1) % down
    if BOX.ACROSS > 1:
        column = (column + across - 1) % across
    return (row * across + column) * deep + layer


@triton.jit
def blocks_of(tile, rows, BOX: tl.constexpr):
    """Blocks of a tile that have points."""
    _, across, deep = tiles_of(rows, BOX)
    left = tl.cdiv(rows, BOX.BLOCK_0) - tile // deep // across * BOX.BLOCKS
    return tl.minimum(BOX.BLOCKS, left) * BOX.SPLIT


@triton.jit
def block_of(tile, number, rows, BOX: tl.constexpr):
    """A block of a tile, by their numbers."""
    _, across, deep = tiles_of(rows, BOX)
    row = (tile // deep // across * BOX.BLOCKS + number // BOX.SPLIT) * BOX.BLOCK_0
    column = (tile // deep % across * BOX.SPLIT + number % BOX.SPLIT) * BOX.BLOCK_1
    layer = tile % deep * BOX.BLOCK_2
    return Block(
        row,
        column,
        layer,
        (row + tl.arange(0, BOX.BLOCK_0))[:, None, None],
        (column + tl.arange(0, BOX.BLOCK_1))[None, :, None],
        (layer + tl.arange(0, BOX.BLOCK_2))[None, None, :],
    )


@triton.jit
def inside(block, rows, BOX: tl.constexpr):
    """Which points of a block the part has; broadcasts to it."""
    found = block.row < rows
    if BOX.COLUMNS % (BOX.BLOCK_1 * BOX.SPLIT) != 0:
        found = found & (block.column < BOX.COLUMNS)
    if BOX.DEPTH % BOX.BLOCK_2 != 0:
        found = found & (block.layer < BOX.DEPTH)
    return found


@triton.jit
def offsets(block, BOX: tl.constexpr):
    """Where the points of a block are in the part."""
    return (block.row * BOX.COLUMNS + block.column) * BOX.DEPTH + block.layer


@triton.jit
def rank_at(rank, SIDE: tl.constexpr, BOX: tl.constexpr):
    """The rank at a side of this one's part; negative if there is none."""
    row, column = rank // BOX.ACROSS, rank % BOX.ACROSS
    if SIDE == ABOVE:
        other = tl.where(row > 0, rank - BOX.ACROSS, -1)
    elif SIDE == BELOW:
        other = tl.where(row < BOX.DOWN - 1, rank + BOX.ACROSS, -1)
    elif SIDE == BEFORE:
        other = tl.where(column > 0, rank - 1, -1)
    else:
        other = tl.where(column < BOX.ACROSS - 1, rank + 1, -1)
    return other


@triton.jit
def at_side(block, rows, SIDE: tl.constexpr, BOX: tl.constexpr):
    """Which points of a block are at a side of the part; their neighbours there are not in it."""
    if SIDE == ABOVE:
        found = block.row == 0
    elif SIDE == BELOW:
        found = block.row == rows - 1
    elif SIDE == BEFORE:
        found = block.column == 0
    else:
        found = block.column == BOX.COLUMNS - 1
    return found


@triton.jit
def reaches(block, rows, SIDE: tl.constexpr, BOX: tl.constexpr):
    """Whether a block has points at a side of the part."""
    if SIDE == ABOVE:
        found = block.first_row == 0
    elif SIDE == BELOW:
        found = block.first_row + BOX.BLOCK_0 >= rows
    elif SIDE == BEFORE:
        found = block.first_column == 0
    else:  # thin blocks of a tile may have no points
        last = BOX.COLUMNS - 1
        found = (block.first_column <= last) & (block.first_column + BOX.BLOCK_1 > last)
    return found


@triton.jit
def is_beside(block, rank, rows, BOX: tl.constexpr):
    """Whether a block has points at a side that this rank shares."""
    found = block.first_row < 0
    for SIDE in tl.static_range(SIDES):
        found = found | ((rank_at(rank, SIDE, BOX) >= 0) & reaches(block, rows, SIDE, BOX))
    return found


@triton.jit
def halo_offsets(block, rows, SIDE: tl.constexpr, BOX: tl.constexpr):
    """Where points at a side are in a halo, and which of them the part has.

    A halo holds the sides that are shared, one behind the other.
    """
    ROW: tl.constexpr = BOX.COLUMNS * BOX.DEPTH
    layer = tl.minimum(block.layer, BOX.DEPTH - 1)
    if SIDE < 2:
        at = SIDE * ROW + tl.minimum(block.column, BOX.COLUMNS - 1) * BOX.DEPTH + layer
        has = (block.column < BOX.COLUMNS) & (block.layer < BOX.DEPTH)
    else:
        first = 2 * ROW * (BOX.DOWN > 1) + (SIDE - 2) * rows * BOX.DEPTH
        at = first + tl.minimum(block.row, rows - 1) * BOX.DEPTH + layer
        has = (block.row < rows) & (block.layer < BOX.DEPTH)
    return at, has


@triton.jit
def is_shared(SIDE: tl.constexpr, BOX: tl.constexpr):
    """Whether any ranks share such a side."""
    return (BOX.DOWN if SIDE < 2 else BOX.ACROSS) > 1


@triton.jit
def _neighbours(source_ptr, block, rows, face, SIDE: tl.constexpr, BOX: tl.constexpr):
    """The neighbours at a side of all points; those at the side have them in `face`, if any."""
    ROW: tl.constexpr = BOX.COLUMNS * BOX.DEPTH
    SHIFT: tl.constexpr = (-ROW, ROW, -BOX.DEPTH, BOX.DEPTH)[SIDE]
    is_end = at_side(block, rows, SIDE, BOX)
    mask = inside(block, rows, BOX) & (is_end == 0)
    values = tl.load(source_ptr + offsets(block, BOX) + SHIFT, mask=mask, other=0.0)
    if face is not None:
        if is_shared(SIDE, BOX):
            values = tl.where(is_end, face, values)
    return values


@triton.jit
def _sums_beside(source_ptr, centre, block, rows, BOX: tl.constexpr):
    """The sums of both neighbours along the contiguous dimension, where none are in faces.

    Of 4 points beside each other, a thread has all neighbours but two.
    """
    SIZE: tl.constexpr = BOX.BLOCK_1 * BOX.BLOCK_2
    QUADS: tl.constexpr = SIZE // 4
    if BOX.DEPTH == 1:  # the contiguous dimension last, or threads would exchange points
        centre = tl.permute(centre, (0, 2, 1))
    odd_even = tl.reshape(centre, (BOX.BLOCK_0, QUADS, 2, 2))
    even, odd = tl.split(odd_even)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    row = block.first_row + tl.arange(0, BOX.BLOCK_0)[:, None]
    quad = tl.arange(0, QUADS)[None, :]
    if BOX.DEPTH > 1:
        column = block.first_column + quad // (BOX.BLOCK_2 // 4)
        place = block.first_layer + quad % (BOX.BLOCK_2 // 4) * 4
        at = (row * BOX.COLUMNS + column) * BOX.DEPTH + place
        has = (row < rows) & (column < BOX.COLUMNS)
        LENGTH: tl.constexpr = BOX.DEPTH
    else:
        place = block.first_column + quad * 4
        at = row * BOX.COLUMNS + place
        has = row < rows
        LENGTH: tl.constexpr = BOX.COLUMNS
    before = tl.load(source_ptr + at - 1, mask=has & (place > 0) & (place <= LENGTH), other=0.0)
    after = tl.load(source_ptr + at + 4, mask=has & (place + 4 < LENGTH), other=0.0)
    even = tl.join(before + second, second + fourth)
    odd = tl.join(first + third, third + after)
    sums = tl.reshape(tl.join(even, odd), centre.shape)
    if BOX.DEPTH == 1:
        sums = tl.permute(sums, (0, 2, 1))
    return sums


@triton.jit
def relaxed(source_ptr, block, rows, rank, above, below, before, after, BOX: tl.constexpr):
    """A block before and after a step.

    Args:
        above, below, before, after: neighbours that other ranks have, [1, BLOCK_1, BLOCK_2] of
            rows, [BLOCK_0, 1, BLOCK_2] of columns; anything where there are none.
    """
    has, at = inside(block, rows, BOX), offsets(block, BOX)
    centre = tl.load(source_ptr + at, mask=has, other=0.0)
    total = _neighbours(source_ptr, block, rows, above, ABOVE, BOX)
    total += _neighbours(source_ptr, block, rows, below, BELOW, BOX)
    after = _mean(source_ptr, block, rows, rank, centre, total, before, after, BOX)
    return centre, after


@triton.jit
def row_of(source_ptr, block, down, rows, BOX: tl.constexpr):
    """The points of a block of one row, or of one so many rows down; 0 where there are none."""
    at = offsets(block, BOX) + down * (BOX.COLUMNS * BOX.DEPTH)
    has = inside(block, rows, BOX) & (block.row + down >= 0) & (block.row + down < rows)
    return tl.load(source_ptr + at, mask=has, other=0.0)


@triton.jit
def relaxed_in(source_ptr, block, rows, rank, above, centre, below, BOX: tl.constexpr):
    """A block of one row after a step, of which rows are there; without faces."""
    return _mean(source_ptr, block, rows, rank, centre, above + below, None, None, BOX)


@triton.jit
def _mean(source_ptr, block, rows, rank, centre, total, before, after, BOX: tl.constexpr):
    """A block after a step, from the sum of its neighbours in other rows."""
    has, at = inside(block, rows, BOX), offsets(block, BOX)
    IN_QUADS: tl.constexpr = BOX.QUADS and before is None
    if IN_QUADS and BOX.DEPTH == 1:
        total += _sums_beside(source_ptr, centre, block, rows, BOX)
    else:
        total_1 = _neighbours(source_ptr, block, rows, before, BEFORE, BOX)
        total += total_1 + _neighbours(source_ptr, block, rows, after, AFTER, BOX)
    stays = block.layer < 0
    if BOX.DEPTH > 1:
        is_first, is_last = block.layer == 0, block.layer == BOX.DEPTH - 1
        if IN_QUADS:
            total += _sums_beside(source_ptr, centre, block, rows, BOX)
        else:
            front = tl.load(source_ptr + at - 1, mask=has & (is_first == 0), other=0.0)
            back = tl.load(source_ptr + at + 1, mask=has & (is_last == 0), other=0.0)
            total += front + back
        total = total * (1 / 6)
        stays = is_first | is_last
    else:
        total = total * 0.25
    for SIDE in tl.static_range(SIDES):
        is_edge = rank_at(rank, SIDE, BOX) < 0
        stays = stays | (at_side(block, rows, SIDE, BOX) & is_edge)
    return tl.where(stays, centre, total)


@triton.jit
def squared_change(before, after, block, rows, BOX: tl.constexpr):
    """The sum of squares of what a step has changed in a block, in float64."""
    change = tl.where(inside(block, rows, BOX), after - before, 0.0).to(tl.float64)
    return tl.sum(tl.reshape(change * change, (change.numel,)), 0)


# -- what plans and variants share --------------------------------------------------------------


def box(problem: Stencil, config: Config) -> Box:
    """The constants of a problem in a config."""
    blocks = (config["BLOCK_0"], config["BLOCK_1"], config["BLOCK_2"], config["BLOCKS"])
    quads = {key: config.get(key, 0) for key in ("QUADS", "STREAMS")}
    return Box(problem.own_columns, problem.depth, problem.down, problem.across, *blocks, **quads)


def thin(box: Box, hardware: Hardware, config: Config) -> Box:
    """The same tiles in blocks of a row, with a point for each thread where that many are."""
    points = max(4, hardware.warp_size * config["num_warps"])
    width = max(1, min(box.BLOCK_1, points // box.BLOCK_2))
    blocks = box.BLOCK_0 * box.BLOCKS
    return box._replace(BLOCK_0=1, BLOCK_1=width, BLOCKS=blocks, SPLIT=box.BLOCK_1 // width)


def counts(problem: Stencil, constants: Box) -> tuple[int, int]:
    """Tiles at sides that are shared, and all tiles, of a part."""
    down = -(-problem.own_rows // (constants.BLOCK_0 * constants.BLOCKS))
    across = -(-problem.own_columns // constants.BLOCK_1)
    deep = -(-problem.depth // constants.BLOCK_2)
    inner = (down - min(down, 2 * (problem.down > 1))) * (
        across - min(across, 2 * (problem.across > 1))
    )
    return (down * across - inner) * deep, down * across * deep


def tile_space(problem: Stencil, hardware: Hardware) -> Space:
    """Blocks and tiles that cover less than twice a part in any dimension, and warps."""

    def sizes(size: int, *values: int) -> tuple[int, ...]:
        return tuple(value for value in values if value < 2 * size) or values[:1]

    rows, columns, depth = problem.own_rows, problem.own_columns, problem.depth
    warps: tuple[int, ...] = (4, 8, 16)
    if hardware.backend == "interpreter":
        blocks = (sizes(rows, 1, 4), sizes(columns, 4, 16), sizes(depth, 1, 8, 16)[-2:])
        warps = (1,)
    elif depth == 1:
        blocks = (sizes(rows, 1, 4, 8, 16, 32), sizes(columns, 64, 128, 256, 512, 1024), (1,))
    else:
        blocks = (sizes(rows, 1, 2, 4), sizes(columns, 4, 8, 16, 32), sizes(depth, 32, 64, 128))
    names = ("BLOCK_0", "BLOCK_1", "BLOCK_2", "BLOCKS")
    space = dict(zip(names, (*blocks, sizes(rows, 1, 2, 4, 8, 16, 32)), strict=True))
    return space | {"QUADS": (0, 1), "STREAMS": (0, 1), "num_warps": warps}


def first_configs(problem: Stencil, hardware: Hardware) -> list[dict[str, int]]:
    """What a search tries first: programs of few warps, or one of many, on each compute unit.

    Few points a thread leave registers for others, which load while this one waits or stores.
    Faces on four sides take so many that half as many threads fit.
    """
    units = hardware.compute_units
    share = -(-problem.elements // units)
    configs, names = [], ("BLOCK_0", "BLOCK_1", "BLOCK_2")
    many = ((4, 4), (8, 2), (16, 1))
    for warps, programs in many if problem.depth == 1 or problem.across == 1 else ((4, 2), (8, 1)):
        tile = max(512, share // programs)
        width, of_thread = (128, 8) if problem.depth == 1 else (64, 4)
        points = min(of_thread * 32 * warps, power_of_2(tile, 512))
        blocks = (points // width, width, 1) if problem.depth == 1 else (1, points // width, width)
        configs.append(
            dict(zip(names, blocks, strict=True))
            | {
                "BLOCKS": min(64 // of_thread, power_of_2(-(-tile // points), 1)),
                "num_warps": warps,
            }
            | {"QUADS": 0, "STREAMS": 0, "PROGRAMS": programs * units, "REGISTERS": 48}
        )
    if 2048 < share <= 8192:
        configs.reverse()
    for warps, programs in ((4, 6), (4, 8), (8, 3)):
        points = 128 * warps
        blocks = (1, points, 1) if problem.depth == 1 else (1, points // 64, 64)
        configs.append(
            dict(zip(names, blocks, strict=True))
            | {
                "BLOCKS": min(32, power_of_2(max(1, share // programs // points // 4), 1)),
                "num_warps": warps,
            }
            | {"QUADS": 1, "STREAMS": 1, "PROGRAMS": programs * units, "REGISTERS": 64}
        )
    return configs


def seeds_in(space: Space, problem: Stencil, hardware: Hardware) -> list[dict[str, Any]]:
    """The first configs of a space that are legal, each once."""
    found = [within(space, config) for config in first_configs(problem, hardware)]
    return [
        config
        for at, config in enumerate(found)
        if config not in found[:at] and tile_illegal_reason(problem, hardware, config) is None
    ]


def tile_illegal_reason(problem: Stencil, hardware: Hardware, config: Config) -> str | None:
    """The reason not to run tiles of a config, or None."""
    if config["BLOCK_0"] * config["BLOCKS"] >= 2 * max(problem.own_rows, config["BLOCK_0"]):
        return "a tile has blocks without points"
    if config["STREAMS"] and config["BLOCK_0"] > 1:
        return "blocks of several rows do not stream"
    if config["QUADS"] and config["BLOCK_1" if problem.depth == 1 else "BLOCK_2"] < 4:
        return "a block is no 4 points wide"
    if hardware.backend == "interpreter":
        return None
    points = config["BLOCK_0"] * config["BLOCK_1"] * config["BLOCK_2"]
    threads = config["num_warps"] * hardware.warp_size
    if not threads <= 2 * points <= 32 * threads:
        return f"{points} points for {threads} threads"
    return None
