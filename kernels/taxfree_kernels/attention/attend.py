"""The kernel: FlashAttention-2's forward pass, a block of queries of one head per program.

T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
arXiv 2307.08691, algorithm 1: an online softmax that divides once, at the end, and keeps one
log-sum-exp for each row. Exponents are of base 2. Blocks of keys that all of a program's queries
see come first, in a loop without masks; those on the diagonal and at the end follow in another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from taxfree_kernels.device.tiles import attention_tile

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


class Operand(NamedTuple):
    """Queries, keys or values: the arguments of :func:`attend` that are about them."""

    base: Any
    strides: Any


class Rows(NamedTuple):
    """One head of a sequence.

    Args:
        sequence, head: indices; of packed sequences, the first is 0.
        first: token at which the sequence begins, of those of its index.
        length: tokens of the sequence.
    """

    sequence: Any
    head: Any
    first: Any
    length: Any


class Heads(NamedTuple):
    """The constants of the problem: ``HEADS: tl.constexpr``.

    BATCH_BLOCK is next_power_of_2(batch) of packed sequences; 0: all have the same length.
    KV_SCALES: see ``HeadsProblem``.
    """

    Q_HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    CAUSAL: bool
    BATCH_BLOCK: int
    KV_SCALES: str = "none"


class Blocks(NamedTuple):
    """How the work is split: ``BLOCKS: tl.constexpr``.

    Args:
        BLOCK_M: queries of a program.
        BLOCK_N: keys of a step.
        TMA: operands are descriptors.
        MAPPING: the order of programs, see :func:`~taxfree_kernels.device.tiles.attention_tile`.
        XCDS: chiplets.
    """

    BLOCK_M: int
    BLOCK_N: int
    TMA: bool
    MAPPING: str
    XCDS: int


@triton.jit(do_not_specialize=["has_lse", "batch", "tokens"])
def attend(
    q, k, v, stride_q, stride_k, stride_v, starts_ptr, out_ptr, lse_ptr, has_lse, scale, batch,
    tokens, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the output of BLOCK_M queries of one head.

    Args:
        q, k, v: pointers or, if TMA, descriptors of [batch, heads, tokens, HEAD_DIM] that load
            boxes of [1, 1, rows, next_power_of_2(HEAD_DIM)]; Triton 3.6 takes none in a tuple.
        stride_q, stride_k, stride_v: elements from one sequence, token and head to the next.
        starts_ptr: of packed sequences, int32 [batch + 1]: the first token of each sequence, then
            the end of the last one; with KV_SCALES also the scales of keys and of values, float32
            [1] or [KV_HEADS]: three pointers.
        out_ptr: [batch, length, Q_HEADS, HEAD_DIM] or [tokens, ...], contiguous.
        lse_ptr: float32 [batch, Q_HEADS, length], of packed sequences [Q_HEADS, tokens]: natural
            logarithms, written if `has_lse`.
        scale: what logits are multiplied by, positive.
        batch: sequences.
        tokens: of a sequence; of packed sequences, all.
    """
    BLOCK_M: tl.constexpr = BLOCKS.BLOCK_M
    BLOCK_N: tl.constexpr = BLOCKS.BLOCK_N
    HEAD_DIM: tl.constexpr = HEADS.HEAD_DIM
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    program = tl.program_id(0)
    if HEADS.KV_SCALES != "none":
        starts_ptr, k_scale_ptr, v_scale_ptr = starts_ptr
    if HEADS.BATCH_BLOCK > 0:
        slots = tokens // BLOCK_M + batch  # at least as many as there are blocks
        _, head, slot = attention_tile(
            program, slots, HEADS.Q_HEADS, 1, BLOCKS.XCDS, BLOCKS.MAPPING
        )
        block, blocks, first, length = _block_of(
            slot, starts_ptr, batch, tokens, HEADS.BATCH_BLOCK, BLOCK_M
        )
        sequence = 0
        if block >= blocks:
            return
    else:
        length, first = tokens, 0
        blocks = tl.cdiv(length, BLOCK_M)
        sequence, head, block = attention_tile(
            program, blocks, HEADS.Q_HEADS, batch, BLOCKS.XCDS, BLOCKS.MAPPING
        )
    if HEADS.CAUSAL and BLOCKS.MAPPING != "balanced_head_first":
        block = blocks - 1 - block  # those with most keys begin first
    row = block * BLOCK_M
    queries = Rows(sequence, head, first, length)
    keys = Rows(sequence, head // (HEADS.Q_HEADS // HEADS.KV_HEADS), first, length)
    k, v = Operand(k, stride_k), Operand(v, stride_v)
    factor = scale * _LOG2_E
    if HEADS.KV_SCALES != "none":
        number = keys.head if HEADS.KV_SCALES == "head" else 0
        factor *= tl.load(k_scale_ptr + number)
    q_block = _load(Operand(q, stride_q), queries, row, BLOCK_M, True, HEADS, BLOCKS)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    seen_by_all, end = length, length
    if HEADS.CAUSAL:
        seen_by_all, end = min(row + 1, length), min(row + BLOCK_M, length)
    edge = seen_by_all // BLOCK_N * BLOCK_N
    acc, top, total = _attend_to(
        0, edge, acc, top, total, q_block, row, k, v, keys, factor, False, HEADS, BLOCKS
    )  # fmt: skip
    acc, top, total = _attend_to(
        edge, end, acc, top, total, q_block, row, k, v, keys, factor, True, HEADS, BLOCKS
    )  # fmt: skip
    if HEADS.KV_SCALES != "none":
        acc *= tl.load(v_scale_ptr + number)
    rows, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row_mask = row + rows < length
    token = (sequence * tokens + first + row).to(tl.int64)
    out_ptr += (token * HEADS.Q_HEADS + head) * HEAD_DIM
    tl.store(
        out_ptr + rows[:, None] * (HEADS.Q_HEADS * HEAD_DIM) + d[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (d < HEAD_DIM)[None, :],
    )
    if has_lse:
        of_head = (sequence * HEADS.Q_HEADS + head).to(tl.int64) * tokens
        lse = (top + tl.log2(total)) * _LN_2
        tl.store(lse_ptr + of_head + first + row + rows, lse, mask=row_mask)


@triton.jit
def _block_of(slot, starts_ptr, batch, tokens, BATCH_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """The block of queries in a slot, when sequences are packed: each has the slots that it needs.

    Returns:
        block: of its sequence; at least `blocks` in the slots that are left over.
        blocks: of the sequence.
        first: token of the sequence.
        length: tokens of the sequence.
    """
    every = tl.arange(0, BATCH_BLOCK)
    is_sequence = every < batch
    starts = tl.load(starts_ptr + every, mask=is_sequence, other=0)
    ends = tl.load(starts_ptr + every + 1, mask=is_sequence, other=0)
    starts = tl.minimum(tl.maximum(starts, 0), tokens)  # whatever is there: no access beyond
    ends = tl.minimum(tl.maximum(ends, starts), tokens)
    blocks = tl.cdiv(ends - starts, BLOCK_M)
    next_slots = tl.cumsum(blocks, 0)
    sequence = tl.sum((next_slots <= slot).to(tl.int32), 0)
    is_own = every == sequence
    first = tl.sum(tl.where(is_own, starts, 0), 0)
    length = tl.sum(tl.where(is_own, ends, 0), 0) - first
    own_blocks = tl.sum(tl.where(is_own, blocks, 0), 0)
    block = slot - tl.sum(tl.where(is_own, next_slots - blocks, 0), 0)
    return block, own_blocks, first, length


@triton.jit
def _attend_to(
    begin, end, acc, top, total, q_block, row, k, v, keys, factor,
    MASKED: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The online softmax of queries from `row` on over keys from `begin` to `end`."""
    BLOCK_N: tl.constexpr = BLOCKS.BLOCK_N
    for start in range(begin, end, BLOCK_N):
        k_block = _load(k, keys, start, BLOCK_N, MASKED, HEADS, BLOCKS).to(q_block.dtype)
        logits = tl.dot(q_block, k_block.T)
        if MASKED:
            keys_at = start + tl.arange(0, BLOCK_N)
            seen = (keys_at < keys.length)[None, :]
            if HEADS.CAUSAL:
                rows = row + tl.arange(0, BLOCKS.BLOCK_M)
                seen = seen & (keys_at[None, :] <= rows[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * factor)
        weights = tl.exp2(logits * factor - new_top[:, None])
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, 1)
        v_block = _load(v, keys, start, BLOCK_N, MASKED, HEADS, BLOCKS).to(q_block.dtype)
        if MASKED and BLOCKS.TMA and HEADS.BATCH_BLOCK > 0:  # another sequence's values follow
            keys_at = start + tl.arange(0, BLOCK_N)
            v_block = tl.where((keys_at < keys.length)[:, None], v_block, 0.0)
        acc = tl.dot(weights.to(v_block.dtype), v_block, acc * kept[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def _load(
    operand, source, row,
    ROWS: tl.constexpr, MASKED: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """[ROWS, next_power_of_2(HEAD_DIM)] from `row` on, zero beyond the head's dimension.

    Rows beyond the sequence are zero if MASKED, unless sequences are packed and loaded by TMA.
    """
    HEAD_DIM: tl.constexpr = HEADS.HEAD_DIM
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    token = source.first + row
    if BLOCKS.TMA:
        box = operand.base.load([source.sequence, source.head, token, 0])
        block = box.reshape(ROWS, BLOCK_D)
    else:
        stride_b, stride_n, stride_h = operand.strides
        rows, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        base = operand.base + tl.cast(source.sequence, tl.int64) * stride_b
        base += tl.cast(source.head, tl.int64) * stride_h + tl.cast(token, tl.int64) * stride_n
        pointers = base + (rows[:, None] * stride_n + d[None, :])
        if MASKED or HEAD_DIM != BLOCK_D:
            mask = (d < HEAD_DIM)[None, :]
            if MASKED:
                mask = mask & (row + rows < source.length)[:, None]
            block = tl.load(pointers, mask=mask, other=0.0)
        else:
            block = tl.load(pointers)
    return block
