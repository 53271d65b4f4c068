"""All layers of a decoder for one token, in one launch: a persistent kernel in Gluon for Hopper.

Time between kernels, and time in which memory idles at the end of each, is what a step of separate
kernels loses. Here one warp of each program streams all weights, keys and values through a ring in
shared memory, in the order of the phases, and waits for nothing but room in the ring. Eight warps
multiply, as activations allow.

Phases of a layer: products of q, k and v; attention, with the norms and the rotary embedding of q
and k; o; gate and up; down. RMSNorm: each program has the whole residual in registers. It adds the
sums that the last phase left, multiplies by the weight of the norm, and the products by the
reciprocal of the root of the mean square.

Programs hand activations on by counting done units in one word, which all wait for. A program also
counts itself in each phase: so no buffer is written again that another program still reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taxfree_kernels.decode_step.attend import attend
from taxfree_kernels.decode_step.chunks import (
    CLAIMED,
    DONE,
    FAILED,
    LEFT,
    OF_ROWS,
    WARPS,
    Weights,
    X,
    count_units,
    counts_of,
    load,
    make_pipe,
    multiply,
    next_unit,
    slabs_of,
    wait_for_units,
    weight_of_row,
)
from taxfree_kernels.decode_step.tape import INPUT_NORM, POST_NORM, Q_BIAS, VECTORS
from taxfree_kernels.device.peers import LIMIT, NO_CHANNEL, Peers
from taxfree_kernels.device.sync import abort, is_aborted

_LEAST = gl.constexpr(-(1 << 63))


class Buffers(NamedTuple):
    """Memory of a step.

    Args:
        lines, vectors: tables, see ``tape``.
        embedding: [vocab, HIDDEN], all ranks' rows.
        inv_freq: float32 [HEAD_DIM / 2].
        tokens, positions: int64 [BATCH].
        next_tokens: int64 [BATCH]; -1 if a wait failed.
        logits: float32 [BATCH, VOCAB].
        qkv: float32 [BATCH, rows of q, k, v].
        parts, softmax: float32, of splits: sums; the largest logit, and the total relative to it.
        attended: [BATCH, HEADS * HEAD_DIM].
        o_sums, down_sums: float32 [BATCH, HIDDEN].
        activated: [BATCH, INTERMEDIATE].
        best: int64 [BATCH], the largest logit so far, and its token.
        counters: int32, zeros between launches.
        origin: of lines, as elements.
        control_ptr, heap_bases: of the fabric.
    """

    lines: Any
    vectors: Any
    embedding: Any
    inv_freq: Any
    tokens: Any
    positions: Any
    next_tokens: Any
    logits: Any
    qkv: Any
    parts: Any
    softmax: Any
    attended: Any
    o_sums: Any
    down_sums: Any
    activated: Any
    best: Any
    counters: Any
    control_ptr: Any
    heap_bases: Any


class Step(NamedTuple):
    """What the phases read: see ``Buffers``."""

    lines: Any
    vectors: Any
    origin: Any
    inv_freq: Any
    rope_scale: Any
    positions: Any
    qkv: Any
    parts: Any
    softmax: Any
    attended: Any
    counters: Any
    heads: Any
    stride_key: Any


@gluon.jit
def _vector_at(vectors, row, column, element: gl.constexpr):
    """A pointer to a norm or bias, from the table of addresses."""
    address = gl.load(vectors + row * VECTORS + column)
    return tl.cast(gl.multiple_of(address, 16), gl.pointer_type(element))


@gluon.jit
def _normed(residual, sums, weight, there, count, counters, limit, MODEL: gl.constexpr):
    """Wait for sums, and add them to the residual.

    Args:
        residual: slabs of the residual, in the model's dtype.
        there: whether there are sums; before the first layer there are none.
        count: of units and programs that are waited for.

    Returns:
        The new residual; it times the norm's weight; the factor of the products.
    """
    HIDDEN: gl.constexpr = MODEL.HIDDEN
    element: gl.constexpr = residual[0].dtype
    weights = slabs_of(weight, HIDDEN)  # on their way while this waits
    wait_for_units(counters, count, limit)
    part = gl.arange(0, 16, gl.SliceLayout(1, X))
    at = part[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, X))[None, :]
    new, x = (), ()
    squares = gl.zeros([16, 64], gl.float32, X)
    for slab in gl.static_range((HIDDEN + 1023) // 1024):
        mask = (slab * 1024 + at < HIDDEN) & there
        added = gl.load(sums + slab * 1024 + at, mask=mask, other=0.0, cache_modifier=".cg")
        value = (residual[slab].to(gl.float32) + added).to(element)
        new = new + (value,)
        value = value.to(gl.float32)
        squares += value * value
        x = x + ((value * weights[slab].to(gl.float32)).to(element),)
    mean = gl.sum(gl.sum(squares, 1), 0) * (1.0 / HIDDEN)
    return new, x, gl.rsqrt(mean + MODEL.EPS)


@gluon.jit
def _rows_phase(
    x, K: gl.constexpr, out, first, end, unit, claims, n, counters, pipe, WORK: gl.constexpr
):
    """Products of a program's units of a phase, as sums that others add."""
    done = gl.to_tensor(0)
    row = gl.arange(0, 8, OF_ROWS)
    while unit < end:
        sums, n = multiply(x, K, n, pipe, WORK)
        gl.store(out + (unit - first) * 8 + row, sums)
        done += 1
        unit, claims = next_unit(claims, pipe)
    count_units(counters, done)
    return unit, claims, n


