"""The splits in Gluon: each warp attends to keys of its own, and the first loads wait for little.

In ``attend`` all warps share each block of keys: the softmax and the weights go through shared
memory, with seven barriers a step, so that a step takes nearly as long as memory takes for its
keys. Here each warp has the softmax of its own keys, and warps only meet when a block has arrived,
when it may be overwritten, and at the end, when they merge.

The first blocks of a dense cache of one sequence are loaded before its length is known: split s has
the blocks s, s + SPLITS, and so on. With EARLY, which needs the promise ``static_cache`` of
:func:`taxfree.init`, the first loads are issued before the preceding kernel has ended, unless they
include the newest key of the sequence. Queries are loaded, and parts are stored, after its end.

The interpreter does not run Gluon: there, and for the happens-before checker, the same parts are
computed by ``attend``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from taxfree_kernels.device.pdl import gdc_launch_dependents, gdc_wait
from taxfree_kernels.flash_decode.attend import split_of, tanh

_LOG2_E = gl.constexpr(1.4426950408889634)
# Triton 3.6 has the old name alone; later versions refuse it.
_load_block = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_KEYS = gl.constexpr(16)  # of a warp in a block: those of a matrix instruction
_ROWS = gl.constexpr(16)  # query heads of a program: those of a matrix instruction
REGISTERS = 232  # of a thread: two programs of four warps, and some that merge, are resident
MERGE_REGISTERS = 64  # without a number ptxas takes 32, and issues some loads behind others


class Steps(NamedTuple):
    """The constants of this kernel: ``STEP: tl.constexpr``.

    Args:
        WARPS: of a program; a block has 16 keys for each.
        STAGES: blocks in shared memory.
        EARLY: the first loads are issued before the preceding kernel has ended.
    """

    WARPS: int
    STAGES: int
    EARLY: bool


class Cache(NamedTuple):
    """The keys and values of a sequence's kv head, or of all pages.

    Args:
        k_ptrs, v_ptrs: of the first block [WARPS, 16, HEAD_DIM]; of the first row if there are
            pages.
        table_ptr: of the sequence.
        k, v: in shared memory, [STAGES, WARPS, 16, HEAD_DIM].
    """

    k_ptrs: Any
    v_ptrs: Any
    table_ptr: Any
    stride_k: Any
    stride_v: Any
    k: Any
    v: Any


@gluon.constexpr_function
def _copied(dim, warps):
    """The layout in which a block [WARPS, 16, HEAD_DIM] is loaded, 16 bytes a thread."""
    return gl.BlockedLayout([1, 1, 8], [1, 256 // dim, dim // 8], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _merged(dim, warps):
    """The layout in which warps are merged: a thread has the values of all of them."""
    return gl.BlockedLayout([warps, 1, 4], [1, 128 // dim, dim // 4], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _keys_of_warps(LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    """The number in its block of each key, int32 [WARPS, 16]."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
    key = gl.arange(0, _KEYS, gl.SliceLayout(0, LAYOUT))
    return warp[:, None] * _KEYS + key[None, :]


