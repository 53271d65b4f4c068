"""Attention of one token in the persistent step: a split of the keys of one KV head.

Every lane group has the softmax of its own keys; they meet at the end of the split. One split of a
pair merges all of them. q, k and v come from memory as products: norms, rotary and the rounding of
k and v to the cache's dtype happen here, in each split again, which is cheaper than a hand-off
more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taxfree_kernels.decode_step.chunks import (
    SPLITS_DONE,
    chunks_of_split,
    hand_back,
    page_of,
)
from taxfree_kernels.decode_step.tape import (
    K_NORM,
    LINE_KEYS,
    LINE_VALUES,
    LINES,
    Q_NORM,
    VECTORS,
)
from taxfree_kernels.device.specialized import reinterpreted

_LOG2_E = gl.constexpr(1.4426950408889634)
_MERGED = gl.constexpr(16)  # splits, at a time


@gluon.constexpr_function
def tile(dim):
    """The layout of a chunk of keys, [4, WARPS, GROUPS, dim / 64, 64].

    A thread has 8 elements of 4 keys.
    """
    return gl.BlockedLayout(
        [4, 1, 1, 1, 8], [1, 1, 256 // dim, dim // 64, 8], [1, 8, 1, 1, 1], [4, 3, 2, 1, 0]
    )


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
def _load_heads(
    sequence, kv_head, position, layer, step, heads, MODEL: gl.constexpr
):  # fmt: skip
    """Store a unit's heads of q, then of k and of v, to shared memory: norms, rotary, scale.

    Args:
        heads: float32 [heads, HEAD_DIM / 64, 64].
    """
    DIM: gl.constexpr = MODEL.HEAD_DIM
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    ROWS: gl.constexpr = _heads(MODEL)
    BOTH: gl.constexpr = _of_heads(DIM)
    ONE: gl.constexpr = gl.SliceLayout(0, BOTH)
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
    if MODEL.HAS_QK_NORM:
        element: gl.constexpr = step.attended.dtype.element_ty
        rstd = gl.rsqrt(gl.sum(x * x, 1) * (1.0 / DIM) + MODEL.EPS)[:, None]
        norms = step.vectors + layer * VECTORS
        of_q = tl.cast(gl.multiple_of(gl.load(norms + Q_NORM), 16), gl.pointer_type(element))
        of_k = tl.cast(gl.multiple_of(gl.load(norms + K_NORM), 16), gl.pointer_type(element))
        other = (d + DIM // 2) % DIM
        x *= rstd * gl.where(row < QUERIES, gl.load(of_q + d), gl.load(of_k + d)).to(gl.float32)
        y *= rstd * gl.where(row < QUERIES, gl.load(of_q + other), gl.load(of_k + other)).to(
            gl.float32
        )
    cosine, sine = _rotary(position, step.inv_freq, step.rope_scale, d, DIM)
    turned = x * cosine + gl.where(d < DIM // 2, -y, y) * sine
    value = gl.sum(gl.where(side == 0, both, 0.0), 0)
    turned *= gl.where(row < QUERIES, _LOG2_E / DIM**0.5, 1.0)
    result = gl.where(row > QUERIES, value, turned)
    heads.store(gl.reshape(result, [ROWS, DIM // 64, 64]))


@gluon.jit
def attend(
    unit, layer, counts, n, step, pipe, shared, MODEL: gl.constexpr, WORK: gl.constexpr
):  # fmt: skip
    """Attend to a split for all query heads of a KV head; returns the number of chunks read.

    Args:
        shared: float32 [heads, 8, HEAD_DIM], and twice [heads, 8].
    """
    DIM: gl.constexpr = MODEL.HEAD_DIM
    KEYS: gl.constexpr = MODEL.KEYS
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    GROUPS: gl.constexpr = 256 // DIM
    PARTS: gl.constexpr = DIM // 64
    T: gl.constexpr = tile(DIM)
    OF_KEYS: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, T))
    OF_VECTOR: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, T)))
    OF_SUMS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(0, T)))
    element: gl.constexpr = step.attended.dtype.element_ty
    pair, split = unit % MODEL.PAIRS, unit // MODEL.PAIRS
    sequence, head = pair // MODEL.KV_HEADS, pair % MODEL.KV_HEADS
    position = gl.load(step.positions + sequence).to(gl.int32)
    begin, end, oldest = chunks_of_split(split, counts.splits, layer, position, step.lines, MODEL)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, OF_VECTOR))
    d = part[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, OF_VECTOR))[None, :]
    acc_shared, top_shared, total_shared = shared
    ROWS: gl.constexpr = _heads(MODEL)
    SHAPE: gl.constexpr = [triton.next_power_of_2(QUERIES) * 8, PARTS, 64]
    deep: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    stored = reinterpreted(acc_shared, SHAPE, deep).slice(0, ROWS)
    _load_heads(sequence, head, position, layer, step, stored, MODEL)
    heads = reinterpreted(acc_shared, SHAPE, flat)
    new_k = heads.index(QUERIES).load(OF_VECTOR).to(element)
    new_v = heads.index(QUERIES + 1).load(OF_VECTOR).to(element)
    qs, tops, totals, accs = (), (), (), ()
    for each in gl.static_range(QUERIES):
        if QUERIES <= 4:  # registers hold no more
            qs = qs + (heads.index(each).load(OF_VECTOR),)
        tops = tops + (gl.full([8, GROUPS], float("-inf"), gl.float32, gl.SliceLayout(0, OF_KEYS)),)
        totals = totals + (gl.zeros([8, GROUPS], gl.float32, gl.SliceLayout(0, OF_KEYS)),)
        accs = accs + (gl.zeros([8, GROUPS, PARTS, 64], gl.float32, gl.SliceLayout(0, T)),)
    if (begin < end) & (end * KEYS > position):  # this split has the new key
        at = gl.load(step.lines + layer * LINES + LINE_KEYS)
        to = gl.load(step.lines + layer * LINES + LINE_VALUES)
        page = page_of(step.pages, sequence, position, MODEL)
        row = page * step.heads[0] + head * step.heads[1]
        offset = (position % MODEL.PAGE if MODEL.PAGE else position).to(gl.int64) * step.stride_key
        k_to = (at + row) * (WORK.LINE // 2) + offset
        v_to = (to + row) * (WORK.LINE // 2) + offset
        gl.store(step.origin + k_to + d, new_k)
        gl.store(step.origin + v_to + d, new_v)

    fourth = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, OF_KEYS)))[:, None, None]
    warp = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, OF_KEYS)))[None, :, None]
    lane = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, OF_KEYS)))[None, None, :]
    number = (fourth * 8 + warp) * GROUPS + lane
    for chunk in range(begin, end):
        key = chunk * KEYS + number
        is_new = (key == position)[:, :, :, None, None]
        is_seen = (key <= position) & (key >= oldest)
        stage = n % WORK.STAGES
        mbarrier.wait(pipe.full.index(stage), n // WORK.STAGES & 1)
        keys = pipe.parts.index(stage).load(T)
        hand_back(stage, pipe)
        n += 1
        keys = gl.where(is_new, new_k[None, :, :][:, None, :, :][:, :, None, :, :], keys)
        keys = keys.to(gl.float32)
        weights, kept, new_tops, new_totals = (), (), (), ()
        for each in gl.static_range(QUERIES):
            if QUERIES <= 4:
                q = qs[each]
            else:
                q = heads.index(each).load(OF_VECTOR)
            query = q[None, :, :][:, None, :, :][:, :, None, :, :]
            logits = gl.sum(gl.sum(keys * query, 4), 3)
            logits = gl.where(is_seen, logits, float("-inf"))
            top = gl.maximum(tops[each], gl.max(logits, 0))
            base = gl.where(top == float("-inf"), 0.0, top)
            weight = gl.exp2(logits - base[None, :, :])
            keep = gl.exp2(tops[each] - base)
            new_tops = new_tops + (top,)
            new_totals = new_totals + (totals[each] * keep + gl.sum(weight, 0),)
            weights = weights + (weight,)
            kept = kept + (gl.convert_layout(keep, OF_SUMS, assert_trivial=True),)
        tops, totals = new_tops, new_totals
        stage = n % WORK.STAGES
        mbarrier.wait(pipe.full.index(stage), n // WORK.STAGES & 1)
        values = pipe.parts.index(stage).load(T)
        hand_back(stage, pipe)
        n += 1
        values = gl.where(is_new, new_v[None, :, :][:, None, :, :][:, :, None, :, :], values)
        # what lies behind the newest key may be no number
        values = gl.where(is_seen[:, :, :, None, None], values.to(gl.float32), 0.0)
        new_accs = ()
        for each in gl.static_range(QUERIES):
            added = gl.sum(weights[each][:, :, :, None, None] * values, 0)
            new_accs = new_accs + (accs[each] * kept[each][:, :, None, None] + added,)
        accs = new_accs

    for each in gl.static_range(QUERIES):
        top = gl.max(tops[each], 1)
        base = gl.where(top == float("-inf"), 0.0, top)
        weight = gl.exp2(tops[each] - base[:, None])
        factor = gl.convert_layout(weight, OF_SUMS, assert_trivial=True)
        acc = gl.sum(accs[each] * factor[:, :, None, None], 1)
        acc_shared.slice(each, 1).store(gl.reshape(acc, [1, 8, DIM]))
        top_shared.slice(each, 1).store(gl.reshape(top, [1, 8]))
        total_shared.slice(each, 1).store(gl.reshape(gl.sum(totals[each] * weight, 1), [1, 8]))
    HEADS: gl.constexpr = triton.next_power_of_2(QUERIES)
    ALL: gl.constexpr = merge_layout(HEADS, 8, DIM)
    OF_PARTS: gl.constexpr = gl.SliceLayout(2, ALL)
    top, total, acc = _merge(
        top_shared.load(OF_PARTS), total_shared.load(OF_PARTS), acc_shared.load(ALL)
    )
    _leave_split(top, total, acc, pair, split, counts.splits, step, MODEL)
    return n


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
        _merge_splits(pair, splits, HEADS, step, MODEL)


@gluon.jit
def _merge_splits(pair, splits, HEADS: gl.constexpr, step, MODEL: gl.constexpr):
    """Merge the parts of a pair's splits, and store what o reads."""
    DIM: gl.constexpr = MODEL.HEAD_DIM
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    ALL: gl.constexpr = merge_layout(HEADS, _MERGED, DIM)
    OF_PARTS: gl.constexpr = gl.SliceLayout(2, ALL)
    OUT: gl.constexpr = gl.SliceLayout(1, ALL)
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, OF_PARTS))[:, None]
    columns = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, ALL)))[None, None, :]
    highest = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
    whole = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, OUT))
    result = gl.zeros([HEADS, DIM], gl.float32, OUT)
    for first in range(0, splits, _MERGED):
        each = first + gl.arange(0, _MERGED, gl.SliceLayout(0, OF_PARTS))[None, :]
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
