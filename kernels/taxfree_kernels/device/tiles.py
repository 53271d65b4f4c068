"""Device functions on tiles: program order, copies, and the matmul main loop over gathered rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number -> (m, n), walking GROUP_M tiles down before one across, so that L2 is reused."""
    per_group = GROUP_M * tiles_n
    first_m = index // per_group * GROUP_M
    group_size = min(tiles_m - first_m, GROUP_M)
    within = index % per_group
    return first_m + within % group_size, within // group_size


@triton.jit
def select(condition, one, other, ALIGNMENT: tl.constexpr):
    """``tl.where`` for pointers into different tensors.

    Through addresses, because Triton 3.6 cannot select pointers on AMD, and 3.9 forgets their
    alignment: ALIGNMENT is what both are known to have, in bytes.
    """
    address = tl.where(condition, tl.cast(one, tl.int64), tl.cast(other, tl.int64))
    return tl.multiple_of(tl.cast(address, one.dtype), ALIGNMENT)


@triton.jit
def copy(target_ptr, source_ptr, begin, end, BLOCK: tl.constexpr):
    """Copy elements [begin, end); both pointers should be known to be aligned to 16 bytes."""
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=mask), mask=mask)


@triton.jit
def prefetch(w_cols, k_begin, k_end, BACKEND: tl.constexpr):
    """Ask for rows [k_begin, k_end) of the columns at `w_cols` in the L2 cache, and go on.

    So that memory is busy while a program waits for activations. K must be the contiguous
    dimension of W, and the bounds multiples of 32. Only where the hardware copies in bulk.
    """
    if BACKEND == "cuda":
        item_bytes: tl.constexpr = w_cols.dtype.element_ty.primitive_bitwidth // 8
        half = (k_end - k_begin) // 2  # two requests a column: one for each thread of a tile
        k = k_begin + half * tl.arange(0, 2)
        address = tl.cast(w_cols, tl.int64)[:, None] + k[None, :] * item_bytes
        size = tl.zeros_like(address).to(tl.int32) + half * item_bytes
        if half > 0:
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                [address, size], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def accumulate(
    acc, a_rows, stride_a_source, row_mask, w_cols, stride_wk, col_mask,
    first_source, k_per_source, step_begin, step_end,
    SOURCES: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """Add steps [step_begin, step_end) of A @ W to `acc`; a step is one BLOCK_K of a source.

    One loop runs over sources and k together, so that its pipeline is filled once. It contains no
    wait: the software pipeliner would issue the next loads above it.

    Args:
        acc: float32 [BLOCK_M, BLOCK_N], or [BLOCK_N, BLOCK_M] when SWAP_AB.
        a_rows: pointers [BLOCK_M] to the k = 0 element of each row, of source 0.
        stride_a_source: elements from a source's block of A to the next.
        w_cols: pointers [BLOCK_N] to the k = 0 element of each column.
        first_source: the source of step 0; the others follow it, modulo SOURCES.
        SWAP_AB: multiply W^T by A^T, so that the long side of W is the long side of the
            matrix instruction when there are few rows.
    """
    steps_per_source = tl.cdiv(k_per_source, BLOCK_K)
    arange_k = tl.arange(0, BLOCK_K)
    for step in range(step_begin, step_end):
        source = (first_source + step // steps_per_source) % SOURCES
        k_begin = (step % steps_per_source) * BLOCK_K
        k_mask = arange_k < k_per_source - k_begin
        a_offset = source.to(tl.int64) * stride_a_source + k_begin
        w_offset = (source * k_per_source + k_begin).to(tl.int64) * stride_wk
        if SWAP_AB:
            a_tile = (a_rows + a_offset)[None, :] + arange_k[:, None]
            w_tile = (w_cols + w_offset)[:, None] + (arange_k * stride_wk)[None, :]
            a_mask, w_mask = row_mask[None, :], col_mask[:, None]
            if not EVEN_K:
                a_mask, w_mask = a_mask & k_mask[:, None], w_mask & k_mask[None, :]
            a = tl.load(a_tile, mask=a_mask, other=0.0)
            w = tl.load(w_tile, mask=w_mask, other=0.0)
            acc = tl.dot(w, a, acc)
        else:
            a_tile = (a_rows + a_offset)[:, None] + arange_k[None, :]
            w_tile = (w_cols + w_offset)[None, :] + (arange_k * stride_wk)[:, None]
            a_mask, w_mask = row_mask[:, None], col_mask[None, :]
            if not EVEN_K:
                a_mask, w_mask = a_mask & k_mask[None, :], w_mask & k_mask[:, None]
            a = tl.load(a_tile, mask=a_mask, other=0.0)
            w = tl.load(w_tile, mask=w_mask, other=0.0)
            acc = tl.dot(a, w, acc)
    return acc