@gluon.jit
def _pages(cache, start, limit, HEADS: gl.constexpr, STEP: gl.constexpr):
    """The page of each key of a block, int32 [WARPS, 16]; [WARPS, 1] if a warp's keys share one."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _copied(HEADS.HEAD_DIM, STEP.WARPS))
    if HEADS.PAGE % _KEYS == 0:
        n = gl.arange(0, STEP.WARPS, gl.SliceLayout(1, LAYOUT))[:, None] * _KEYS
    else:
        n = _keys_of_warps(LAYOUT, STEP.WARPS)
    pages = n * 0
    if HEADS.PAGE > 0:
        pages = gl.load(
            cache.table_ptr + (start + n) // HEADS.PAGE, mask=start + n < limit, other=0
        )
    return pages


@gluon.jit
def _load(cache, pages, start, limit, stage, HEADS: gl.constexpr, STEP: gl.constexpr):
    """Begin to load the keys of a block below `limit`, and their values; zeros for others."""
    LAYOUT: gl.constexpr = _copied(HEADS.HEAD_DIM, STEP.WARPS)
    keys = start + _keys_of_warps(gl.SliceLayout(2, LAYOUT), STEP.WARPS)
    stride_kb, stride_kn, _ = cache.stride_k
    stride_vb, stride_vn, _ = cache.stride_v
    if HEADS.PAGE > 0:
        page, within = pages.to(gl.int64), keys % HEADS.PAGE
        k_ptrs = cache.k_ptrs + (page * stride_kb + within * stride_kn)[:, :, None]
        v_ptrs = cache.v_ptrs + (page * stride_vb + within * stride_vn)[:, :, None]
    else:
        k_ptrs = cache.k_ptrs + start.to(gl.int64) * stride_kn
        v_ptrs = cache.v_ptrs + start.to(gl.int64) * stride_vn
    mask = (keys < limit)[:, :, None]
    _load_block(cache.k.index(stage), k_ptrs, mask=mask)
    async_copy.commit_group()
    _load_block(cache.v.index(stage), v_ptrs, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _first_loads(cache, first, stride, limit, there, HEADS: gl.constexpr, STEP: gl.constexpr):
    """Begin to load the first STAGES blocks; the page table has entries below `there`."""
    pages = (_pages(cache, first, there, HEADS, STEP),)
    for stage in gl.static_range(1, STEP.STAGES):
        start = first + stage * stride
        pages += (_pages(cache, start, there, HEADS, STEP),)  # type: ignore[assignment]
    for stage in gl.static_range(STEP.STAGES):
        _load(cache, pages[stage], first + stage * stride, limit, stage, HEADS, STEP)


@gluon.jit(do_not_specialize=["batch", "capacity", "rank"])
def attend_by_warp(
    q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, scaling_ptr, stride_k, stride_v, batch, capacity,
    parts, rank, GROUP: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Write the part of one split of one sequence for up to 16 query heads; see ``attend``."""
    GROUP_SIZE: gl.constexpr = HEADS.Q_HEADS // HEADS.KV_HEADS
    HEAD_BLOCKS: gl.constexpr = (GROUP_SIZE + 15) // 16
    COLUMNS: gl.constexpr = HEADS.KV_HEADS * HEAD_BLOCKS
    DIM: gl.constexpr = HEADS.HEAD_DIM
    WARPS: gl.constexpr = STEP.WARPS
    STAGES: gl.constexpr = STEP.STAGES
    BLOCK_N: gl.constexpr = SPLIT.BLOCK_N
    # The first keys of a split depend on no length.
    STRIDED: gl.constexpr = SPLIT.BATCH_BLOCK == 1
    BLIND: gl.constexpr = STRIDED and HEADS.PAGE == 0 and not STEP.EARLY
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    OF_ROWS: gl.constexpr = gl.SliceLayout(2, MMA)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPIED: gl.constexpr = _copied(DIM, WARPS)
    OF_KEYS: gl.constexpr = gl.SliceLayout(2, COPIED)
    slot, column = gl.program_id(0) // COLUMNS, gl.program_id(0) % COLUMNS
    kv_head = column // HEAD_BLOCKS
    _, stride_kn, stride_kh = stride_k
    _, stride_vn, stride_vh = stride_v
    d = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, COPIED)))[None, None, :]
    k_ptrs, v_ptrs = k_ptr + kv_head * stride_kh + d, v_ptr + kv_head * stride_vh + d
    if HEADS.PAGE == 0:
        keys = _keys_of_warps(OF_KEYS, WARPS)[:, :, None]
        k_ptrs, v_ptrs = k_ptrs + keys * stride_kn, v_ptrs + keys * stride_vn
    element: gl.constexpr = k_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    k = gl.allocate_shared_memory(element, [STAGES, WARPS, _KEYS, DIM], SHARED)
    v = gl.allocate_shared_memory(element, [STAGES, WARPS, _KEYS, DIM], SHARED)
    group_head = gl.arange(0, _ROWS, gl.SliceLayout(0, OF_KEYS))[None, :]
    group_head += gl.arange(0, WARPS, gl.SliceLayout(1, OF_KEYS))[:, None] * 0
    group_head += column % HEAD_BLOCKS * _ROWS
    q_ptrs = q_ptr + ((kv_head * GROUP_SIZE + group_head) * DIM)[:, :, None] + d
    if not STEP.EARLY:
        gdc_wait(GROUP)
        gdc_launch_dependents(GROUP)
    if STRIDED:
        sequence, split = slot * 0, slot
        first, stride = slot * BLOCK_N, SPLIT.SPLITS * BLOCK_N
        end = gl.maximum(0, gl.minimum(gl.load(lens_ptr + rank * batch), capacity))
        has_newest = split >= 0
    else:
        every = gl.arange(0, SPLIT.BATCH_BLOCK, gl.BlockedLayout([1], [32], [WARPS], [0]))
        sequence, split, own_splits, first, end, _ = split_of(
            slot, every, lens_ptr, batch, capacity, rank, GROUP, 0, SPLIT
        )
        stride = BLOCK_N
        has_newest = split == own_splits - 1
        q_ptrs += sequence * HEADS.Q_HEADS * DIM
        if HEADS.PAGE > 0:
            table_ptr += sequence.to(gl.int64) * gl.cdiv(capacity, HEADS.PAGE)
        else:
            k_ptrs += sequence.to(gl.int64) * stride_k[0]
            v_ptrs += sequence.to(gl.int64) * stride_v[0]
    is_row = ((group_head < GROUP_SIZE) & (sequence < batch))[:, :, None]
    cache = Cache(k_ptrs, v_ptrs, table_ptr, stride_k, stride_v, k, v)
    if STEP.EARLY:
        if has_newest & (first + (STAGES - 1) * stride + BLOCK_N >= end):
            gdc_wait(GROUP)
        _first_loads(cache, first, stride, end, end, HEADS, STEP)
        gdc_wait(GROUP)
        gdc_launch_dependents(GROUP)
    q = gl.load(q_ptrs, mask=is_row, other=0.0)
    factor = gl.load(scaling_ptr) * _LOG2_E
    if HEADS.SOFT_CAP:
        cap = gl.load(scaling_ptr + 1)
        factor, cap_log2 = gl.load(scaling_ptr) / cap, cap * _LOG2_E
    if not STEP.EARLY:
        tl.debug_barrier()  # queries and length would queue behind keys: ptxas moves loads
        _first_loads(
            cache, first, stride, capacity if BLIND else end, capacity if STRIDED else end,
            HEADS, STEP,
        )  # fmt: skip
    q = gl.convert_layout(q, gl.DotOperandLayout(0, MMA, 2))
    top = gl.full([WARPS, _ROWS], float("-inf"), gl.float32, OF_ROWS)
    total = gl.zeros([WARPS, _ROWS], gl.float32, OF_ROWS)
    acc = gl.zeros([WARPS, _ROWS, DIM], gl.float32, MMA)
    nothing = gl.zeros([WARPS, _ROWS, _KEYS], gl.float32, MMA)
    logit_keys = _keys_of_warps(gl.SliceLayout(1, MMA), WARPS)[:, None, :]
    value_keys = _keys_of_warps(gl.SliceLayout(2, RIGHT), WARPS)[:, :, None]
    # A load waits for all that were issued before it, some three steps.
    ahead = first + STAGES * stride
    pages = _pages(cache, ahead, end, HEADS, STEP)
    next_pages = _pages(cache, ahead + stride, end, HEADS, STEP)
    last_pages = _pages(cache, ahead + 2 * stride, end, HEADS, STEP)
    for step in range(0, gl.cdiv(end - first, stride)):
        stage, start = step % STAGES, first + step * stride
        async_copy.wait_group(2 * STAGES - 1)
        logits = mma_v2(q, k.index(stage).permute((0, 2, 1)).load(RIGHT), nothing) * factor
        if HEADS.SOFT_CAP:
            logits = tanh(logits) * cap_log2
        if start + BLOCK_N > end:
            logits = gl.where(start + logit_keys < end, logits, float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, 2))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)  # no keys so far
        weights = gl.exp2(logits - base[:, :, None])
        kept = gl.exp2(top - base)
        total = total * kept + gl.sum(weights, 2)
        weights = gl.convert_layout(weights.to(element), gl.DotOperandLayout(0, MMA, 2))
        async_copy.wait_group(2 * STAGES - 2)
        values = v.index(stage).load(RIGHT)
        if BLIND:
            if start + BLOCK_N > end:  # what is there is not zero
                values = gl.where(start + value_keys < end, values, 0.0)
        acc = mma_v2(weights, values, acc * kept[:, :, None])
        top = new_top
        ahead = start + STAGES * stride
        _load(cache, pages, ahead, end, stage, HEADS, STEP)
        pages, next_pages = next_pages, last_pages
        last_pages = _pages(cache, ahead + 3 * stride, end, HEADS, STEP)
    async_copy.wait_group(0)

    out, lse = _merge_warps(top, total, acc, GROUP_SIZE, WARPS)
    OUT: gl.constexpr = gl.SliceLayout(0, _merged(DIM, WARPS))
    head = column % HEAD_BLOCKS * _ROWS + gl.arange(0, out.shape[0], gl.SliceLayout(1, OUT))
    is_head = head < gl.where(sequence < batch, GROUP_SIZE, 0)
    head += kv_head * GROUP_SIZE
    part_ptr = parts.ptr + slot.to(gl.int64) * parts.stride_slot
    d = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    gl.store(part_ptr + head[:, None] * DIM + d[None, :], out, mask=is_head[:, None])
    lse = gl.convert_layout(lse, gl.SliceLayout(1, OUT))
    gl.store(part_ptr + HEADS.Q_HEADS * DIM + head, lse, mask=is_head)
    if SPLIT.BATCH_BLOCK > 1:
        if split == 0:
            run_ptrs = parts.runs_ptr + 2 * (sequence * HEADS.Q_HEADS + head)
            gl.store(run_ptrs, slot + head * 0, mask=is_head)
            gl.store(run_ptrs + 1, own_splits + head * 0, mask=is_head)