@gluon.jit
def _compute(
    buffers, step, rope_layers, widest, limit, shared, pipe,
    MODEL: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """All phases of all layers, then the head: the life of the warps that compute."""
    HIDDEN: gl.constexpr = MODEL.HIDDEN
    WIDTH: gl.constexpr = MODEL.HEADS * MODEL.HEAD_DIM
    element: gl.constexpr = buffers.attended.dtype.element_ty
    layers = rope_layers
    programs = gl.num_programs(0)
    counters, vectors = buffers.counters, buffers.vectors
    row = gl.arange(0, 8, OF_ROWS)
    n, claims = gl.to_tensor(0), gl.to_tensor(0)
    counts = counts_of(buffers.positions, widest, MODEL, WORK)
    token = gl.maximum(gl.load(buffers.tokens), 0)
    residual = slabs_of(buffers.embedding + token.to(gl.int64) * HIDDEN, HIDDEN)
    unit, claims = next_unit(claims, pipe)
    first = gl.to_tensor(0)  # unit of the phase
    before = gl.to_tensor(0)  # units and programs of the phases before
    for layer in range(layers):
        weight = _vector_at(vectors, layer, INPUT_NORM, element)
        residual, x, rstd = _normed(
            residual, buffers.down_sums, weight, layer > 0, before, counters, limit, MODEL
        )
        done = gl.to_tensor(0)
        end = first + counts.qkv
        while unit < end:
            at = (unit - first) * 8
            bias = gl.zeros([8], gl.float32, OF_ROWS)
            if MODEL.HAS_BIAS:
                which, within = weight_of_row(at, MODEL)
                ptr = _vector_at(vectors, layer, Q_BIAS + which, element)
                bias = gl.load(ptr + within + row).to(gl.float32)
            sums, n = multiply(x, HIDDEN, n, pipe, WORK)
            gl.store(buffers.qkv + at + row, sums * rstd + bias)
            done += 1
            unit, claims = next_unit(claims, pipe)
        count_units(counters, done)
        before += counts.qkv + programs
        first = end

        end = first + counts.attention
        done = gl.to_tensor(0)
        wait_for_units(counters, before, limit)
        while unit < end:
            n = attend(unit - first, layer, counts, n, step, pipe, shared, MODEL, WORK)
            done += 1
            unit, claims = next_unit(claims, pipe)
        count_units(counters, done)
        before += counts.attention + programs
        first = end

        end = first + counts.o
        wait_for_units(counters, before, limit)
        x = slabs_of(buffers.attended, WIDTH)
        unit, claims, n = _rows_phase(
            x, WIDTH, buffers.o_sums, first, end, unit, claims, n, counters, pipe, WORK
        )
        before += counts.o + programs
        first = end

        weight = _vector_at(vectors, layer, POST_NORM, element)
        residual, x, rstd = _normed(
            residual, buffers.o_sums, weight, layer >= 0, before, counters, limit, MODEL
        )
        done = gl.to_tensor(0)
        end = first + counts.gate
        while unit < end:
            sums, n = multiply(x, HIDDEN, n, pipe, WORK)
            PAIR: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
            both = (sums * rstd).reshape([2, 4]).permute((1, 0))
            gate, up = gl.split(gl.convert_layout(both, PAIR))
            to = (unit - first) * 4 + gl.arange(0, 4, gate.type.layout)
            activated = gate / (1 + gl.exp(-gate)) * up
            gl.store(buffers.activated + to, activated.to(element))
            done += 1
            unit, claims = next_unit(claims, pipe)
        count_units(counters, done)
        before += counts.gate + programs
        first = end

        end = first + counts.o
        wait_for_units(counters, before, limit)
        x = slabs_of(buffers.activated, MODEL.INTERMEDIATE)
        unit, claims, n = _rows_phase(
            x, MODEL.INTERMEDIATE, buffers.down_sums, first, end, unit, claims, n, counters, pipe,
            WORK,
        )  # fmt: skip
        before += counts.o + programs
        first = end

    weight = _vector_at(vectors, layers, INPUT_NORM, element)
    residual, x, rstd = _normed(
        residual, buffers.down_sums, weight, layers > 0, before, counters, limit, MODEL
    )
    best = gl.full([8], float("-inf"), gl.float32, OF_ROWS)
    chosen = gl.zeros([8], gl.int32, OF_ROWS)
    while unit < first + MODEL.VOCAB // 8:
        at = (unit - first) * 8 + row
        sums, n = multiply(x, HIDDEN, n, pipe, WORK)
        sums *= rstd
        if WORK.LOGITS:
            gl.store(buffers.logits + at, sums)
        better = (sums > best) | (sums != sums)
        best = gl.where(better, sums, best)
        chosen = gl.where(better, at, chosen)
        unit, claims = next_unit(claims, pipe)
    gl.atomic_max(buffers.best, gl.max(_ordered(best, chosen), 0), sem="relaxed", scope="gpu")


@gluon.jit
def _ordered(value, token):
    """int64 that are ordered as values are, and of equal ones as tokens, the lowest first."""
    bits = value.to(gl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(gl.int64) << 32) | (0x7FFFFFFF - token).to(gl.int64)


@gluon.jit
def _leave(buffers, rank, vocab_start, GROUP: gl.constexpr, MODEL: gl.constexpr):
    """The last program writes the token, and leaves all counters at zero."""
    counters = buffers.counters
    tl.debug_barrier()
    left = gl.atomic_add(counters + LEFT, 1, sem="acq_rel", scope="gpu")
    if left == gl.num_programs(0) - 1:
        best = gl.atomic_xchg(buffers.best, _LEAST, sem="relaxed", scope="gpu")
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF) + vocab_start
        failed = gl.atomic_xchg(counters + FAILED, 0, sem="relaxed", scope="gpu") != 0
        if failed | is_aborted(buffers.control_ptr):
            none = tl.cast(0, tl.int64)
            peers = Peers(buffers.control_ptr, buffers.heap_bases, rank, none)
            abort(peers, NO_CHANNEL, none + rank, none, GROUP)
            token = none - 1
        gl.store(buffers.next_tokens, token)
        gl.store(counters + DONE, 0)
        gl.store(counters + CLAIMED, 0)
        gl.store(counters + LEFT, 0)


