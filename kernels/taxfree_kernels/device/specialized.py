"""Device functions of Gluon kernels for Hopper whose warps have roles: one loads, others multiply.

A producer warp loads boxes of both operands by TMA. One or two consumers multiply them. A consumer
is one warpgroup or two, each with 64 rows of the product, those of a matrix instruction (64 columns
when SWAP_AB, which computes W^T A^T).

Barriers of shared memory. Each stage of boxes has one that counts the bytes that have arrived, and
one that counts the consumers that have read them. A stage's n-th use has parity n % 2; the first
wait for an empty stage passes at once, because its parity is that of a phase before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from taxfree_kernels.device.tiles import BLOCK

# Triton 3.6 has the old name alone; later versions refuse it.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class Boxes(NamedTuple):
    """Shared memory: boxes of the operand whose rows consumers share, of the other; barriers."""

    long: Any
    other: Any
    full: Any
    empty: Any


@gluon.constexpr_function
def accumulators(columns, warps=4, item_bytes=2):
    """The layout of a product of 16 rows for each warp of a consumer, and of so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 32 // item_bytes])


@gluon.constexpr_function
def lines(columns, warps=4):
    """Like :func:`accumulators`, but eight threads have 128 bytes of bf16 of a row: a cache line.

    Only threads of one warp exchange elements to get from one to the other.

    Args:
        columns: a power of two, at least 64.
        warps: 4 or 8.
    """
    wider = [[0, 1 << bit] for bit in range(6, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [4, 0], [8, 0], *wider],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]][: warps.bit_length() - 1],
        block_bases=[],
        shape=[16 * warps, columns],
    )


def reinterpreted(
    block: Any, shape: Any, layout: Any, dtype: Any = None, _semantic: Any = None
) -> Any:
    """Shared memory in another shape and layout; the method's name differs between Tritons."""
    unwrap = gl._core._unwrap_if_constexpr
    sizes = [unwrap(each) for each in unwrap(shape)]
    element = unwrap(dtype) or block.dtype
    return _semantic.memdesc_reinterpret(block, element, sizes, unwrap(layout))


reinterpreted.__triton_builtin__ = True  # type: ignore[attr-defined]


