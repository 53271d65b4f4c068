"""Device functions that merge parts: those of a sequence's splits, and those of all ranks."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Merge(NamedTuple):
    """The constants of merging a rank's splits: ``MERGE: tl.constexpr``.

    Args:
        Q_HEADS, V_DIM: of the problem.
        PARTS: number of parts of each row; 0 if kernels read it from the parts' runs.
        PARTS_BLOCK: parts loaded at a time.
        ROWS: rows merged at a time.
    """

    Q_HEADS: int
    PARTS: int
    PARTS_BLOCK: int
    V_DIM: int
    ROWS: int


@triton.jit
def merge_splits(row, row_mask, parts, MERGE: tl.constexpr):
    """Merge the parts of this rank's splits, as ``attend`` writes them, for some rows.

    Args:
        row: int32 [ROWS] of batch * Q_HEADS.

    Returns:
        out float32 [ROWS, next_power_of_2(V_DIM)] and lse float32 [ROWS].
    """
    parts_ptr = parts.ptr
    head = row % MERGE.Q_HEADS
    count = tl.where(row_mask, MERGE.PARTS, 0)
    if MERGE.PARTS == 0:
        first = tl.load(parts.runs_ptr + 2 * row, mask=row_mask, other=0).to(tl.int64)
        parts_ptr += first * parts.stride_slot
        count = tl.load(parts.runs_ptr + 2 * row + 1, mask=row_mask, other=0)
    return _merge(
        parts_ptr + head * MERGE.V_DIM, parts_ptr + MERGE.Q_HEADS * MERGE.V_DIM + head,
        parts.stride_slot, count, MERGE.PARTS, MERGE.PARTS_BLOCK, MERGE.V_DIM,
    )  # fmt: skip


@triton.jit
def merge_ranks(
    row, row_mask, parts_ptr, part_elements, rows, GROUP: tl.constexpr, SOURCES_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
):  # fmt: skip
    """Merge some of the `rows` of the parts of all ranks; returns out and lse as for splits."""
    return _merge(
        parts_ptr + row * V_DIM, parts_ptr + rows * V_DIM + row, part_elements,
        tl.where(row_mask, GROUP.WORLD, 0), GROUP.WORLD, SOURCES_BLOCK, V_DIM,
    )  # fmt: skip


@triton.jit
def _merge(
    out_ptrs, lse_ptrs, part_elements, count,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """Merge `count` parts of each row, always in the same order.

    Args:
        out_ptrs, lse_ptrs: [ROWS], addresses of each row in its first part.
        count: int32 [ROWS]; at most PARTS unless that is 0.
    """
    top = tl.full(count.shape, float("-inf"), tl.float32)
    total = tl.zeros(count.shape, tl.float32)
    out = tl.zeros((count.shape[0], triton.next_power_of_2(V_DIM)), tl.float32)
    if PARTS > 0 and PARTS <= 4 * PARTS_BLOCK:  # unrolled, all loads are in flight together
        for first in tl.static_range(0, PARTS, PARTS_BLOCK):
            out, total, top = _add_parts(
                out, total, top, first, out_ptrs, lse_ptrs, part_elements, count, PARTS_BLOCK, V_DIM
            )
    else:
        for first in range(0, tl.max(count, 0), PARTS_BLOCK):
            out, total, top = _add_parts(
                out, total, top, first, out_ptrs, lse_ptrs, part_elements, count, PARTS_BLOCK, V_DIM
            )
    divisor = tl.where(total > 0, total, 1.0)
    return out / divisor[:, None], tl.where(total > 0, top + tl.log2(divisor), float("-inf"))


@triton.jit
def _add_parts(
    out, total, top, first, out_ptrs, lse_ptrs, part_elements, count,
    PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """Add PARTS_BLOCK parts; their outputs and log-sum-exps are loaded concurrently."""
    part = first + tl.arange(0, PARTS_BLOCK)
    is_part = part[:, None] < count[None, :]
    offset = part.to(tl.int64) * part_elements
    dv = tl.arange(0, out.shape[1])
    tile = tl.load(
        out_ptrs[None, :, None] + offset[:, None, None] + dv[None, None, :],
        mask=is_part[:, :, None] & (dv < V_DIM)[None, None, :], other=0.0,
    )  # fmt: skip
    lse = tl.load(lse_ptrs[None, :] + offset[:, None], mask=is_part, other=float("-inf"))
    new_top = tl.maximum(top, tl.max(lse, 0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no keys so far: all weights are 0
    weight, kept = tl.exp2(lse - base[None, :]), tl.exp2(top - base)
    out = out * kept[:, None] + tl.sum(tile * weight[:, :, None], 0)
    return out, total * kept + tl.sum(weight, 0), new_top


@triton.jit
def store_output(out_ptr, out, row, row_mask, V_DIM: tl.constexpr):
    """Write rows of out [., V_DIM], in its own type."""
    dv = tl.arange(0, out.shape[1])
    tl.store(
        out_ptr + row[:, None] * V_DIM + dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (dv < V_DIM)[None, :],
    )
