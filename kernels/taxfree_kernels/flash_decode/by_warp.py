"""The splits in Gluon: each warp attends to keys of its own, and the first loads wait for little.

In ``attend`` all warps share each block of keys: the softmax and the weights go through shared
memory, with seven barriers a step. Here each warp has the softmax of its own keys, and warps only
meet when a block has arrived, when it may be overwritten, and at the end, when they merge.

The first blocks of a dense cache of one sequence are loaded before its length is known: split s has
the blocks s, s + SPLITS, and so on. With EARLY, which needs the promise ``static_cache`` of
:func:`taxfree.init`, the first loads are issued before the preceding kernel has ended, unless they
include the newest key of the sequence. Queries are loaded, and parts are stored, after its end.

The interpreter does not run Gluon: there, and for the happens-before checker, the same parts are
computed by ``attend``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.flash_decode.attend import split_of, tanh

_LOG2_E = gl.constexpr(1.4426950408889634)
# Triton 3.6 has the old name alone; later versions refuse it.
_load_block = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_KEYS = gl.constexpr(16)  # of a warp in a block: those of a matrix instruction
_ROWS = gl.constexpr(16)  # query heads of a program: those of a matrix instruction
REGISTERS = 224  # of a thread: two programs of four warps, and some that merge, are resident


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
        table_ptr: of the sequence.
        k, v: in shared memory, [STAGES, WARPS, 16, HEAD_DIM].
    """

    k_ptr: Any
    v_ptr: Any
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
    """The page of each key of a block, int32 [WARPS, 16]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _copied(HEADS.HEAD_DIM, STEP.WARPS))
    n = start + _keys_of_warps(LAYOUT, STEP.WARPS)
    pages = n * 0
    if HEADS.PAGE > 0:
        pages = gl.load(cache.table_ptr + n // HEADS.PAGE, mask=n < limit, other=0)
    return pages


@gluon.jit
def _load(cache, pages, start, limit, stage, HEADS: gl.constexpr, STEP: gl.constexpr):
    """Begin to load the keys of a block below `limit`, and their values; zeros for others."""
    LAYOUT: gl.constexpr = _copied(HEADS.HEAD_DIM, STEP.WARPS)
    keys = _keys_of_warps(gl.SliceLayout(2, LAYOUT), STEP.WARPS)
    d = gl.arange(0, HEADS.HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    stride_kb, stride_kn, _ = cache.stride_k
    stride_vb, stride_vn, _ = cache.stride_v
    if HEADS.PAGE > 0:
        page, within = pages.to(gl.int64), (start + keys) % HEADS.PAGE
        k_rows = cache.k_ptr + page * stride_kb + within * stride_kn
        v_rows = cache.v_ptr + page * stride_vb + within * stride_vn
    else:
        first = start.to(gl.int64)
        k_rows = cache.k_ptr + first * stride_kn + keys * stride_kn
        v_rows = cache.v_ptr + first * stride_vn + keys * stride_vn
    mask = (start + keys < limit)[:, :, None]
    _load_block(cache.k.index(stage), k_rows[:, :, None] + d, mask=mask)
    async_copy.commit_group()
    _load_block(cache.v.index(stage), v_rows[:, :, None] + d, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _first_loads(cache, first, stride, limit, there, HEADS: gl.constexpr, STEP: gl.constexpr):
    """Begin to load the first STAGES blocks; the page table has entries below `there`."""
    for stage in gl.static_range(STEP.STAGES):
        start = first + stage * stride
        _load(cache, _pages(cache, start, there, HEADS, STEP), start, limit, stage, HEADS, STEP)


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
    if not STEP.EARLY:
        gdc_wait(GROUP)
        gdc_launch_dependents(GROUP)
    slot, column = gl.program_id(0) // COLUMNS, gl.program_id(0) % COLUMNS
    kv_head = column // HEAD_BLOCKS
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
    stride_kb, _, stride_kh = stride_k
    stride_vb, _, stride_vh = stride_v
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    if HEADS.PAGE > 0:
        table_ptr += sequence.to(gl.int64) * gl.cdiv(capacity, HEADS.PAGE)
    else:
        k_ptr += sequence.to(gl.int64) * stride_kb
        v_ptr += sequence.to(gl.int64) * stride_vb
    element: gl.constexpr = k_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    k = gl.allocate_shared_memory(element, [STAGES, WARPS, _KEYS, DIM], SHARED)
    v = gl.allocate_shared_memory(element, [STAGES, WARPS, _KEYS, DIM], SHARED)
    cache = Cache(k_ptr, v_ptr, table_ptr, stride_k, stride_v, k, v)
    if STEP.EARLY:
        if has_newest & (first + (STAGES - 1) * stride + BLOCK_N >= end):
            gdc_wait(GROUP)
    _first_loads(
        cache, first, stride, capacity if BLIND else end, capacity if STRIDED else end, HEADS, STEP
    )
    if STEP.EARLY:
        gdc_wait(GROUP)
        gdc_launch_dependents(GROUP)

    COPIED: gl.constexpr = _copied(DIM, WARPS)
    OF_HEADS: gl.constexpr = gl.SliceLayout(2, COPIED)
    group_head = column % HEAD_BLOCKS * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(0, OF_HEADS))
    group_head = group_head[None, :] + gl.arange(0, WARPS, gl.SliceLayout(1, OF_HEADS))[:, None] * 0
    d = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, COPIED)))[None, None, :]
    row = sequence * HEADS.Q_HEADS + kv_head * GROUP_SIZE + group_head
    is_row = (group_head < GROUP_SIZE) & (sequence < batch)
    q = gl.load(q_ptr + (row * DIM)[:, :, None] + d, mask=is_row[:, :, None], other=0.0)
    factor = gl.load(scaling_ptr) * _LOG2_E
    if HEADS.SOFT_CAP:
        cap = gl.load(scaling_ptr + 1)
        factor, cap_log2 = gl.load(scaling_ptr) / cap, cap * _LOG2_E
    q = gl.convert_layout(q, gl.DotOperandLayout(0, MMA, 2))
    top = gl.full([WARPS, _ROWS], float("-inf"), gl.float32, OF_ROWS)
    total = gl.zeros([WARPS, _ROWS], gl.float32, OF_ROWS)
    acc = gl.zeros([WARPS, _ROWS, DIM], gl.float32, MMA)
    nothing = gl.zeros([WARPS, _ROWS, _KEYS], gl.float32, MMA)
    logit_keys = _keys_of_warps(gl.SliceLayout(1, MMA), WARPS)[:, None, :]
    value_keys = _keys_of_warps(gl.SliceLayout(2, RIGHT), WARPS)[:, :, None]
    pages = _pages(cache, first + STAGES * stride, end, HEADS, STEP)
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
        pages = _pages(cache, ahead + stride, end, HEADS, STEP)
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