@gluon.jit
def _merge_warps(top, total, acc, GROUP_SIZE: gl.constexpr, WARPS: gl.constexpr):
    """Merge the warps' results.

    Args:
        top, total: [WARPS, 16]: the largest logit, and the sum of the weights relative to it.
        acc: [WARPS, 16, HEAD_DIM]: the weighted sum of values.

    Returns:
        out, lse: of a part, for 16 query heads; for 8 if there are no more.
    """
    MERGED: gl.constexpr = _merged(acc.shape[2], WARPS)
    if GROUP_SIZE <= 8:  # what follows takes half of the time
        top, total = _first_half(top), _first_half(total)
        acc = gl.reshape(acc, [WARPS, 2, 8, acc.shape[2]]).permute((0, 2, 3, 1))
        acc, _ = gl.split(acc)
    top = gl.convert_layout(top, gl.SliceLayout(2, MERGED))
    total = gl.convert_layout(total, gl.SliceLayout(2, MERGED))
    highest = gl.max(top, 0)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(top - base[None, :])
    whole = gl.sum(total * weights, 0)
    divisor = gl.where(whole > 0, whole, 1.0)
    lse = gl.where(whole > 0, highest + gl.log2(divisor), float("-inf"))
    weights = weights / divisor[None, :]
    return gl.sum(gl.convert_layout(acc, MERGED) * weights[:, :, None], 0), lse


