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

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.spaces import distinct, within
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Config, Space, Variant

SIDES = tl.constexpr(4)
ABOVE, BELOW, BEFORE, AFTER = map(tl.constexpr, range(4))
_TILE = ("BLOCK_0", "BLOCK_1", "BLOCK_2", "BLOCKS")


class Box(NamedTuple):
    """The constants of a rank's part, whose rows are a run-time value, and of its tiles.

    Args:
        COLUMNS, DEPTH: of the part.
        DOWN, ACROSS: ranks that share the rows, and the columns.
        BLOCK_0, BLOCK_1, BLOCK_2: points of a block.
        BLOCKS: of a tile, one below the other.
    """

    COLUMNS: int
    DEPTH: int
    DOWN: int
    ACROSS: int
    BLOCK_0: int
    BLOCK_1: int
    BLOCK_2: int
    BLOCKS: int


class Block(NamedTuple):
    """A block of a tile, as run-time values.

    Args:
        first_row, first_column: where it begins.
        row, column, layer: its points: [BLOCK_0, 1, 1], [1, BLOCK_1, 1] and [1, 1, BLOCK_2]; of
            points of an edge, all three [BLOCK_1].
    """

    first_row: Any
    first_column: Any
    row: Any
    column: Any
    layer: Any


@triton.jit
def tiles_of(rows, BOX: tl.constexpr):
    """Tiles of a part along its rows, its columns and its depth."""
    return (
        tl.cdiv(rows, BOX.BLOCK_0 * BOX.BLOCKS),
        tl.cdiv(BOX.COLUMNS, BOX.BLOCK_1),
        tl.cdiv(BOX.DEPTH, BOX.BLOCK_2),
    )


@triton.jit
def _sides_of(down, across, BOX: tl.constexpr):
    """Rows, and columns, of tiles at shared sides."""
    return tl.minimum(down, 2 * (BOX.DOWN > 1)), tl.minimum(across, 2 * (BOX.ACROSS > 1))


@triton.jit
def sides_of(rows, BOX: tl.constexpr):
    """Tiles of a part at shared sides."""
    down, across, deep = tiles_of(rows, BOX)
    side_rows, side_columns = _sides_of(down, across, BOX)
    return (side_rows * across + (down - side_rows) * side_columns) * deep


@triton.jit
def tile_at(place, backwards, rows, BOX: tl.constexpr):
    """The number of the tile at a place of the order: tiles at shared sides come first.

    `backwards` reverses the others: what the last step has used last is then used first.
    """
    down, across, deep = tiles_of(rows, BOX)
    layer, place = place % deep, place // deep
    side_rows, side_columns = _sides_of(down, across, BOX)
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
    return tl.minimum(BOX.BLOCKS, left)


