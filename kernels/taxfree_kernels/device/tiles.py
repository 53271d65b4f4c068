"""Which tile a program computes, and the loops that compute it.

Devices with several chiplets (XCDs) assign programs to them round-robin: program p runs on chiplet
p % num_xcds, which has its own L2 cache. A schedule decides which tiles share an L2: it is a
bijection from program ids to tiles, as integer arithmetic. num_xcds is 1 on devices with one L2.
These functions may also run on NumPy arrays of program ids, so that a model of caches sees the
order of kernels.

Schedules of a matmul are :func:`xcd_swizzle` followed by :func:`swizzle2d`, which have a parameter
each:

| schedule | XCDS | GROUP_M |
| --- | --- | --- |
| row-major | 1 | 1 |
| grouped | 1 | rows of tiles in a group |
| M-split: each chiplet has its own rows of tiles | chiplets | 1 |
| M-tile: each chiplet has its own columns of tiles, and walks down them | chiplets | all rows |

:func:`stream_k` shares K among programs: in kernels that of one tile, among SPLIT_K of them.
:func:`rank_rotated` lets each rank begin with its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl

from taxfree_kernels import variant

BLOCK = tl.constexpr(variant.BLOCK)
LEAST_SCALE = tl.constexpr(variant.LEAST_SCALE)


class Tile(NamedTuple):
    """The constants of a kernel that computes tiles: its ``TILE: tl.constexpr``.

    Args:
        BLOCK_M, BLOCK_N, BLOCK_K: elements of a tile, and of a step of the main loop.
        GROUP_M: see :func:`swizzle2d`.
        SPLIT_K: programs per tile, each with a share of K.
        SWAP_AB: multiply W^T by A^T, so that with few rows the long side of W maps to the long
            side of the matrix instruction.
        XCDS: see :func:`xcd_swizzle`.
        TMA: operands are descriptors, see :func:`accumulate_tma`; else pointers.
        EVEN_K: K, of each source, is a multiple of BLOCK_K.
        W_NK: a column of the weight is contiguous.
        SCALES: who has a scale where operands are fp8, see :mod:`taxfree_kernels.fp8`; "none".
        STAGES: of the loop over K where it has other loads, of scales, than those of its operands:
            a loop that says its stages pipelines all loads. Else None.
        FAST: fp8 products are added as matrix instructions do, over all of K.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    SPLIT_K: int
    SWAP_AB: bool
    XCDS: int
    TMA: bool
    EVEN_K: bool
    W_NK: bool
    SCALES: str = "none"
    STAGES: int | None = None
    FAST: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], problem: variant.MatmulProblem, columns: int) -> Tile:
        """The constants of a config; XCDS and TMA are optional in it.

        Args:
            columns: of x, of each source.
        """
        is_even = columns % config["BLOCK_K"] == 0
        stages = config.get("num_stages") if problem.scales == "block" else None
        derived = {
            "EVEN_K": is_even,
            "W_NK": problem.weight_layout == "nk",
            "SCALES": problem.scales,
            "STAGES": stages,
            "FAST": problem.fast_accumulation,
        }
        fields = {"XCDS": 1, "TMA": False, **config, **derived}
        return cls(*(fields[name] for name in cls._fields))


class ScaledStrides(NamedTuple):
    """Strides of an fp8 weight, and pointers to the scales of x and of the weight."""

    k: Any
    columns: Any
    x_scale_ptr: Any
    w_scale_ptr: Any


# -- schedules ----------------------------------------------------------------------------------


