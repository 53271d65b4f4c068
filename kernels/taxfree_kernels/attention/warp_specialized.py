"""The same forward pass with roles for warps, for Hopper: one warp loads, warpgroups compute.

After J. Shah et al., "FlashAttention-3", arXiv 2407.08608: a producer warp keeps the TMA busy, and
each consuming warpgroup has 64 queries of its own. A consumer issues the logits of the next block
of keys before it multiplies the last block's weights by the values, so that the matrix unit works
while the softmax is computed. Consumers wait for barriers of boxes only, never for each other.

Triton's compiler does neither by itself on Hopper, so the kernel is written in Gluon, in which
layouts, barriers and waits are explicit. The interpreter does not run Gluon.

Barriers of shared memory. Each stage of keys and of values has one that counts the bytes that have
arrived, and one that counts the consumers that have read them. A stage's n-th use has parity n % 2;
the first wait for an empty stage passes at once, because its parity is that of a phase before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from taxfree_kernels.attention import spaces
from taxfree_kernels.attention.plans import AttentionPlan
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.attention.spaces import REGISTERS, ROWS
from taxfree_kernels.device.specialized import load_box
from taxfree_kernels.device.tiles import attention_tile
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import HeadDescriptors, Kernel, compile_options, is_triton
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config, Variant

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_ROWS = gl.constexpr(64)  # queries of a warpgroup: those of a matrix instruction
_PRODUCER_REGISTERS = gl.constexpr(24)


class AttentionWork(NamedTuple):
    """The constants of the kernel: ``WORK: tl.constexpr``.

    Args:
        Q_HEADS, KV_HEADS, HEAD_DIM, CAUSAL: of the problem.
        BLOCK_N: keys of a stage.
        STAGES: of keys, and of values, in shared memory.
        CONSUMERS: warpgroups that compute; a program has 64 queries for each.
        REGISTERS: of a thread of these.
        MAPPING: the order of programs, see :func:`~taxfree_kernels.device.tiles.attention_tile`.
    """

    Q_HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    CAUSAL: bool
    BLOCK_N: int
    STAGES: int
    CONSUMERS: int
    REGISTERS: int
    MAPPING: str


class Shared(NamedTuple):
    """Shared memory: boxes, and the barriers that say whether they are full or empty."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class AttentionTile(NamedTuple):
    """The tile of a program: `steps` blocks of keys, the first `full` of which need no mask."""

    sequence: Any
    head: Any
    row: Any
    length: Any
    full: Any
    steps: Any


