"""Device functions that merge parts: those of a rank's splits, and those of all ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.flash_decode.attend import store_rows


@triton.jit
def merge_rows(
    parts_ptr, part_elements, row, row_mask, rows,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge rows of PARTS parts, always in the same order.

    Args:
        parts_ptr: the first part; part_elements: from one to the next.
        row: int32 [ROWS] of the parts' `rows`.
        PARTS_BLOCK: parts that are loaded at a time.

    Returns:
        out float32 [ROWS, next_power_of_2(V_DIM)] and lse float32 [ROWS].
    """
    BLOCK_V: tl.constexpr = triton.next_power_of_2(V_DIM)
    lse_ptr = parts_ptr + rows * V_DIM + row
    all_parts: tl.constexpr = triton.next_power_of_2(PARTS)
    part = tl.arange(0, all_parts).to(tl.int64)
    lse = tl.load(
        lse_ptr[None, :] + (part * part_elements)[:, None],
        mask=(part < PARTS)[:, None] & row_mask[None, :], other=float("-inf"),
    )  # fmt: skip
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # rows without keys: all weights become 0
    total = tl.sum(tl.exp2(lse - top[None, :]), 0)

    dv = tl.arange(0, BLOCK_V)
    mask = row_mask[:, None] & (dv < V_DIM)[None, :]
    out_ptr = parts_ptr + row[:, None] * V_DIM + dv[None, :]
    out = tl.zeros((ROWS, BLOCK_V), tl.float32)
    if PARTS <= 4 * PARTS_BLOCK:  # unrolled, all loads are under way together
        for first in tl.static_range(0, PARTS, PARTS_BLOCK):
            out += _weighted_sum(
                out_ptr, lse_ptr, part_elements, first, top, row_mask, mask, PARTS, PARTS_BLOCK
            )
    else:
        for first in range(0, PARTS, PARTS_BLOCK):
            out += _weighted_sum(
                out_ptr, lse_ptr, part_elements, first, top, row_mask, mask, PARTS, PARTS_BLOCK
            )
    divisor = tl.where(total > 0, total, 1.0)
    return out / divisor[:, None], tl.where(total > 0, top + tl.log2(divisor), float("-inf"))


@triton.jit
def _weighted_sum(
    out_ptr, lse_ptr, part_elements, first, top, row_mask, mask,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of PARTS_BLOCK parts' outputs, each times two to the power of its lse - top."""
    part = first + tl.arange(0, PARTS_BLOCK).to(tl.int64)
    is_part = part < PARTS
    offset = part * part_elements
    lse = tl.load(
        lse_ptr[None, :] + offset[:, None],
        mask=is_part[:, None] & row_mask[None, :], other=float("-inf"),
    )  # fmt: skip
    tile = tl.load(
        out_ptr[None, :, :] + offset[:, None, None],
        mask=is_part[:, None, None] & mask[None, :, :], other=0.0,
    )  # fmt: skip
    return tl.sum(tile * tl.exp2(lse - top[None, :])[:, :, None], 0)


@triton.jit
def merge_into_part(
    tile, parts_ptr, part_ptr, part_elements, rows,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge a tile of ROWS rows into a part."""
    row = tile * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    out, lse = merge_rows(
        parts_ptr, part_elements, row, row_mask, rows, PARTS, PARTS_BLOCK, V_DIM, ROWS
    )
    store_rows(part_ptr, out, lse, row, row_mask, rows, V_DIM)


@triton.jit
def merge_into_output(
    tile, parts_ptr, out_ptr, part_elements, rows, arrived,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge a tile of ROWS rows into out [rows, V_DIM]; NaN if not all have arrived."""
    BLOCK_V: tl.constexpr = triton.next_power_of_2(V_DIM)
    row = tile * ROWS + tl.arange(0, ROWS)
    row_mask = row < rows
    out, _ = merge_rows(
        parts_ptr, part_elements, row, row_mask, rows, PARTS, PARTS_BLOCK, V_DIM, ROWS
    )
    out = tl.where(arrived, out, float("nan"))
    dv = tl.arange(0, BLOCK_V)
    tl.store(
        out_ptr + row[:, None] * V_DIM + dv[None, :], out.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (dv < V_DIM)[None, :],
    )  # fmt: skip
