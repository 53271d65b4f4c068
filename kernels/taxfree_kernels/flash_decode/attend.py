"""Device function of all variants: attention of some query heads over a split of this rank's keys.

The online softmax works in base 2. A *part* is the partial result over some of the keys: float32
[rows, v_head_dim] of outputs, each normalised over those keys alone, then float32 [rows] of their
log-sum-exps (base 2; without keys, minus infinity and an output of 0).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from taxfree_kernels.device.tiles import xcd_swizzle

_LOG2_E = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """The tensors of a call.

    Args:
        q_ptr: [batch, Q_HEADS, HEAD_DIM], contiguous.
        k_ptr, v_ptr: [batch, capacity, KV_HEADS, .] or, if PAGE, pages [., PAGE, KV_HEADS, .];
            heads are contiguous.
        lens_ptr: int32 [WORLD, batch].
        table_ptr: int32 [batch, cdiv(capacity, PAGE)].
        scaling_ptr: float32 [2]: scale and soft cap; with KV_SCALES also those scales of keys and
            of values, float32 [1] or [KV_HEADS]: three pointers.
        stride_k, stride_v: of the first three dimensions.
    """

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    lens_ptr: Any
    table_ptr: Any
    scaling_ptr: Any
    stride_k: Any
    stride_v: Any


class Parts(NamedTuple):
    """The parts of a rank's splits.

    Args:
        ptr: float32, one part of Q_HEADS rows per slot.
        stride_slot: elements from one slot's part to the next one's.
        runs_ptr: int32 [batch * Q_HEADS, 2]: the first slot of the row's sequence, and its number
            of slots; written if there are several sequences.
    """

    ptr: Any
    stride_slot: Any
    runs_ptr: Any


class Heads(NamedTuple):
    """The problem's constants: ``HEADS: tl.constexpr``.

    PAGE is 0 for a cache without pages, WINDOW is 0 for attention without a window; KV_SCALES: see
    ``HeadsProblem``.
    """

    Q_HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    V_DIM: int
    PAGE: int
    SOFT_CAP: bool
    WINDOW: int
    KV_SCALES: str = "none"


class Splits(NamedTuple):
    """The constants of split-KV: ``SPLIT: tl.constexpr``.

    Args:
        BATCH_BLOCK: next_power_of_2(batch).
        SPLITS: slots per sequence.
        BLOCK_H: query heads of a program.
        BLOCK_N: keys of a step.
        XCDS: number of chiplets to swizzle for.
    """

    BATCH_BLOCK: int
    SPLITS: int
    BLOCK_H: int
    BLOCK_N: int
    XCDS: int


@triton.jit
def attend(
    index, inputs, batch, capacity, parts, rank,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write the part of one split of one sequence for up to BLOCK_H query heads of one kv head.

    Args:
        index: of slot, kv head and block of query heads, the last varying fastest. There are
            batch * SPLITS slots, assigned to the sequences by :func:`split_of`.

    Returns:
        group: index of sequence, kv head and block of query heads; -1 for an unused slot.
        splits: int32 [BATCH_BLOCK]: the number of splits of each sequence.
    """
    GROUP_SIZE: tl.constexpr = HEADS.Q_HEADS // HEADS.KV_HEADS
    BLOCK_H: tl.constexpr = SPLIT.BLOCK_H
    BLOCK_N: tl.constexpr = SPLIT.BLOCK_N
    HEAD_BLOCKS: tl.constexpr = (GROUP_SIZE + BLOCK_H - 1) // BLOCK_H
    HEAD_DIM: tl.constexpr = HEADS.HEAD_DIM
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    V_DIM: tl.constexpr = HEADS.V_DIM
    BLOCK_V: tl.constexpr = triton.next_power_of_2(V_DIM)
    columns: tl.constexpr = HEADS.KV_HEADS * HEAD_BLOCKS
    k_ptr, v_ptr, table_ptr = inputs.k_ptr, inputs.v_ptr, inputs.table_ptr
    if HEADS.KV_SCALES == "none":
        scaling_ptr = inputs.scaling_ptr
    else:
        scaling_ptr, k_scale_ptr, v_scale_ptr = inputs.scaling_ptr
    stride_kb, stride_kn, stride_kh = inputs.stride_k
    stride_vb, stride_vn, stride_vh = inputs.stride_v
    index = xcd_swizzle(index, batch * SPLIT.SPLITS * columns, SPLIT.XCDS)
    slot, column = index // columns, index % columns
    kv_head = column // HEAD_BLOCKS
    sequence, split, own_splits, begin, end, splits = split_of(
        slot, tl.arange(0, SPLIT.BATCH_BLOCK), inputs.lens_ptr, batch, capacity, rank, GROUP,
        HEADS.WINDOW, SPLIT,
    )  # fmt: skip
    head = column % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)  # of the group
    head_mask = head < tl.where(sequence < batch, GROUP_SIZE, 0)
    head += kv_head * GROUP_SIZE
    row = sequence * HEADS.Q_HEADS + head
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    d_mask, dv_mask = d < HEAD_DIM, dv < V_DIM

    q = tl.load(
        inputs.q_ptr + row[:, None] * HEAD_DIM + d[None, :],
        mask=head_mask[:, None] & d_mask[None, :], other=0.0,
    )  # fmt: skip
    factor = tl.load(scaling_ptr) * _LOG2_E
    if HEADS.SOFT_CAP:
        cap = tl.load(scaling_ptr + 1)
        factor, cap_log2 = tl.load(scaling_ptr) / cap, cap * _LOG2_E
    if HEADS.KV_SCALES != "none":
        of_head = kv_head if HEADS.KV_SCALES == "head" else 0
        factor *= tl.load(k_scale_ptr + of_head)
    if SPLIT.BATCH_BLOCK > 1:
        if split == 0:
            tl.store(parts.runs_ptr + 2 * row, slot + row * 0, mask=head_mask)
            tl.store(parts.runs_ptr + 2 * row + 1, own_splits + row * 0, mask=head_mask)

    PAGE: tl.constexpr = HEADS.PAGE
    if PAGE > 0:
        table_ptr += sequence.to(tl.int64) * tl.cdiv(capacity, PAGE)
    else:
        k_ptr += sequence.to(tl.int64) * stride_kb
        v_ptr += sequence.to(tl.int64) * stride_vb
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    arange_n = tl.arange(0, BLOCK_N)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    # Summed after the loop: inside it, a sum over keys would go through shared memory each time.
    totals = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + arange_n
        n_mask = n < end
        if PAGE > 0:
            page = tl.load(table_ptr + n // PAGE, mask=n_mask, other=0).to(tl.int64)
            k_rows = k_ptr + page * stride_kb + n % PAGE * stride_kn
            v_rows = v_ptr + page * stride_vb + n % PAGE * stride_vn
        else:
            first = tl.cast(start, tl.int64)
            k_rows = k_ptr + first * stride_kn + arange_n * stride_kn
            v_rows = v_ptr + first * stride_vn + arange_n * stride_vn
        k_mask = n_mask[None, :]
        if HEAD_DIM != BLOCK_D:
            k_mask = k_mask & d_mask[:, None]
        k = tl.load(k_rows[None, :] + d[:, None], mask=k_mask, other=0.0).to(q.dtype)
        logits = tl.dot(q, k) * factor
        if HEADS.SOFT_CAP:
            logits = tanh(logits) * cap_log2
        logits = tl.where(n_mask[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        kept = tl.exp2(top - new_top)
        totals = totals * kept[:, None] + weights
        v_mask = n_mask[:, None]
        if V_DIM != BLOCK_V:
            v_mask = v_mask & dv_mask[None, :]
        v = tl.load(v_rows[:, None] + dv[None, :], mask=v_mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None])
        top = new_top

    total = tl.sum(totals, 1)
    divisor = tl.where(total > 0, total, 1.0)
    out = acc / divisor[:, None]
    if HEADS.KV_SCALES != "none":
        out *= tl.load(v_scale_ptr + of_head)
    lse = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
    part_ptr = parts.ptr + slot.to(tl.int64) * parts.stride_slot
    store_rows(part_ptr, out, lse, head, head_mask, HEADS.Q_HEADS, V_DIM)
    group = tl.where(sequence < batch, sequence * columns + column, -1)
    return group, splits


@triton.jit
def split_of(
    slot, every, lens_ptr, batch, capacity, rank,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The work of one of batch * SPLITS slots, given the lengths in device memory.

    Each sequence has one slot, plus a share of the others in proportion to its blocks of keys,
    rounded down; so longer sequences get more slots. The blocks of a sequence are spread evenly
    over its slots.

    Args:
        every: all numbers below BATCH_BLOCK; made by the caller, because Gluon wants their layout.

    Returns:
        sequence: at least batch for an unused slot.
        split: which of own_splits.
        begin, end: its keys.
        splits: int32 [BATCH_BLOCK]: the number of splits of each sequence.
    """
    is_sequence = every < batch
    begins, ends = _visible_keys(lens_ptr, every, is_sequence, batch, capacity, rank, GROUP, WINDOW)
    blocks = tl.cdiv(ends - begins, SPLIT.BLOCK_N)
    splits = tl.where(is_sequence, SPLIT.SPLITS, 0)
    if SPLIT.BATCH_BLOCK > 1:
        spare = (batch * (SPLIT.SPLITS - 1)).to(tl.int64)
        share = spare * blocks // tl.maximum(tl.sum(blocks.to(tl.int64), 0), 1)
        splits = tl.where(is_sequence, 1 + share.to(tl.int32), 0)
    next_first = tl.cumsum(splits, 0)
    sequence = tl.sum((next_first <= slot).to(tl.int32), 0)
    is_own = every == sequence
    own_splits = tl.sum(tl.where(is_own, splits, 0), 0)
    own_blocks = tl.sum(tl.where(is_own, blocks, 0), 0)
    split = slot - tl.sum(tl.where(is_own, next_first - splits, 0), 0)
    share, longer = own_blocks // max(own_splits, 1), own_blocks % max(own_splits, 1)
    begin = tl.sum(tl.where(is_own, begins, 0), 0)
    begin += (split * share + min(split, longer)) * SPLIT.BLOCK_N
    end = min(
        begin + (share + tl.where(split < longer, 1, 0)) * SPLIT.BLOCK_N,
        tl.sum(tl.where(is_own, ends, 0), 0),
    )
    return sequence, split, own_splits, begin, end, splits


@triton.jit
def _visible_keys(
    lens_ptr, sequence, mask, batch, capacity, rank, GROUP: tl.constexpr, WINDOW: tl.constexpr
):
    """The ranges of this rank's keys that each sequence's query sees; keys are in rank order."""
    end = tl.load(lens_ptr + rank * batch + sequence, mask=mask, other=0)
    end = tl.maximum(0, tl.minimum(end, capacity))
    begin = end * 0
    if WINDOW > 0:
        source = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))
        is_later = (source > rank) & (source < GROUP.WORLD)
        later = tl.load(
            lens_ptr + source[:, None] * batch + sequence[None, :],
            mask=is_later[:, None] & mask[None, :], other=0,
        )  # fmt: skip
        later = tl.sum(tl.minimum(later, WINDOW).to(tl.int64), 0)
        begin = tl.maximum(0, end - tl.maximum(0, WINDOW - later).to(tl.int32))
    return begin, end


@triton.jit
def tanh(x):
    """The hyperbolic tangent."""
    small = tl.exp2(tl.abs(x) * (-2 * _LOG2_E))
    tanh = (1 - small) / (1 + small)
    return tl.where(x < 0, -tanh, tanh)


@triton.jit
def store_rows(part_ptr, out, lse, row, row_mask, rows, V_DIM: tl.constexpr):
    """Write some of a part's `rows`.

    Args:
        out: float32 [ROWS, next_power_of_2(V_DIM)]; lse: float32 [ROWS].
        row: int32 [ROWS], the rows' numbers.
    """
    dv = tl.arange(0, out.shape[1])
    mask = row_mask[:, None] & (dv < V_DIM)[None, :]
    tl.store(part_ptr + row[:, None] * V_DIM + dv[None, :], out, mask=mask)
    tl.store(part_ptr + rows * V_DIM + row, lse, mask=row_mask)