@gluon.jit
def _compute_and_leave(
    buffers, step, layers, widest, rank, vocab_start, shared, pipe,
    GROUP: gl.constexpr, MODEL: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    limit = gl.load(buffers.control_ptr + LIMIT)
    _compute(buffers, step, layers, widest, limit, shared, pipe, MODEL, WORK)
    _leave(buffers, rank, vocab_start, GROUP, MODEL)


@gluon.jit(
    do_not_specialize=["layers", "widest", "rank", "vocab_start", "head_lines", "sequence_lines"]
)
def decode_step(
    hidden_desc, heads_desc, intermediate_desc, cache_desc, buffers, origin, rope_scale, stride_key,
    layers, widest, sequence_lines, head_lines, rank, vocab_start,
    GROUP: gl.constexpr, MODEL: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        hidden_desc, heads_desc, intermediate_desc: of rows of HIDDEN, HEADS * HEAD_DIM and
            INTERMEDIATE elements; boxes of 4 rows.
        cache_desc: of keys and values; boxes of 16 KiB.
        origin: of lines, int64, an address.
        stride_key: elements from a key to the next.
        widest: of the layers' windows.
        sequence_lines, head_lines: from one sequence, or KV head, of the cache to the next.
    """
    DIM: gl.constexpr = MODEL.HEAD_DIM
    HEADS: gl.constexpr = triton.next_power_of_2(MODEL.HEADS // MODEL.KV_HEADS)
    element: gl.constexpr = hidden_desc.dtype
    heads = (sequence_lines, head_lines)
    weights = Weights(hidden_desc, heads_desc, intermediate_desc, cache_desc, buffers.lines)
    pipe = make_pipe(weights, MODEL, WORK)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared = (
        gl.allocate_shared_memory(
            gl.float32, [HEADS, 8, DIM], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        ),
        gl.allocate_shared_memory(gl.float32, [HEADS, 8], PLAIN),
        gl.allocate_shared_memory(gl.float32, [HEADS, 8], PLAIN),
    )
    cache = tl.cast(gl.multiple_of(origin, 16), gl.pointer_type(element))
    step = Step(
        buffers.lines, buffers.vectors, cache, buffers.inv_freq, rope_scale, buffers.positions,
        buffers.qkv, buffers.parts,
        buffers.softmax, buffers.attended, buffers.counters, heads, stride_key,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _compute_and_leave,
                (
                    buffers,
                    step,
                    layers,
                    widest,
                    rank,
                    vocab_start,
                    shared,
                    pipe,
                    GROUP,
                    MODEL,
                    WORK,
                ),
            ),
            (
                load,
                (
                    weights,
                    buffers.positions,
                    heads,
                    buffers.counters,
                    layers,
                    widest,
                    pipe,
                    MODEL,
                    WORK,
                ),
            ),
        ],
        [1],
        [40],
    )