@gluon.jit
def make_boxes(
    a_desc, w_desc, SWAP_AB: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    LOADERS: gl.constexpr = 1,
):  # fmt: skip
    """Allocate boxes for so many stages and consumers, and make their barriers.

    Args:
        a_desc, w_desc: their boxes have the rows of one consumer, and all rows of the other side.
        LOADERS: warps that announce bytes of each stage.
    """
    LONG: gl.constexpr = w_desc if SWAP_AB else a_desc
    OTHER: gl.constexpr = a_desc if SWAP_AB else w_desc
    dtype: gl.constexpr = w_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = Boxes(
        gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS] + LONG.block_shape, LONG.layout),
        gl.allocate_shared_memory(dtype, [STAGES] + OTHER.block_shape, OTHER.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(boxes.full.index(stage), count=LOADERS)
        mbarrier.init(boxes.empty.index(stage), count=CONSUMERS)
    return boxes


@gluon.jit
def scales_of_product(
    row, row_end, col, col_end, x_scale_ptr, w_scale_ptr,
    COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Of a consumer's fp8 product: that of tensors, or of rows of x and columns of the weight."""
    if TILE.SCALES == "tensor":
        return gl.load(x_scale_ptr) * gl.load(w_scale_ptr)
    else:
        if TILE.SWAP_AB:
            rows = row + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        else:
            rows = row + gl.arange(0, 16 * gl.num_warps(), gl.SliceLayout(1, LAYOUT))
        of_rows = gl.load(x_scale_ptr + rows, mask=rows < row_end, other=0.0)
        if TILE.SWAP_AB:
            cols = col + gl.arange(0, 16 * gl.num_warps(), gl.SliceLayout(1, LAYOUT))
        else:
            cols = col + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        return of_rows, gl.load(w_scale_ptr + cols, mask=cols < col_end, other=0.0)


@gluon.jit
def scaled_product(acc, scales, TILE: gl.constexpr):
    """A product times what :func:`scales_of_product` has found."""
    if TILE.SCALES == "tensor":
        return acc * scales
    else:
        of_rows, of_cols = scales
        if TILE.SWAP_AB:
            return acc * of_rows[None, :] * of_cols[:, None]
        else:
            return acc * of_rows[:, None] * of_cols[None, :]


@gluon.jit
def multiply_tile_fp8(
    steps, boxes, row, row_end, col, col_end, k, x_scale_ptr, w_scale_ptr,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`multiply`, of the only consumer, of fp8 factors with scales."""
    COLUMNS: gl.constexpr = TILE.BLOCK_M if TILE.SWAP_AB else TILE.BLOCK_N
    LAYOUT: gl.constexpr = accumulators(COLUMNS, gl.num_warps(), 1)
    if TILE.SCALES == "block":
        groups = gl.cdiv(k, BLOCK)
        w_ptr = w_scale_ptr + col // BLOCK * groups.to(gl.int64)
        scales = x_scale_ptr, w_ptr, row, row_end, groups
        return add_products(0, 1, steps, boxes, scales, _scales_of_tile, None, 2, TILE, 1, STAGES)
    else:
        scales = scales_of_product(
            row, row_end, col, col_end, x_scale_ptr, w_scale_ptr, COLUMNS, LAYOUT, TILE
        )
        if TILE.FAST:
            acc = multiply(0, steps, boxes, TILE, 1, STAGES)
            mbarrier.arrive(boxes.empty.index((steps - 1) % STAGES), count=1)
        else:
            acc = add_products(0, 1, steps, boxes, None, None, None, 2, TILE, 1, STAGES)
        return scaled_product(acc, scales, TILE)


@gluon.jit
def _scales_of_tile(scales, source, first, ROWS: gl.constexpr, CONSTANTS: gl.constexpr):
    x_ptr, w_ptr, row, row_end, groups = scales
    return scales_of_groups(x_ptr, w_ptr, row, row_end, groups, first, groups, ROWS)


@gluon.jit
def scales_of_groups(x_ptr, w_ptr, row, row_end, stride, first, end, ROWS: gl.constexpr):
    """Scales of some groups of k, from `first` on: of rows, float32 [ROWS, 16], of columns [1, 16].

    Args:
        x_ptr: to the scales of row 0, `stride` apart from row to row.
        w_ptr: to those of the columns.
        end: of the groups.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = (row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))[:, None]
    group = first + gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    x_ptrs = x_ptr + rows.to(gl.int64) * stride + group
    of_rows = gl.load(x_ptrs, mask=(rows < row_end) & (group < end), other=0.0)
    return of_rows, gl.load(w_ptr + group, mask=group < end, other=0.0)


@gluon.jit
def add_products(
    part: gl.constexpr, sources: gl.constexpr, steps, boxes, scales, SCALES_OF: gl.constexpr,
    CONSTANTS: gl.constexpr, AT_ONCE: gl.constexpr,
    TILE: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`multiply`, of fp8 factors, each step added by itself.

    See ``tiles.add_fp8_product``. Scales of blocks multiply products; others are left to callers.

    A thread's rows of the product are in as many lines of the scales of blocks, and a load that a
    step waits for takes longer than the step. So rows are read 16 groups at a time, before those
    are needed, and their products with the scales of columns are in shared memory.

    Args:
        sources: of parts of K, of so many steps each, that follow one another.
        SCALES_OF: takes `scales`, a source that has arrived, a step of it, ROWS and CONSTANTS, to
            return what :func:`scales_of_groups` does.
        AT_ONCE: 2: a step is added while the next one is multiplied; 1.
    """
    GROUPS: gl.constexpr = 16
    BY_BLOCK: gl.constexpr = TILE.SCALES == "block"
    COLUMNS: gl.constexpr = TILE.BLOCK_M if TILE.SWAP_AB else TILE.BLOCK_N
    ROWS: gl.constexpr = 16 * gl.num_warps()
    LAYOUT: gl.constexpr = accumulators(COLUMNS, gl.num_warps(), 1)
    ring = None
    if BY_BLOCK:
        X_ROWS: gl.constexpr = COLUMNS if TILE.SWAP_AB else ROWS
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ring = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, X_ROWS], flat)
        halves = reinterpreted(ring, [2, GROUPS, X_ROWS], square)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    none = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    gl.assume(steps > 0)
    whole = steps // AT_ONCE * AT_ONCE
    for source in range(sources):
        begin = source * steps
        if BY_BLOCK:
            if sources > 1:
                if source > 0:  # its scales come with its rows
                    mbarrier.wait(boxes.full.index(begin % STAGES), begin // STAGES & 1)
            of_rows, of_cols = SCALES_OF(scales, source, 0, X_ROWS, CONSTANTS)
            halves.index(0).store((of_rows * of_cols).permute((1, 0)))
        for first in range(0, whole, GROUPS):
            if BY_BLOCK:
                of_rows, of_cols = SCALES_OF(scales, source, first + GROUPS, X_ROWS, CONSTANTS)
            for step in range(first, gl.minimum(first + GROUPS, whole), AT_ONCE):
                one = _multiply_step(part, begin + step, boxes, none, TILE, CONSUMERS, STAGES)
                if AT_ONCE == 2:
                    other = _multiply_step(
                        part, begin + step + 1, boxes, none, TILE, CONSUMERS, STAGES
                    )
                product = warpgroup_mma_wait(AT_ONCE - 1, deps=[one])
                acc = _add_step(acc, product, begin, step, boxes, ring, TILE, STAGES)
                if AT_ONCE == 2:
                    product = warpgroup_mma_wait(0, deps=[other])
                    acc = _add_step(acc, product, begin, step + 1, boxes, ring, TILE, STAGES)
            if BY_BLOCK:
                # multiplied here, for a product where they are loaded would wait for them
                halves.index((first // GROUPS + 1) % 2).store((of_rows * of_cols).permute((1, 0)))
        if AT_ONCE == 2:
            if steps > whole:
                one = _multiply_step(part, begin + whole, boxes, none, TILE, CONSUMERS, STAGES)
                product = warpgroup_mma_wait(0, deps=[one])
                acc = _add_step(acc, product, begin, whole, boxes, ring, TILE, STAGES)
    return acc


@gluon.jit
def _multiply_step(
    part: gl.constexpr, number, boxes, none,
    TILE: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to multiply a step, once it has arrived."""
    long, other = _boxes_of_step(
        part, number, boxes, none.shape[0], none.shape[1], TILE.BLOCK_K, CONSUMERS, STAGES
    )
    return warpgroup_mma(long, other, none, use_acc=False, is_async=True)


@gluon.jit
def _add_step(acc, product, begin, step, boxes, ring, TILE: gl.constexpr, STAGES: gl.constexpr):
    """`acc` plus a step's product, times its scales in `ring`; the step is number begin + step."""
    mbarrier.arrive(boxes.empty.index((begin + step) % STAGES), count=1)
    if TILE.SCALES == "block":
        layout: gl.constexpr = gl.SliceLayout(0 if TILE.SWAP_AB else 1, acc.type.layout)
        of_rows = ring.index(step % ring.shape[0]).load(layout)
        product *= of_rows[None, :] if TILE.SWAP_AB else of_rows[:, None]
    return acc + product


@gluon.jit
def multiply_fp8(
    part: gl.constexpr, steps, boxes, scales,
    TILE: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`multiply`, of fp8 factors, times their scales.

    Each step is added by itself: see ``tiles.add_fp8_product``.

    Args:
        scales: of :func:`scales_of_product`.
    """
    COLUMNS: gl.constexpr = TILE.BLOCK_M if TILE.SWAP_AB else TILE.BLOCK_N
    ROWS: gl.constexpr = 16 * gl.num_warps()
    LAYOUT: gl.constexpr = accumulators(COLUMNS, gl.num_warps(), 1)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    none = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    gl.assume(steps > 0)
    for step in range(steps):
        product = _multiply_step(part, step, boxes, none, TILE, CONSUMERS, STAGES)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(boxes.empty.index(step % STAGES), count=1)
        acc += product
    return scaled_product(acc, scales, TILE)


@gluon.jit
def multiply(
    part: gl.constexpr, steps, boxes,
    TILE: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, FOLD: gl.constexpr = 1,
):  # fmt: skip
    """Multiply this consumer's rows of a tile, or its columns when SWAP_AB, as boxes arrive.

    The boxes of the last step are not handed back: a program has one tile.

    Args:
        part: number of this consumer.
        steps: of K, at least one.
        FOLD: parts of a step's K that boxes have side by side.

    Returns:
        float32 [16 * warps, FOLD * BLOCK_N], or [16 * warps, FOLD * BLOCK_M] when SWAP_AB.
    """
    COLUMNS: gl.constexpr = FOLD * (TILE.BLOCK_M if TILE.SWAP_AB else TILE.BLOCK_N)
    ROWS: gl.constexpr = 16 * gl.num_warps()
    ITEM: gl.constexpr = boxes.long.dtype.primitive_bitwidth // 8
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, accumulators(COLUMNS, gl.num_warps(), ITEM))
    gl.assume(steps > 0)
    for step in range(steps):
        long, other = _boxes_of_step(
            part, step, boxes, ROWS, COLUMNS, TILE.BLOCK_K // FOLD, CONSUMERS, STAGES
        )
        acc = warpgroup_mma(long, other, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        last = (step + STAGES - 1) % STAGES
        mbarrier.arrive(boxes.empty.index(last), count=1, pred=step > 0)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _boxes_of_step(
    part: gl.constexpr, number, boxes, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A step's operands, [ROWS, WIDTH] and [WIDTH, COLUMNS], once they have arrived."""
    stage = number % STAGES
    mbarrier.wait(boxes.full.index(stage), number // STAGES & 1)
    long = boxes.long.index(stage * CONSUMERS + part).reshape([ROWS, WIDTH])
    return long, boxes.other.index(stage).reshape([COLUMNS, WIDTH]).permute((1, 0))