@triton.jit
def swizzle2d(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number -> (m, n), walking GROUP_M tiles down before one across, so that L2 is reused."""
    per_group = GROUP_M * tiles_n
    first_m = index // per_group * GROUP_M
    group_size = min(tiles_m - first_m, GROUP_M)
    within = index % per_group
    return first_m + within % group_size, within // group_size


@triton.jit
def index_of_tile(tile_m, tile_n, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The inverse of ``swizzle2d``: the number of the tile at this position."""
    first_m = tile_m // GROUP_M * GROUP_M
    group_size = min(tiles_m - first_m, GROUP_M)
    return first_m * tiles_n + tile_n * group_size + tile_m - first_m


@triton.jit
def xcd_swizzle(index, count, XCDS: tl.constexpr):
    """Renumber `count` programs so that each XCD gets a run of consecutive numbers.

    Devices with several chiplets (XCDs) assign programs to them round-robin, and each has its own
    L2: neighbouring tiles, which share rows or columns, should be on the same XCD.
    """
    if XCDS > 1:
        chiplet, turn = index % XCDS, index // XCDS
        longer = count % XCDS  # XCDs with one program more
        index = chiplet * (count // XCDS) + min(chiplet, longer) + turn
    return index


@triton.jit
def in_turns(program, count, ahead, every, others, XCDS: tl.constexpr):
    """The role of a program in a launch that interleaves two lists of programs.

    The first list has `count` programs, and `ahead` of them have the lowest ids. Then groups of
    `every` programs of the first list alternate with groups of `others` of the second, until the
    first has no full group left. The rest of both lists follows.

    Returns:
        Whether the program belongs to the first list, and its number within its list. In the first
        list, the programs of one group are renumbered by :func:`xcd_swizzle`.
    """
    is_ahead = program < ahead
    turn = min(max(program - ahead, 0) // (every + others), (count - ahead) // every)
    begin = tl.where(is_ahead, 0, ahead + turn * every)
    length = tl.where(is_ahead, ahead, min(every, count - begin))
    rest = program - begin - turn * others
    is_first = rest < length
    first = begin + xcd_swizzle(rest, length, XCDS)
    return is_first, tl.where(is_first, first, turn * others + rest - length)


@triton.jit
def stream_k(program, programs, iterations):
    """The iterations [begin, end) of a program; all programs together have each of them once.

    Numbers of iterations differ by at most one. For tiles of `steps` steps of K each, iteration i
    is step i % steps of tile i // steps.
    """
    return iterations * program // programs, iterations * (program + 1) // programs


@triton.jit
def tile_and_share(number, SPLIT_K: tl.constexpr, STAGGERED: tl.constexpr):
    """The tile of a program, and its share of the tile's K.

    Tiles that all begin at once also end at once, and their stores compete for the same link. Each
    of the first STAGGERED tiles is shared by two programs, the first of which gets from almost none
    to almost all of K. The next programs on their compute units then begin and end staggered.
    """
    tile, split = number // SPLIT_K, number % SPLIT_K
    if STAGGERED > 0:
        is_shared = number < 2 * STAGGERED
        tile = tl.where(is_shared, number // 2, number - STAGGERED)
        split = tl.where(is_shared, number % 2, 0)
    return tile, split


@triton.jit
def rank_rotated(tile_m, first, tiles_m):
    """The row of tiles that a rank computes in place of row `tile_m`, if it begins with `first`."""
    return (tile_m + first) % tiles_m


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


#: the orders of attention's programs, see :func:`attention_tile`
ATTENTION_MAPPINGS = (
    "naive_block_first",
    "swizzled_block_first",
    "naive_head_first",
    "swizzled_head_first",
    "balanced_head_first",
)


@triton.jit
def attention_tile(
    program, blocks, heads, batch, XCDS: tl.constexpr, MAPPING: tl.constexpr
):  # fmt: skip
    """Program id -> (sequence, head, block of query rows), for blocks * heads * batch programs.

    The head is a query head; consecutive heads share keys and values in grouped-query attention.

    Args:
        blocks: blocks of query rows of the longest sequence.
        MAPPING: one of ``ATTENTION_MAPPINGS``. The first four are those of arXiv 2511.02132.
            "naive_block_first": all heads of a block, then the next block.
            "swizzled_block_first": the same; each chiplet has a run of consecutive heads. It keeps
            a head on its chiplet only if XCDS divides heads.
            "naive_head_first": all blocks of a head, then the next head.
            "swizzled_head_first": the same; each chiplet has a run of heads, and splits at most
            its first and last with a neighbour. Programs per chiplet differ by at most one.
            "balanced_head_first": the same; also with a causal mask, where later blocks have more
            keys, chiplets get equal work: see :func:`_balanced_head_first`.
    """
    if MAPPING == "naive_block_first" or MAPPING == "swizzled_block_first":
        head = program % heads
        if MAPPING == "swizzled_block_first":
            head = xcd_swizzle(head, heads, XCDS)
        block = program // heads % blocks
        sequence = program // (heads * blocks)
    elif MAPPING == "balanced_head_first":
        pair, block = _balanced_head_first(program, blocks, heads * batch, XCDS)
        head, sequence = pair % heads, pair // heads
    else:
        index = program
        if MAPPING == "swizzled_head_first":
            index = xcd_swizzle(program, blocks * heads * batch, XCDS)
        block = index % blocks
        head = index // blocks % heads
        sequence = index // (blocks * heads)
    return sequence, head, block


@triton.jit
def _balanced_head_first(program, blocks, pairs, XCDS: tl.constexpr):
    """Program id -> (pair of sequence and head, block), with equal work for all chiplets.

    Each chiplet has the same number of whole pairs. The rest, fewer pairs than chiplets, is cut
    into equal runs of blocks that alternate between the last and the first that is left, so that
    any run has the average work of its blocks. It comes first; then whole pairs, last block first,
    so that a chiplet's last programs are its shortest.
    """
    chiplet, turn = program % XCDS, program // XCDS
    whole = pairs // XCDS
    rest = pairs % XCDS * blocks
    longer = rest % XCDS  # chiplets that get one program more of the rest
    mine = rest // XCDS + tl.where(chiplet < longer, 1, 0)
    first = chiplet * (rest // XCDS) + tl.where(chiplet < longer, chiplet, longer)
    is_rest = turn < mine
    index = tl.where(is_rest, first + turn, turn - mine)
    pair = tl.where(is_rest, whole * XCDS, chiplet * whole) + index // blocks
    nth = index % blocks
    alternating = tl.where(nth % 2 == 0, blocks - 1 - nth // 2, nth // 2)
    return pair, tl.where(is_rest, alternating, blocks - 1 - nth)


# -- loads and sums -----------------------------------------------------------------------------


@triton.jit
def zero_tile(TILE: tl.constexpr):
    """The accumulator of a tile, float32 zeros [BLOCK_M, BLOCK_N], or transposed when SWAP_AB."""
    if TILE.SWAP_AB:
        acc = tl.zeros((TILE.BLOCK_N, TILE.BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((TILE.BLOCK_M, TILE.BLOCK_N), tl.float32)
    return acc


@triton.jit
def select(condition, one, other, ALIGNMENT: tl.constexpr):
    """``tl.where`` for pointers into different tensors.

    Selects integer addresses, because Triton 3.6 cannot select pointers on AMD, and 3.9 loses
    their alignment. ALIGNMENT, in bytes, holds for both pointers.
    """
    address = tl.where(condition, tl.cast(one, tl.int64), tl.cast(other, tl.int64))
    return tl.multiple_of(tl.cast(address, one.dtype), ALIGNMENT)


@triton.jit
def copy(target_ptr, source_ptr, begin, end, BLOCK: tl.constexpr):
    """Copy elements [begin, end); wide accesses need pointers with a 16-byte alignment hint."""
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < end
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def accumulate(
    acc, a_rows, stride_a_source, row_mask, w_cols, stride_wk, col_mask,
    source_begin, source_end, k_per_source, step_begin, step_end,
    SOURCES: tl.constexpr, TILE: tl.constexpr, scales=None,
):  # fmt: skip
    """Add steps [step_begin, step_end) of each source to `acc`; a step is one BLOCK_K of A @ W.

    A single loop covers sources and k, so that its pipeline is filled only once. It contains no
    wait: the software pipeliner would hoist the next loads above the wait.

    Args:
        acc: float32 [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] when SWAP_AB.
        a_rows: pointers [BLOCK_M] to the k = 0 element of each row, of source 0.
        stride_a_source: elements from a source's block of A to the next.
        w_cols: pointers [BLOCK_N] to the k = 0 element of each column.
        source_begin, source_end: the sources, modulo SOURCES.
        scales: see :func:`add_fp8_product`, where operands are fp8.
    """
    steps = max(step_end - step_begin, 1)
    arange_k = tl.arange(0, TILE.BLOCK_K)
    for step in tl.range(
        (source_end - source_begin) * (step_end - step_begin), num_stages=TILE.STAGES
    ):
        source = (source_begin + step // steps) % SOURCES
        k_begin = (step_begin + step % steps) * TILE.BLOCK_K
        k_mask = arange_k < k_per_source - k_begin
        a_offset = source.to(tl.int64) * stride_a_source + k_begin
        w_offset = (source * k_per_source + k_begin).to(tl.int64) * stride_wk
        if TILE.SWAP_AB:
            a_tile = (a_rows + a_offset)[None, :] + arange_k[:, None]
            w_tile = (w_cols + w_offset)[:, None] + (arange_k * stride_wk)[None, :]
            a_mask, w_mask = row_mask[None, :], col_mask[:, None]
            if not TILE.EVEN_K:
                a_mask, w_mask = a_mask & k_mask[:, None], w_mask & k_mask[None, :]
            a = tl.load(a_tile, mask=a_mask, other=0.0)
            w = tl.load(w_tile, mask=w_mask, other=0.0)
            if TILE.SCALES == "none":
                acc = tl.dot(w, a, acc)
            else:
                acc = add_fp8_product(acc, w, a, scales, source, k_begin, TILE)
        else:
            a_tile = (a_rows + a_offset)[:, None] + arange_k[None, :]
            w_tile = (w_cols + w_offset)[None, :] + (arange_k * stride_wk)[:, None]
            a_mask, w_mask = row_mask[:, None], col_mask[None, :]
            if not TILE.EVEN_K:
                a_mask, w_mask = a_mask & k_mask[None, :], w_mask & k_mask[:, None]
            a = tl.load(a_tile, mask=a_mask, other=0.0)
            w = tl.load(w_tile, mask=w_mask, other=0.0)
            if TILE.SCALES == "none":
                acc = tl.dot(a, w, acc)
            else:
                acc = add_fp8_product(acc, a, w, scales, source, k_begin, TILE)
    return acc


@triton.jit
def accumulate_tma(
    acc, a_desc, slot, row, w_desc, col,
    source_begin, source_end, step_begin, step_end,
    SOURCES: tl.constexpr, A_SOURCES: tl.constexpr, TILE: tl.constexpr, scales=None,
):  # fmt: skip
    """Like :func:`accumulate`, with tiles loaded by TMA: no thread computes addresses.

    Args:
        a_desc: of [slots, sources, rows, k of a source].
        w_desc: of [sources, n, k of a source] when W_NK, else of [sources, k of a source, n].
            Elements beyond the last row or k of a source are not accessed and read as 0.
        source_begin, source_end: the sources, modulo SOURCES; `a_desc` holds A_SOURCES of them, or
            one.
    """
    steps = max(step_end - step_begin, 1)
    for step in tl.range(
        (source_end - source_begin) * (step_end - step_begin), num_stages=TILE.STAGES
    ):
        source = (source_begin + step // steps) % SOURCES
        k_begin = (step_begin + step % steps) * TILE.BLOCK_K
        a = a_desc.load([slot, source % A_SOURCES, row, k_begin])
        a = a.reshape(TILE.BLOCK_M, TILE.BLOCK_K)
        if TILE.W_NK:
            w = w_desc.load([source, col, k_begin]).reshape(TILE.BLOCK_N, TILE.BLOCK_K).T
        else:
            w = w_desc.load([source, k_begin, col]).reshape(TILE.BLOCK_K, TILE.BLOCK_N)
        if TILE.SCALES == "none":
            if TILE.SWAP_AB:
                acc = tl.dot(w.T, a.T, acc)
            else:
                acc = tl.dot(a, w, acc)
        else:
            if TILE.SWAP_AB:
                acc = add_fp8_product(acc, w.T, a.T, scales, source, k_begin, TILE)
            else:
                acc = add_fp8_product(acc, a, w, scales, source, k_begin, TILE)
    return acc


# -- fp8 ----------------------------------------------------------------------------------------


@triton.jit
def first_scales(scale_ptr, rows, columns, TILE: tl.constexpr):
    """Pointers [BLOCK_M] to the first scale of rows of x, of so many columns; or a tensor's."""
    if TILE.SCALES == "tensor":
        return scale_ptr
    elif TILE.SCALES == "channel":
        return scale_ptr + rows
    else:
        return scale_ptr + rows * tl.cast(tl.cdiv(columns, BLOCK), tl.int64)


@triton.jit
def scales_of_tile(
    x_scales, w_scale_ptr, row_mask, col_begin, col_end, k, TILE: tl.constexpr, columns=0,
    stride_source=0,
):  # fmt: skip
    """The scales of a tile; loaded before the loop over K, which hides their latency.

    Args:
        x_scales: see :func:`first_scales`; of source 0.
        w_scale_ptr: to scales of the weight; those along k are contiguous.
        k: rows of the weight.
        columns: of x from a source, where there are several.
        stride_source: from a row's scales in a source to those in the next.

    Returns:
        For "tensor", their product; for "channel", those of rows, float32 [BLOCK_M], and of columns
        [BLOCK_N]; for "block", `x_scales`, which rows exist, and [BLOCK_M] times the pointer to
        that of the first block of all columns, because loads of scalars are not pipelined; then
        the blocks of a source, and `stride_source`.
    """
    if TILE.SCALES == "tensor":
        return tl.load(x_scales) * tl.load(w_scale_ptr)
    elif TILE.SCALES == "channel":
        cols = col_begin + tl.arange(0, TILE.BLOCK_N)
        of_rows = tl.load(x_scales, mask=row_mask, other=0.0)
        return of_rows, tl.load(w_scale_ptr + cols, mask=cols < col_end, other=0.0)
    else:
        blocks_of_k = tl.cast(tl.cdiv(k, BLOCK), tl.int64)
        w_ptrs = w_scale_ptr + col_begin // BLOCK * blocks_of_k
        w_ptrs += tl.zeros((TILE.BLOCK_M,), tl.int32)
        return x_scales, row_mask, w_ptrs, tl.cdiv(columns, BLOCK), stride_source


@triton.jit
def add_fp8_product(acc, one, other, scales, source, k_begin, TILE: tl.constexpr):
    """`acc` plus a step of A @ W, or W^T @ A^T when SWAP_AB, both fp8.

    Hopper's matrix instructions add fp8 products with about 14 bits, so that each step is added to
    `acc` by itself. AMD's add in float32: there Triton makes this one instruction where no scale is
    between. Told to promote (``max_num_imprecise_acc``), Triton waits inside of a step.

    Args:
        scales: of the tile; those of blocks are applied here.
        source, k_begin: of the step, which crosses no block.
    """
    if TILE.FAST:
        return tl.dot(one, other, acc)
    product = tl.dot(one, other)
    if TILE.SCALES == "block":
        x_ptrs, row_mask, w_ptrs, groups, stride_source = scales
        group = k_begin // BLOCK
        x_ptrs += source * stride_source + group
        scale = tl.load(x_ptrs, mask=row_mask, other=0.0)
        scale *= tl.load(w_ptrs + source * groups + group, mask=row_mask, other=0.0)
        product *= scale[None, :] if TILE.SWAP_AB else scale[:, None]
    return acc + product


@triton.jit
def scaled_tile(acc, scales, TILE: tl.constexpr):
    """A finished tile [BLOCK_M, BLOCK_N], with what scales the loop has not applied."""
    if TILE.SCALES == "tensor":
        acc = acc * scales
    elif TILE.SCALES == "channel":
        of_rows, of_cols = scales
        acc = acc * of_rows[:, None] * of_cols[None, :]
    return acc


@triton.constexpr_function
def largest_of(element):
    """The largest magnitude of an e4m3."""
    return 240.0 if element == tl.float8e4b8 else 448.0


@triton.jit
def largest_magnitudes(x):
    """Those of rows, without NaNs."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)


@triton.jit
def scale_of(largest, ELEMENT: tl.constexpr):
    """The scales of what has these largest magnitudes, float32."""
    MOST: tl.constexpr = largest_of(ELEMENT)
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32)), LEAST_SCALE)


@triton.jit
def quantised_groups(x, scale, ELEMENT: tl.constexpr):
    """Groups of x in fp8, and their scales.

    Args:
        x: float32 [groups, elements]; elements that do not exist are 0.
        scale: float32, that of all groups, or of each; None: it is found.
        ELEMENT: the e4m3.

    Returns:
        ELEMENT [groups, elements]; float32 [groups].
    """
    MOST: tl.constexpr = largest_of(ELEMENT)
    if scale is None:
        scale = scale_of(largest_magnitudes(x), ELEMENT)
    else:
        scale = scale + tl.zeros((x.shape[0],), tl.float32)
    divided = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    clamped = tl.minimum(tl.maximum(divided, -MOST), MOST)
    return tl.where(divided == divided, clamped, divided).to(ELEMENT), scale


@triton.jit
def rows_in_fp8(x, ELEMENT: tl.constexpr):
    """Rows of x in fp8, and their scales: powers of two, by which all elements divide exactly.

    Args:
        x: float32 [rows, columns].
        ELEMENT: the e4m3.

    Returns:
        ELEMENT [rows, columns]; float32 [rows].
    """
    MOST: tl.constexpr = largest_of(ELEMENT)
    least = tl.div_rn(largest_magnitudes(x), tl.full((x.shape[0],), MOST, tl.float32))
    rounded_up = least.to(tl.int32, bitcast=True) + 0x7FFFFF & 0x7F800000
    scale = tl.maximum(rounded_up.to(tl.float32, bitcast=True), LEAST_SCALE)
    inverse = tl.div_rn(tl.full((x.shape[0],), 1.0, tl.float32), scale)
    return (x * inverse[:, None]).to(ELEMENT), scale