@triton.jit
def block_of(tile, number, rows, BOX: tl.constexpr):
    """A block of a tile, by their numbers."""
    _, across, deep = tiles_of(rows, BOX)
    row = (tile // deep // across * BOX.BLOCKS + number) * BOX.BLOCK_0
    column = tile // deep % across * BOX.BLOCK_1
    layer = tile % deep * BOX.BLOCK_2
    return Block(
        row,
        column,
        (row + tl.arange(0, BOX.BLOCK_0))[:, None, None],
        (column + tl.arange(0, BOX.BLOCK_1))[None, :, None],
        (layer + tl.arange(0, BOX.BLOCK_2))[None, None, :],
    )


@triton.jit
def inside(block, rows, BOX: tl.constexpr):
    """Which points of a block the part has; broadcasts to it."""
    found = block.row < rows
    if BOX.COLUMNS % BOX.BLOCK_1 != 0:
        found = found & (block.column < BOX.COLUMNS)
    if BOX.DEPTH % BOX.BLOCK_2 != 0:
        found = found & (block.layer < BOX.DEPTH)
    return found


@triton.jit
def offsets(block, BOX: tl.constexpr):
    """Where the points of a block are in the part."""
    return (block.row * BOX.COLUMNS + block.column) * BOX.DEPTH + block.layer


@triton.jit
def loaded(part_ptr, block, rows, BOX: tl.constexpr):
    """The points of a block, and 0 beyond the part."""
    return tl.load(part_ptr + offsets(block, BOX), mask=inside(block, rows, BOX), other=0.0)


@triton.jit
def rank_at(rank, SIDE: tl.constexpr, BOX: tl.constexpr):
    """The rank at a side of this one's part; negative if there is none."""
    RANKS: tl.constexpr = BOX.DOWN if SIDE < 2 else BOX.ACROSS
    STRIDE: tl.constexpr = BOX.ACROSS if SIDE < 2 else 1
    place = rank // BOX.ACROSS if SIDE < 2 else rank % BOX.ACROSS
    if SIDE % 2:
        other = tl.where(place < RANKS - 1, rank + STRIDE, -1)
    else:
        other = tl.where(place > 0, rank - STRIDE, -1)
    return other


@triton.jit
def at_side(block, rows, SIDE: tl.constexpr, BOX: tl.constexpr):
    """Which points of a block are at a side of the part; their neighbours there are not in it."""
    if SIDE < 2:
        found = block.row == (rows - 1 if SIDE % 2 else 0)
    else:
        found = block.column == (BOX.COLUMNS - 1 if SIDE % 2 else 0)
    return found


@triton.jit
def reaches(block, rows, SIDE: tl.constexpr, BOX: tl.constexpr):
    """Whether a block has points at a side of the part."""
    if SIDE < 2:
        first, points, size = block.first_row, BOX.BLOCK_0, rows
    else:
        first, points, size = block.first_column, BOX.BLOCK_1, BOX.COLUMNS
    return first + points >= size if SIDE % 2 else first == 0


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
def _neighbours(source_ptr, block, rows, faces, SIDE: tl.constexpr, BOX: tl.constexpr):
    """The neighbours at a side of all points; those at the side have them in its face, if any."""
    ROW: tl.constexpr = BOX.COLUMNS * BOX.DEPTH
    SHIFT: tl.constexpr = (-ROW, ROW, -BOX.DEPTH, BOX.DEPTH)[SIDE]
    is_end = at_side(block, rows, SIDE, BOX)
    mask = inside(block, rows, BOX) & (is_end == 0)
    values = tl.load(source_ptr + offsets(block, BOX) + SHIFT, mask=mask, other=0.0)
    if faces is not None:
        if is_shared(SIDE, BOX):
            values = tl.where(is_end, faces[SIDE], values)
    return values


@triton.jit
def _quads(points):
    """The first, second, third and fourth of 4 points beside each other, each flat."""
    even, odd = tl.split(tl.reshape(points, (points.numel // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _sum_in_line(source_ptr, centre, at, has, is_first, is_last, IN_QUADS: tl.constexpr):
    """The sums of both neighbours along the contiguous dimension.

    Args:
        at, has: of the points.
        is_first, is_last: points without a neighbour before, or behind.
        IN_QUADS: of 4 points beside each other, a thread has all neighbours but two: it loads 2
            words in place of 8. The block is of one row, or threads would exchange points.
    """
    before = has & (is_first == 0)
    behind = has & (is_last == 0)
    if IN_QUADS:
        first, second, third, fourth = _quads(centre)
        at_first, _, _, at_fourth = _quads(at)
        has_before, _, _, _ = _quads(tl.broadcast_to(before, centre.shape))
        _, _, _, has_behind = _quads(tl.broadcast_to(behind, centre.shape))
        zeroth = tl.load(source_ptr + at_first - 1, mask=has_before, other=0.0)
        fifth = tl.load(source_ptr + at_fourth + 1, mask=has_behind, other=0.0)
        even = tl.join(zeroth + second, second + fourth)
        odd = tl.join(first + third, third + fifth)
        total = tl.reshape(tl.join(even, odd), centre.shape)
    else:
        total = tl.load(source_ptr + at - 1, mask=before, other=0.0)
        total += tl.load(source_ptr + at + 1, mask=behind, other=0.0)
    return total


@triton.jit
def relaxed(source_ptr, block, rows, rank, faces, BOX: tl.constexpr):
    """A block before and after a step.

    Args:
        faces: for each side, the neighbours that another rank has: [1, BLOCK_1, BLOCK_2] of rows,
            [BLOCK_0, 1, BLOCK_2] of columns; anything where there are none. None: no point of the
            block is at a shared side.
    """
    has, at = inside(block, rows, BOX), offsets(block, BOX)
    centre = tl.load(source_ptr + at, mask=has, other=0.0)
    total = _neighbours(source_ptr, block, rows, faces, ABOVE, BOX)
    total += _neighbours(source_ptr, block, rows, faces, BELOW, BOX)
    stays = block.layer < 0
    LINE: tl.constexpr = BOX.BLOCK_2 if BOX.DEPTH > 1 else BOX.BLOCK_1
    IN_QUADS: tl.constexpr = faces is None and BOX.BLOCK_0 == 1 and LINE % 4 == 0
    if BOX.DEPTH == 1 and IN_QUADS:
        is_first, is_last = (block.column == 0), (block.column == BOX.COLUMNS - 1)
        total += _sum_in_line(source_ptr, centre, at, has, is_first, is_last, IN_QUADS)
    else:
        total_1 = _neighbours(source_ptr, block, rows, faces, BEFORE, BOX)
        total += total_1 + _neighbours(source_ptr, block, rows, faces, AFTER, BOX)
    if BOX.DEPTH > 1:
        is_first, is_last = block.layer == 0, block.layer == BOX.DEPTH - 1
        total += _sum_in_line(source_ptr, centre, at, has, is_first, is_last, IN_QUADS)
        total = total * (1 / 6)
        stays = is_first | is_last
    else:
        total = total * 0.25
    for SIDE in tl.static_range(SIDES):
        is_edge = rank_at(rank, SIDE, BOX) < 0
        stays = stays | (at_side(block, rows, SIDE, BOX) & is_edge)
    return centre, tl.where(stays, centre, total)


@triton.jit
def squared_change(before, after, mask):
    """The sum of squares of what a step has changed in a block, in float64."""
    change = tl.where(mask, after - before, 0.0).to(tl.float64)
    return tl.sum(tl.reshape(change * change, (change.numel,)), 0)


# -- what plans and variants share --------------------------------------------------------------


def box(problem: Stencil, config: Config) -> Box:
    """The constants of a problem in a config."""
    tile = [config[name] for name in _TILE]
    return Box(problem.own_columns, problem.depth, problem.down, problem.across, *tile)


def counts(problem: Stencil, constants: Box) -> tuple[int, int]:
    """Tiles at sides that are shared, and all tiles, of a part."""
    down = -(-problem.own_rows // (constants.BLOCK_0 * constants.BLOCKS))
    across = -(-problem.own_columns // constants.BLOCK_1)
    deep = -(-problem.depth // constants.BLOCK_2)
    inner = max(0, down - 2 * (problem.down > 1)) * max(0, across - 2 * (problem.across > 1))
    return (down * across - inner) * deep, down * across * deep


def steps_of(
    problem: Stencil, u: torch.Tensor, out: torch.Tensor, other: torch.Tensor
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """The number of each step, and what it loads and stores; the last one stores `out`."""
    targets = [other if left % 2 else out for left in reversed(range(problem.steps))]
    return enumerate(pairwise([u, *targets]), start=1)


def tile_config(*sizes: int, **others: int) -> dict[str, int]:
    """A config whose tiles are of three sizes of a block, and of so many blocks."""
    return dict(zip(_TILE, sizes, strict=True)) | others


def launched_configs(problem: Stencil) -> list[dict[str, int]]:
    """What a search tries first where a launch is a step; the library's path has the first one."""
    plane = ((8, 128, 1, 1), (1, 512, 1, 1), (1, 1024, 1, 2))
    volume = ((1, 8, 64, 1), (1, 8, 128, 1), (1, 16, 64, 1))
    return [tile_config(*tile, num_warps=4) for tile in (plane if problem.depth == 1 else volume)]


class Tiled(Variant):
    """A variant of tiles, which a config cuts."""

    def guesses(self, problem: Stencil, hardware: Hardware) -> list[dict[str, int]]:
        """Configs that a search may try first, where they are in the space."""
        return launched_configs(problem)

    def space(self, problem: Stencil, hardware: Hardware) -> Space:
        """Blocks and tiles that cover less than twice a part in any dimension, and warps."""

        def sizes(size: int, *values: int) -> tuple[int, ...]:
            return tuple(value for value in values if value < 2 * size) or values[:1]

        rows, columns, depth = problem.own_rows, problem.own_columns, problem.depth
        warps: tuple[int, ...] = (4, 8, 16)
        if hardware.backend == "interpreter":
            blocks = (sizes(rows, 1, 4), sizes(columns, 4, 16), sizes(depth, 1, 8, 16)[-2:])
            warps = (1,)
        elif depth == 1:
            widths = sizes(columns, 64, 128, 256, 512, 1024)
            blocks = ((1, *sizes(rows, 4, 8, 16, 32)), widths, (1,))
        else:
            widths = sizes(columns, 4, 8, 16, 32)
            blocks = (sizes(rows, 1, 2, 4), widths, sizes(depth, 32, 64, 128))
        every = (*blocks, sizes(rows, 1, 2, 4, 8, 16, 32))
        return dict(zip(_TILE, every, strict=True)) | {"num_warps": warps}

    def seed_configs(self, problem: Stencil, hardware: Hardware) -> list[dict[str, Any]]:
        space = self.space(problem, hardware)
        configs = distinct([within(space, guess) for guess in self.guesses(problem, hardware)])
        return [each for each in configs if not self.illegal_reason(problem, hardware, each)]

    def illegal_reason(self, problem: Stencil, hardware: Hardware, config: Config) -> str | None:
        if config["BLOCK_0"] * config["BLOCKS"] >= 2 * max(problem.own_rows, config["BLOCK_0"]):
            return "a tile has blocks without points"
        if hardware.backend == "interpreter":
            return None
        points = config["BLOCK_0"] * config["BLOCK_1"] * config["BLOCK_2"]
        threads = config["num_warps"] * hardware.warp_size
        if not threads <= 2 * points <= 32 * threads:
            return f"{points} points for {threads} threads"
        return None