@gluon.constexpr_function
def _accumulators(columns):
    """The layout of a warpgroup's matrix product of so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _weights(columns):
    """That of the left operand of such a product, in registers."""
    return gl.DotOperandLayout(0, _accumulators(columns), 2)


@gluon.constexpr_function
def _next_power_of_2(number):
    return triton.next_power_of_2(number)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, shared, place, WORK: gl.constexpr):
    """Load the queries, then keys and values a block at a time, as stages become empty."""
    kv_head = place.head // (WORK.Q_HEADS // WORK.KV_HEADS)
    mbarrier.expect(shared.q_full, WORK.CONSUMERS * q_desc.block_type.nbytes)
    for consumer in gl.static_range(WORK.CONSUMERS):
        corner = [place.sequence, place.head, place.row + consumer * _ROWS, 0]
        load_box(q_desc, corner, shared.q_full, shared.q.index(consumer))
    for step in range(place.steps):
        stage = step % WORK.STAGES
        parity = step // WORK.STAGES & 1
        corner = [place.sequence, kv_head, step * WORK.BLOCK_N, 0]
        mbarrier.wait(shared.k_empty.index(stage), parity ^ 1)
        mbarrier.expect(shared.k_full.index(stage), k_desc.block_type.nbytes)
        load_box(k_desc, corner, shared.k_full.index(stage), shared.k.index(stage))
        mbarrier.wait(shared.v_empty.index(stage), parity ^ 1)
        mbarrier.expect(shared.v_full.index(stage), v_desc.block_type.nbytes)
        load_box(v_desc, corner, shared.v_full.index(stage), shared.v.index(stage))


@gluon.jit
def _multiply_by_keys(q, shared, step, WORK: gl.constexpr):
    """Begin the logits of a block of keys, once it is there."""
    BLOCK_D: gl.constexpr = _next_power_of_2(WORK.HEAD_DIM)
    nothing = gl.zeros([_ROWS, WORK.BLOCK_N], gl.float32, _accumulators(WORK.BLOCK_N))
    stage = step % WORK.STAGES
    mbarrier.wait(shared.k_full.index(stage), step // WORK.STAGES & 1)
    k = shared.k.index(stage).reshape([WORK.BLOCK_N, BLOCK_D]).permute((1, 0))
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _multiply_by_values(weights, shared, step, acc, WORK: gl.constexpr):
    """Begin to add a block's values, once they are there."""
    BLOCK_D: gl.constexpr = _next_power_of_2(WORK.HEAD_DIM)
    stage = step % WORK.STAGES
    mbarrier.wait(shared.v_full.index(stage), step // WORK.STAGES & 1)
    v = shared.v.index(stage).reshape([WORK.BLOCK_N, BLOCK_D])
    return warpgroup_mma(weights, v, acc, is_async=True)


@gluon.jit
def _softmax(logits, top, total, factor, step, place, MASKED: gl.constexpr, WORK: gl.constexpr):
    """The online softmax over one block of keys.

    Returns:
        weights: float32, relative to the new top.
        top, total: of all blocks so far.
        kept: what earlier blocks' weights are to be multiplied by.
    """
    LAYOUT: gl.constexpr = _accumulators(WORK.BLOCK_N)
    if MASKED:
        keys = step * WORK.BLOCK_N + gl.arange(0, WORK.BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = (keys < place.length)[None, :]
        if WORK.CAUSAL:
            rows = place.row + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
            seen = seen & (keys[None, :] <= rows[:, None])
        logits = gl.where(seen, logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1) * factor)
    weights = gl.exp2(logits * factor - new_top[:, None])
    kept = gl.exp2(top - new_top)
    return weights, new_top, total * kept + gl.sum(weights, 1), kept


@gluon.jit
def _attend_to(
    begin, end, acc, weights, top, total, q, shared, place, factor,
    MASKED: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Compute the weights of blocks `begin` to `end`, each after the values before it are begun."""
    BLOCK_D: gl.constexpr = _next_power_of_2(WORK.HEAD_DIM)
    for step in range(begin, end):
        logits = _multiply_by_keys(q, shared, step, WORK)
        acc = _multiply_by_values(weights, shared, step - 1, acc, WORK)
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(shared.k_empty.index(step % WORK.STAGES), count=1)
        next_weights, top, total, kept = _softmax(
            logits, top, total, factor, step, place, MASKED, WORK
        )
        next_weights = gl.convert_layout(next_weights.to(q.dtype), _weights(BLOCK_D))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_empty.index((step - 1) % WORK.STAGES), count=1)
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, _accumulators(BLOCK_D)))[:, None]
        weights = next_weights
    return acc, weights, top, total


@gluon.jit
def _consume(
    consumer: gl.constexpr, shared, place, out_ptr, lse_ptr, has_lse, factor, WORK: gl.constexpr
):  # fmt: skip
    """Compute the output of 64 queries."""
    HEAD_DIM: gl.constexpr = WORK.HEAD_DIM
    BLOCK_D: gl.constexpr = _next_power_of_2(HEAD_DIM)
    LOGITS: gl.constexpr = _accumulators(WORK.BLOCK_N)
    OUT: gl.constexpr = _accumulators(BLOCK_D)
    sequence, head, row, length, full, steps = place
    row += consumer * _ROWS
    place = AttentionTile(sequence, head, row, length, full, steps)
    q = shared.q.index(consumer).reshape([_ROWS, BLOCK_D])
    top = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.full([_ROWS], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
    acc = gl.zeros([_ROWS, BLOCK_D], gl.float32, OUT)
    mbarrier.wait(shared.q_full, 0)
    logits = warpgroup_mma_wait(0, deps=[_multiply_by_keys(q, shared, 0, WORK)])
    mbarrier.arrive(shared.k_empty.index(0), count=1)
    weights, top, total, _ = _softmax(logits, top, total, factor, 0, place, True, WORK)
    weights = gl.convert_layout(weights.to(q.dtype), _weights(BLOCK_D))
    acc, weights, top, total = _attend_to(
        1, full, acc, weights, top, total, q, shared, place, factor, False, WORK
    )
    acc, weights, top, total = _attend_to(
        gl.maximum(full, 1), steps, acc, weights, top, total, q, shared, place, factor, True, WORK
    )
    acc = _multiply_by_values(weights, shared, steps - 1, acc, WORK)
    acc = warpgroup_mma_wait(0, deps=[acc])
    out = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, OUT))
    d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, OUT))
    token = (sequence * length + row).to(gl.int64)
    out_ptr += (token * WORK.Q_HEADS + head) * HEAD_DIM
    gl.store(
        out_ptr + rows[:, None] * (WORK.Q_HEADS * HEAD_DIM) + d[None, :],
        out.to(q.dtype),
        mask=(row + rows < length)[:, None] & (d < HEAD_DIM)[None, :],
    )
    if has_lse:
        of_head = (sequence * WORK.Q_HEADS + head).to(gl.int64) * length
        tokens = row + gl.arange(0, _ROWS, gl.SliceLayout(1, LOGITS))
        lse = (top + gl.log2(total)) * _LN_2
        gl.store(lse_ptr + of_head + tokens, lse, mask=tokens < length)


@gluon.jit(do_not_specialize=["has_lse", "batch", "length"])
def _attend(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, has_lse, scale, batch, length, WORK: gl.constexpr
):  # fmt: skip
    """Write the output of 64 * CONSUMERS queries of one head; see ``attend.attend``."""
    BLOCK_M: gl.constexpr = _ROWS * WORK.CONSUMERS
    BLOCK_N: gl.constexpr = WORK.BLOCK_N
    STAGES: gl.constexpr = WORK.STAGES
    blocks = gl.cdiv(length, BLOCK_M)
    sequence, head, block = attention_tile(
        gl.program_id(0), blocks, WORK.Q_HEADS, batch, 1, WORK.MAPPING
    )
    end, seen_by_all = length, length
    if WORK.CAUSAL:
        block = blocks - 1 - block  # those with most keys begin first
        end = gl.minimum((block + 1) * BLOCK_M, length)
        seen_by_all = gl.minimum(block * BLOCK_M + 1, length)
    place = AttentionTile(
        sequence, head, block * BLOCK_M, length, seen_by_all // BLOCK_N, gl.cdiv(end, BLOCK_N)
    )
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    shared = Shared(
        gl.allocate_shared_memory(dtype, [WORK.CONSUMERS] + q_desc.block_shape, q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_shape, k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_shape, v_desc.layout),
        gl.allocate_shared_memory(gl.int64, [1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    mbarrier.init(shared.q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(stage), count=1)
        mbarrier.init(shared.k_empty.index(stage), count=WORK.CONSUMERS)
        mbarrier.init(shared.v_full.index(stage), count=1)
        mbarrier.init(shared.v_empty.index(stage), count=WORK.CONSUMERS)
    factor = scale * _LOG2_E
    if WORK.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, shared, place, out_ptr, lse_ptr, has_lse, factor, WORK)),
                (_consume, (1, shared, place, out_ptr, lse_ptr, has_lse, factor, WORK)),
                (_produce, (q_desc, k_desc, v_desc, shared, place, WORK)),
            ],
            [4, 1],
            [WORK.REGISTERS, _PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, shared, place, out_ptr, lse_ptr, has_lse, factor, WORK)),
                (_consume, (1, shared, place, out_ptr, lse_ptr, has_lse, factor, WORK)),
                (_consume, (2, shared, place, out_ptr, lse_ptr, has_lse, factor, WORK)),
                (_produce, (q_desc, k_desc, v_desc, shared, place, WORK)),
            ],
            [4, 4, 1],
            [WORK.REGISTERS, WORK.REGISTERS, _PRODUCER_REGISTERS],
        )


class WarpSpecializedPlan(AttentionPlan):
    """One launch."""

    def __init__(self, problem: Attention, fabric: Fabric, config: Config) -> None:
        block_n, consumers = config["BLOCK_N"], config["CONSUMERS"]
        work = AttentionWork(
            problem.q_heads,
            problem.kv_heads,
            problem.head_dim,
            problem.causal,
            block_n,
            config["num_stages"],
            consumers,
            REGISTERS[consumers],
            config["MAPPING"],
        )
        options = compile_options(fabric.backend, {"num_warps": 4})  # of each consumer
        kernel = Kernel(_attend, grid=0, constants={"WORK": work}, options=options)
        super().__init__(problem, fabric, kernel, ROWS * consumers)
        box = power_of_2(problem.head_dim, 16)
        dtype = {"float16": gl.float16, "bfloat16": gl.bfloat16}[problem.dtype]
        boxes = [[1, 1, rows, box] for rows in (ROWS, block_n, block_n)]
        self._descriptors = [
            HeadDescriptors(box, TensorDescriptor, gl.NVMMASharedLayout.get_default_for(box, dtype))
            for box in boxes
        ]

    def _operands(self, *inputs: Any) -> tuple[Any, ...]:
        pairs = zip(self._descriptors, inputs[:3], strict=True)
        return tuple([describe(operand) for describe, operand in pairs])


class WarpSpecialized(Variant):
    """FlashAttention-3's plan."""

    plan_class = WarpSpecializedPlan
    slots = 1
    space = staticmethod(spaces.specialized_space)
    seed_configs = staticmethod(spaces.specialized_seed_configs)
    illegal_reason = staticmethod(spaces.specialized_illegal_reason)

    def unsupported_reason(self, problem: Attention, hardware: Hardware) -> str | None:
        if hardware.architecture != "sm_90":
            return f"not written for {hardware.architecture}"
        if not problem.is_aligned:
            return "heads do not start at multiples of 16 bytes"
        if problem.kv_scales != "none":
            return "its warps multiply keys and values in 16 bits"
        if problem.packed:  # a box of values would reach into the next sequence
            return "sequences are packed"
        if is_triton(3, 8) and not (problem.causal and problem.head_dim > 64):
            return "Triton 3.8 would run its matrix instructions one by one"
        return None


VARIANT = WarpSpecialized()
