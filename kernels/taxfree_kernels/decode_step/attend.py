"""Attention of one token in the persistent step: a split of the keys of one KV head.

Matrix instructions multiply 16 rows of query heads, if there are as many, with 16 keys: by single
products, several heads take longer than their keys take to arrive. Each group of 16 keys of a chunk
has a softmax of its own, so no warp waits for another; they meet at the end of the split. One split
of a pair merges all of them. q, k and v come from memory as products: norms, rotary and the
rounding to the cache's dtype happen here, in each split again, which is cheaper than a hand-off
more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taxfree_kernels.decode_step import tape
from taxfree_kernels.decode_step.chunks import (
    CHUNK_BYTES,
    SPLITS_DONE,
    chunks_of_split,
    hand_back,
    page_of,
    sequences,
)
from taxfree_kernels.device.specialized import reinterpreted

_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def groups(dim):
    """Groups of 16 keys of a chunk."""
    return CHUNK_BYTES.value // (2 * 16 * dim)


@gluon.constexpr_function
def _of_logits(dim):
    """The layout of logits, [groups, heads, 16 keys]; several warps have the same."""
    count = groups(dim)
    return gl.NVMMADistributedLayout([2, 0], [count, 8 // count, 1], [1, 16, 8])


@gluon.constexpr_function
def _of_sums(dim):
    """The layout of weighted sums of values, [groups, heads, dim]."""
    count = groups(dim)
    return gl.NVMMADistributedLayout([2, 0], [count, 1, 8 // count], [1, 16, 8])


@gluon.constexpr_function
def rows_of_heads(queries):
    """Rows of matrix instructions that so many query heads take."""
    return max(16, triton.next_power_of_2(queries))


@gluon.constexpr_function
def stored_heads(queries):
    """Of them, those whose sums are stored."""
    return max(8, triton.next_power_of_2(queries))


@gluon.constexpr_function
def room_of(queries, batch):
    """float32 of shared memory, for sums of attention, or of products with several sequences."""
    return max(512 * stored_heads(queries), 256 * sequences(batch) if batch > 1 else 0)


@gluon.constexpr_function
def merge_layout(heads, parts, dim):
    """The layout of [heads, parts, dim], all parts in one thread."""
    warps = min(heads, 8)
    return gl.BlockedLayout(
        [1, parts, max(1, dim * warps // 256)], [1, 1, 32], [warps, 1, 8 // warps], [2, 1, 0]
    )


@gluon.jit
def _rotary(position, inv_freq, scale, d, DIM: gl.constexpr):
    """Cosine and sine of the angles of a position; the library's would cost a call and a stack."""
    angle = position.to(gl.float32) * gl.load(inv_freq + d % (DIM // 2))
    turns = gl.floor(angle * 0.15915494309189535 + 0.5)
    # 2 pi in three parts, whose products with small integers are exact
    angle = angle - turns * 6.28125
    angle = angle - turns * 0.001934051513671875
    angle = angle - turns * 1.255665914602e-06
    cosine = gl.inline_asm_elementwise(
        "cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=gl.float32, is_pure=True, pack=1
    )
    sine = gl.inline_asm_elementwise(
        "sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=gl.float32, is_pure=True, pack=1
    )
    return cosine * scale, sine * scale


@gluon.constexpr_function
def _heads(model):
    """A power of two, at least the heads of a unit: of q, one of k, one of v."""
    return triton.next_power_of_2(model.HEADS // model.KV_HEADS + 2)


@gluon.constexpr_function
def _of_heads(dim):
    """The layout of heads, [2, heads, dim]: a thread has both."""
    columns = min(4, dim // 32)
    across = dim // (32 * columns)
    return gl.BlockedLayout([2, 1, columns], [1, 1, 32], [1, 8 // across, across], [2, 1, 0])


@gluon.jit
def _load_heads(sequence, kv_head, position, has_new, layer, step, heads, MODEL: gl.constexpr):
    """Store a unit's heads of q, then of k and of v, to shared memory: norms, rotary, scale.

    Args:
        has_new: whether k and v are stored to the cache, too.
        heads: twice [heads, HEAD_DIM].
    """
    DIM: gl.constexpr = MODEL.HEAD_DIM
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    ROWS: gl.constexpr = _heads(MODEL)
    BOTH: gl.constexpr = _of_heads(DIM)
    ONE: gl.constexpr = gl.SliceLayout(0, BOTH)
    element: gl.constexpr = step.attended.dtype.element_ty
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ONE))[:, None]
    d = gl.arange(0, DIM, gl.SliceLayout(0, ONE))[None, :]
    side = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, BOTH)))[:, None, None]
    # with each element its partner of rotary, from the other half of the head
    column = (d[None, :, :] + side * (DIM // 2)) % DIM
    head = gl.where(row < QUERIES, kv_head * QUERIES + row, MODEL.HEADS + kv_head)
    head = gl.where(row > QUERIES, MODEL.HEADS + MODEL.KV_HEADS + kv_head, head)
    at = head[None, :, :] * DIM + column
    both = gl.load(step.qkv + sequence * MODEL.QKV_ROWS + at, cache_modifier=".cg")
    x = gl.sum(gl.where(side == 0, both, 0.0), 0)
    y = gl.sum(gl.where(side == 0, 0.0, both), 0)
    value = x
    if MODEL.HAS_QK_NORM:
        rstd = gl.rsqrt(gl.sum(x * x, 1) * (1.0 / DIM) + MODEL.EPS)[:, None]
        norms = step.vectors + layer * tape.VECTORS
        of_q = tl.cast(gl.multiple_of(gl.load(norms + tape.Q_NORM), 16), gl.pointer_type(element))
        of_k = tl.cast(gl.multiple_of(gl.load(norms + tape.K_NORM), 16), gl.pointer_type(element))
        other = (d + DIM // 2) % DIM
        x *= rstd * gl.where(row < QUERIES, gl.load(of_q + d), gl.load(of_k + d)).to(gl.float32)
        y *= rstd * gl.where(row < QUERIES, gl.load(of_q + other), gl.load(of_k + other)).to(
            gl.float32
        )
    cosine, sine = _rotary(position, step.inv_freq, step.rope_scale, d, DIM)
    turned = x * cosine + gl.where(d < DIM // 2, -y, y) * sine
    turned *= gl.where(row < QUERIES, _LOG2_E / DIM**0.5, 1.0)
    result = gl.where(row > QUERIES, value, turned).to(element)
    for place in gl.static_range(2):
        heads[place].store(result)
    keys = gl.load(step.lines + layer * tape.LINES + tape.LINE_KEYS)
    values = gl.load(step.lines + layer * tape.LINES + tape.LINE_VALUES)
    line = page_of(step.pages, sequence, position, MODEL) * step.heads[0] + kv_head * step.heads[1]
    line += gl.where(row == QUERIES, keys, values)
    within = (position % MODEL.PAGE if MODEL.PAGE else position).to(gl.int64) * step.stride_key
    is_new = (row >= QUERIES) & (row < QUERIES + 2) & has_new & (d >= 0)
    gl.store(step.origin + line * (MODEL.LINE // 2) + within + d, result, mask=is_new)


@gluon.jit
def attend(unit, layer, counts, n, step, pipe, shared, MODEL: gl.constexpr):
    """Attend to a split for all query heads of a KV head; returns the number of chunks read.

    Args:
        shared: float32 [groups, stored heads, HEAD_DIM], and twice [rows of heads, groups].
    """
    DIM: gl.constexpr = MODEL.HEAD_DIM
    KEYS: gl.constexpr = MODEL.KEYS
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    GROUPS: gl.constexpr = groups(DIM)
    ROWS: gl.constexpr = rows_of_heads(QUERIES)
    OF_LOGITS: gl.constexpr = _of_logits(DIM)
    OF_SUMS: gl.constexpr = _of_sums(DIM)
    OF_Q: gl.constexpr = gl.DotOperandLayout(0, OF_LOGITS, 2)
    OF_KEYS: gl.constexpr = gl.DotOperandLayout(1, OF_LOGITS, 2)
    OF_WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OF_SUMS, 2)
    OF_VALUES: gl.constexpr = gl.DotOperandLayout(1, OF_SUMS, 2)
    element: gl.constexpr = step.attended.dtype.element_ty
    pair, split = unit % MODEL.PAIRS, unit // MODEL.PAIRS
    sequence, head = pair // MODEL.KV_HEADS, pair % MODEL.KV_HEADS
    position = gl.load(step.positions + sequence).to(gl.int32)
    begin, end, oldest = chunks_of_split(split, counts.splits, layer, position, step.lines, MODEL)
    has_new = (begin < end) & (end * KEYS > position)
    acc_shared, top_shared, total_shared = shared
    SHAPE: gl.constexpr = [GROUPS * stored_heads(QUERIES) * 2, DIM]
    # a pattern of no more rows than are stored at once
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, _heads(MODEL)), [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    heads = reinterpreted(acc_shared, SHAPE, swizzled, element)
    others = reinterpreted(acc_shared, SHAPE, plain, element)
    places = (heads.slice(0, _heads(MODEL)), others.slice(ROWS, _heads(MODEL)))
    _load_heads(sequence, head, position, has_new, layer, step, places, MODEL)
    q = heads.slice(0, ROWS).load(gl.SliceLayout(0, OF_Q))[None, :, :]
    q = q.broadcast_to([GROUPS, ROWS, DIM])
    rows = reinterpreted(acc_shared, SHAPE, flat, element)
    new_k = rows.index(ROWS + QUERIES).load(gl.SliceLayout(0, gl.SliceLayout(2, OF_KEYS)))
    new_k = new_k[None, :, None].broadcast_to([GROUPS, DIM, 16])
    new_v = rows.index(ROWS + QUERIES + 1).load(gl.SliceLayout(0, gl.SliceLayout(1, OF_SUMS)))
    # the new key, which chunks may lack, begins the first group
    zeros = gl.zeros([GROUPS, ROWS, 16], gl.float32, OF_LOGITS)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, OF_LOGITS)))
    begins = (group[:, None] == 0) & has_new
    tops = gl.where(begins, gl.max(mma_v2(q, new_k, zeros), 2), float("-inf"))
    totals = gl.where(tops > float("-inf"), 1.0, 0.0)
    number = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, OF_SUMS)))[:, None, None]
    new_v = gl.where((number == 0) & has_new, new_v.to(gl.float32)[None, None, :], 0.0)
    accs = new_v.broadcast_to([GROUPS, ROWS, DIM])

    each = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, OF_LOGITS)))
    of_logits = group[:, None, None] * 16 + each[None, None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, OF_VALUES)))
    each = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OF_VALUES)))
    of_values = group[:, None, None] * 16 + each[None, :, None]
    for chunk in range(begin, end):
        stage = n % MODEL.STAGES
        mbarrier.wait(pipe.full.index(stage), n // MODEL.STAGES & 1)
        keys = pipe.states.index(stage).permute((0, 2, 1)).load(OF_KEYS)
        hand_back(stage, pipe)
        n += 1
        newest, first = position - chunk * KEYS, oldest - chunk * KEYS
        logits = mma_v2(q, keys, zeros)
        logits = gl.where((of_logits < newest) & (of_logits >= first), logits, float("-inf"))
        higher = gl.maximum(tops, gl.max(logits, 2))
        base = gl.where(higher == float("-inf"), 0.0, higher)
        weights = gl.exp2(logits - base[:, :, None])
        keep = gl.exp2(tops - base)
        totals = totals * keep + gl.sum(weights, 2)
        tops = higher
        keep = gl.convert_layout(keep, gl.SliceLayout(2, OF_SUMS))
        weights = gl.convert_layout(weights.to(element), OF_WEIGHTS)
        stage = n % MODEL.STAGES
        mbarrier.wait(pipe.full.index(stage), n // MODEL.STAGES & 1)
        values = pipe.states.index(stage).load(OF_VALUES)
        hand_back(stage, pipe)
        n += 1
        # what lies behind the newest key may be no number
        values = gl.where((of_values < newest) & (of_values >= first), values, 0.0)
        accs = mma_v2(weights, values, accs * keep[:, :, None])

    HEADS: gl.constexpr = stored_heads(QUERIES)
    acc_shared.store(_first_rows(accs, HEADS))
    top_shared.store(tops.permute((1, 0)))
    total_shared.store(totals.permute((1, 0)))
    ALL: gl.constexpr = merge_layout(HEADS, GROUPS, DIM)
    OF_PARTS: gl.constexpr = gl.SliceLayout(2, ALL)
    top, total, acc = _merge(
        top_shared.slice(0, HEADS).load(OF_PARTS),
        total_shared.slice(0, HEADS).load(OF_PARTS),
        acc_shared.permute((1, 0, 2)).load(ALL),
    )
    _leave_split(top, total, acc, pair, split, counts.splits, step, MODEL)
    return n


@gluon.jit
def _first_rows(accs, HEADS: gl.constexpr):
    """So many rows of [groups, rows, dim], all of them or half."""
    if accs.shape[1] == HEADS:
        first = accs
    else:
        halves = accs.reshape([accs.shape[0], 2, HEADS, accs.shape[2]])
        first, _ = gl.split(halves.permute((0, 2, 3, 1)))
    return first


@gluon.jit
def _merge(top, total, acc):
    """Merge parts: [heads, parts] of the largest logit and the sum, [heads, parts, dim]."""
    highest = gl.max(top, 1)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    weight = gl.exp2(top - base[:, None])
    out = gl.sum(acc * weight[:, :, None], 1)
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    highest = gl.convert_layout(highest, OF_HEADS)
    return highest, gl.convert_layout(gl.sum(total * weight, 1), OF_HEADS), out


@gluon.jit
def _leave_split(top, total, acc, pair, split, splits, step, MODEL: gl.constexpr):
    """Store a split's part; that which ends last of a pair merges all, and stores what o reads."""
    DIM: gl.constexpr = MODEL.HEAD_DIM
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    HEADS: gl.constexpr = top.shape[0]
    HELD: gl.constexpr = acc.type.layout
    head = gl.arange(0, HEADS, gl.SliceLayout(1, HELD))
    d = gl.arange(0, DIM, gl.SliceLayout(0, HELD))
    # [pair, split, head]: sums, then [.., 2] of the largest logit and the total
    at = (pair * splits + split) * QUERIES + head
    mask = (head < QUERIES)[:, None] & (d >= 0)[None, :]
    gl.store(step.parts + at[:, None] * DIM + d[None, :], acc, mask=mask)
    gl.store(step.softmax + 2 * at, top, mask=head < QUERIES)
    gl.store(step.softmax + 2 * at + 1, total, mask=head < QUERIES)
    tl.debug_barrier()
    counter = step.counters + SPLITS_DONE + pair
    before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if before == splits - 1:
        gl.store(counter, 0)
        _merge_splits(pair, splits, triton.next_power_of_2(QUERIES), step, MODEL)


@gluon.constexpr_function
def _merged(pairs):
    """Splits that are merged at a time: of many pairs there are few."""
    return min(16, max(2, 256 // triton.next_power_of_2(pairs)))


@gluon.jit
def _merge_splits(pair, splits, HEADS: gl.constexpr, step, MODEL: gl.constexpr):
    """Merge the parts of a pair's splits, and store what o reads."""
    DIM: gl.constexpr = MODEL.HEAD_DIM
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    MERGED: gl.constexpr = _merged(MODEL.PAIRS)
    ALL: gl.constexpr = merge_layout(HEADS, MERGED, DIM)
    OF_PARTS: gl.constexpr = gl.SliceLayout(2, ALL)
    OUT: gl.constexpr = gl.SliceLayout(1, ALL)
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, OF_PARTS))[:, None]
    columns = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, ALL)))[None, None, :]
    highest = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
    whole = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, OUT))
    result = gl.zeros([HEADS, DIM], gl.float32, OUT)
    for first in range(0, splits, MERGED):
        each = first + gl.arange(0, MERGED, gl.SliceLayout(0, OF_PARTS))[None, :]
        there = (each < splits) & (heads < QUERIES)
        at = (pair * splits + gl.minimum(each, splits - 1)) * QUERIES
        at += gl.minimum(heads, QUERIES - 1)
        softmax = step.softmax + 2 * at
        top = gl.load(softmax, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = gl.load(softmax + 1, mask=there, other=0.0, cache_modifier=".cg")
        to = step.parts + at[:, :, None] * DIM + columns
        mask = there[:, :, None] & (columns >= 0)
        acc = gl.load(to, mask=mask, other=0.0, cache_modifier=".cg")
        new_top, new_total, new_acc = _merge(top, total, acc)
        higher = gl.maximum(highest, new_top)
        base = gl.where(higher == float("-inf"), 0.0, higher)
        old, new = gl.exp2(highest - base), gl.exp2(new_top - base)
        whole = whole * old + new_total * new
        result = result * old[:, None] + new_acc * new[:, None]
        highest = higher
    result = result / whole[:, None]
    head = gl.arange(0, HEADS, gl.SliceLayout(1, OUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    sequence, kv_head = pair // MODEL.KV_HEADS, pair % MODEL.KV_HEADS
    row = sequence * MODEL.HEADS + kv_head * QUERIES + head
    at = row[:, None] * DIM + d[None, :]
    mask = (head < QUERIES)[:, None] & (d >= 0)[None, :]
    element: gl.constexpr = step.attended.dtype.element_ty
    gl.store(step.attended + at, result.to(element), mask=mask)
    if step.tops is not None:
        value = gl.where(mask, result.to(element).to(gl.float32), 0.0)
        largest = gl.max(gl.max(gl.maximum(value, -value), 1), 0)
        gl.store(step.tops + pair, largest)