@gluon.jit
def _first_half(x):
    first, _ = gl.split(gl.reshape(x, [x.shape[0], 2, 8]).permute((0, 2, 1)))
    return first


@gluon.jit(do_not_specialize=["rows"])
def merge_by_thread(
    parts, out_ptr, rows, GROUP: gl.constexpr, MERGE: gl.constexpr, CHAINED: gl.constexpr,
    NEXT_FIRST: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Merge the parts of one row's splits into the output; see ``merge.merge_splits``.

    Each thread merges some columns of all parts, so that threads do not wait for each other.
    """
    DIM: gl.constexpr = MERGE.V_DIM
    MOST: gl.constexpr = 16  # parts at a time
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [MOST, DIM // (32 * WARPS)], [1, 32], [1, WARPS], [1, 0]
    )
    row = gl.program_id(0)
    head = row % MERGE.Q_HEADS
    column = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    out_ptrs = parts.ptr + head * DIM + column
    lse_ptr = parts.ptr + MERGE.Q_HEADS * DIM + head
    part = gl.arange(0, MOST, gl.SliceLayout(1, LAYOUT))
    if NEXT_FIRST:
        gdc_launch_dependents(GROUP)
    gdc_wait(GROUP)
    if CHAINED:
        gdc_launch_dependents(GROUP)
    count = MERGE.PARTS
    if MERGE.PARTS == 0:
        first = gl.load(parts.runs_ptr + 2 * row).to(gl.int64) * parts.stride_slot
        out_ptrs += first
        lse_ptr += first
        count = gl.load(parts.runs_ptr + 2 * row + 1)
    top = float("-inf")
    total = 0.0
    out = gl.zeros([DIM], gl.float32, gl.SliceLayout(0, LAYOUT))
    for first_part in range(0, count, MOST):
        offset = (first_part + part).to(gl.int64) * parts.stride_slot
        is_part = first_part + part < count
        lse = gl.load(lse_ptr + offset, mask=is_part, other=float("-inf"))
        values = gl.load(out_ptrs[None, :] + offset[:, None], mask=is_part[:, None], other=0.0)
        new_top = gl.maximum(top, gl.max(lse, 0))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)  # no keys so far
        weights, kept = gl.exp2(lse - base), gl.exp2(top - base)
        out = out * kept + gl.sum(values * weights[:, None], 0)
        total = total * kept + gl.sum(weights, 0)
        top = new_top
    out = out / gl.where(total > 0, total, 1.0)
    gl.store(out_ptr + row.to(gl.int64) * DIM + column, out.to(out_ptr.dtype.element_ty))
