"""The step in plain Triton: the twin of ``persistent``, and the kernel for chiplets.

The interpreter and the checker run it in place of ``persistent``.

Hand-offs are those of ``persistent``: claims in the order of the tape, one counter of done units
and programs, the last split of a pair, Lamport words of o and of down in three areas that take
turns, and the largest logit over all ranks; with several sequences, columns of the residual that
programs own and publish. What it leaves out is within one program: the loader, its ring, and
layouts. All programs have to run at the same time, as those of a cooperative launch do; a rank of
the host fabric has one.

With chiplets, whose L2 caches are their own (AMD), each chiplet has a run of the rows of every
weight, which its programs claim, so that its cache has nothing that others read but activations. A
unit multiplies its rows with all sequences: weights are read once. The last program of a chiplet
counts for all of it, and columns of the residual have owners, so that no program holds all of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.decode_step.decoder import Cache, Decoder, Layer, scales_of, weights_of
from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import EMPTY, Group, Peers, translate
from taxfree_kernels.device.tiles import largest_magnitudes, quantised_groups, scale_of
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import BLOCK

#: words of the counters; then claims and arrivals of each chiplet, and splits that are done
_DONE, _LEFT, _CLAIMED = map(tl.constexpr, range(3))
_BLOCK = tl.constexpr(BLOCK)
_LOG2_E = tl.constexpr(1.4426950408889634)


class Sizes(NamedTuple):
    """The constants of a rank's part of a model, and of the schedule: ``SIZES: tl.constexpr``.

    Args:
        ROWS: of a weight, in a unit; of the gate and of the up projection half as many each.
        KEYS: that a split takes at a time.
        BLOCK: columns of inputs in memory that are multiplied at a time.
        SPLITS, DOWN_PARTS: see ``tape.Model``.
        XCDS: chiplets that have rows of their own.
        OWNED: columns of the residual that a program owns; 0: each program has all.
        SCALES: of the weights, see ``decoder.scales_of``.
        WINDOWS: of each layer, 0 for none.
    """

    HIDDEN: int
    HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    INTERMEDIATE: int
    VOCAB: int
    EPS: float
    HAS_BIAS: bool
    HAS_QK_NORM: bool
    BATCH: int
    ROWS: int
    KEYS: int
    BLOCK: int
    SPLITS: int
    DOWN_PARTS: int
    XCDS: int
    OWNED: int
    SCALES: str
    WINDOWS: tuple[int, ...]


class Weights(NamedTuple):
    """Of a layer, as ``decoder.Layer`` has them; caches are [batch, kv_heads, ..].

    Scales are None beside weights in 16 bits.
    """

    input_norm: Any
    q: Any
    k: Any
    v: Any
    o: Any
    post_norm: Any
    gate: Any
    up: Any
    down: Any
    q_bias: Any
    k_bias: Any
    v_bias: Any
    q_norm: Any
    k_norm: Any
    k_cache: Any
    v_cache: Any
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    o_scale: Any = None
    gate_scale: Any = None
    up_scale: Any = None
    down_scale: Any = None


class Buffers(NamedTuple):
    """See ``persistent.Buffers``; `bests` are int64 [programs, BATCH], `squares` float32 alike."""

    embedding: Any
    norm: Any
    head: Any
    inv_freq: Any
    tokens: Any
    positions: Any
    next_tokens: Any
    logits: Any
    qkv: Any
    parts: Any
    softmax: Any
    attended: Any
    activated: Any
    x: Any
    squares: Any
    bests: Any
    counters: Any


# ---- what a program does by itself ------------------------------------------------------------


@triton.jit
def _slab(ptr, rows, K: tl.constexpr, stride):
    """Rows of a matrix as float32 [rows, K], with zeros behind the last column."""
    column = tl.arange(0, triton.next_power_of_2(K))[None, :]
    mask = (column < K) & (rows[:, None] >= 0)
    return tl.load(ptr + rows[:, None] * stride + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sequences(SIZES: tl.constexpr):
    """Numbers of sequences, and of none, -1, up to a power of two."""
    each = tl.arange(0, triton.next_power_of_2(SIZES.BATCH))
    return tl.where(each < SIZES.BATCH, each, -1)


@triton.jit
def _scale_of_tokens(x, K: tl.constexpr, ELEMENT: tl.constexpr, SIZES: tl.constexpr):
    """The scale of each sequence's inputs in fp8, float32 [sequences]."""
    sequence = _sequences(SIZES)[:, None]
    largest = tl.zeros((sequence.shape[0],), tl.float32)
    for at in range(0, K, SIZES.BLOCK):
        column = at + tl.arange(0, SIZES.BLOCK)[None, :]
        there = (column < K) & (sequence >= 0)
        values = tl.load(x + sequence * K + column, mask=there, other=0.0)
        largest = tl.maximum(largest, largest_magnitudes(values.to(tl.float32)))
    return scale_of(largest, ELEMENT)


@triton.jit
def _multiply(x, first, end, ptr, rows, K: tl.constexpr, SIZES: tl.constexpr, scale_ptr=None):
    """Columns [first, end) of inputs in memory times rows: float32 [sequences, rows].

    Args:
        scale_ptr: the scales of weights in fp8. Whoever multiplies with them quantises the inputs,
            per token or per group of a block's columns; `first` begins one.
    """
    sequence = _sequences(SIZES)[:, None]
    total = tl.zeros((sequence.shape[0], rows.shape[0]), tl.float32)
    ELEMENT: tl.constexpr = ptr.dtype.element_ty
    of_token = None
    if scale_ptr is not None:
        if SIZES.SCALES == "channel":
            of_token = _scale_of_tokens(x, K, ELEMENT, SIZES)
    for at in range(first, end, SIZES.BLOCK):
        column = at + tl.arange(0, SIZES.BLOCK)[None, :]
        there = column < end
        values = tl.load(x + sequence * K + column, mask=there & (sequence >= 0), other=0.0)
        weight = tl.load(ptr + rows[:, None] * K + column, mask=there, other=0.0)
        if scale_ptr is not None:
            values, of_group = quantised_groups(values.to(tl.float32), of_token, ELEMENT)
        products = tl.sum(values.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :], 2)
        if scale_ptr is not None:
            if SIZES.SCALES == "block":
                of_block = rows // _BLOCK * ((K + _BLOCK - 1) // _BLOCK) + at // _BLOCK
                products *= of_group[:, None] * tl.load(scale_ptr + of_block)[None, :]
        total += products
    if of_token is not None:
        total *= of_token[:, None] * tl.load(scale_ptr + rows)[None, :]
    return total


@triton.jit
def _multiply_normed(x, buffers, ptr, rows, SIZES: tl.constexpr, scale_ptr=None):
    """The same of normalised inputs, which a program has, or which owners publish."""
    if SIZES.OWNED:
        products = _multiply(buffers.x, 0, SIZES.HIDDEN, ptr, rows, SIZES.HIDDEN, SIZES, scale_ptr)
    else:
        weight = _slab(ptr, rows, SIZES.HIDDEN, SIZES.HIDDEN)
        products = tl.sum(x[:, None, :] * weight[None, :, :], 2)
    return products


# ---- chiplets ---------------------------------------------------------------------------------


@triton.jit
def _share(units, program, SIZES: tl.constexpr):
    """The first unit of a phase that a program's chiplet has, and how many it has."""
    chiplet = program % SIZES.XCDS
    first = units * chiplet // SIZES.XCDS
    return first, units * (chiplet + 1) // SIZES.XCDS - first


@triton.jit
def _claim(buffers, program, SIZES: tl.constexpr):
    """The next unit of those of all phases that a program's chiplet has."""
    return sync.ticket(buffers.counters + _CLAIMED + program % SIZES.XCDS)


@triton.jit
def _hand_on(units, share, buffers, program, GROUP: tl.constexpr, SIZES: tl.constexpr):
    """Count this program and its units of a phase; or all of its chiplet, if it ends last."""
    if SIZES.XCDS == 1:
        sync.count_units(buffers.counters + _DONE, units + 1, GROUP)
    else:
        chiplet = program % SIZES.XCDS
        members = (tl.num_programs(0) + SIZES.XCDS - 1 - chiplet) // SIZES.XCDS
        arrived = buffers.counters + _CLAIMED + SIZES.XCDS + chiplet
        if sync.arrive(arrived, members, GROUP):
            sync.count_units(buffers.counters + _DONE, share + members, GROUP)


@triton.jit
def _store(ptr, sequence, at, values, stride):
    """Store [sequences, columns] to a matrix."""
    target = ptr + sequence[:, None] * stride + at[None, :]
    tl.store(target, values.to(ptr.dtype.element_ty), mask=(sequence >= 0)[:, None])


@triton.jit
def _turned(angle):
    """Cosine and sine; those of the library have a long path for angles that no position has."""
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    # 2 pi in three parts, whose products with small integers are exact
    angle = angle - turns * 6.28125
    angle = angle - turns * 0.001934051513671875
    angle = angle - turns * 1.255665914602e-06
    square = angle * angle
    cosine, sine = square * 0 + 1, square * 0 + 1
    for each in tl.static_range(18, 0, -2):
        cosine = 1 - square / (each * (each - 1)) * cosine
        sine = 1 - square / (each * (each + 1)) * sine
    return cosine, angle * sine


@triton.jit
def _head_of(ptr, norm_ptr, position, inv_freq, scale, SIZES: tl.constexpr):
    """A head of q or k from its products: norm, then rotary."""
    d = tl.arange(0, SIZES.HEAD_DIM)
    HALF: tl.constexpr = SIZES.HEAD_DIM // 2
    other = (d + HALF) % SIZES.HEAD_DIM
    x, y = tl.load(ptr + d), tl.load(ptr + other)
    if SIZES.HAS_QK_NORM:
        rstd = tl.rsqrt(tl.sum(x * x) / SIZES.HEAD_DIM + SIZES.EPS)
        x *= rstd * tl.load(norm_ptr + d).to(tl.float32)
        y *= rstd * tl.load(norm_ptr + other).to(tl.float32)
    cosine, sine = _turned(position.to(tl.float32) * tl.load(inv_freq + d % HALF))
    return (x * cosine + tl.where(d < HALF, -y, y) * sine) * scale


# ---- sums over all ranks ----------------------------------------------------------------------


@triton.jit
def _area_of(slot, number, GROUP: tl.constexpr, SIZES: tl.constexpr):
    """The area of a sum, by its number in the step: float32 [part, source, sequence, HIDDEN]."""
    WORDS: tl.constexpr = GROUP.WORLD * SIZES.DOWN_PARTS * SIZES.BATCH * SIZES.HIDDEN
    return slot + 2 * GROUP.WORLD * SIZES.BATCH + number % 3 * WORDS


@triton.jit
def _send(area, part, row, products, peers, GROUP: tl.constexpr, SIZES: tl.constexpr):
    """Send products [sequences, rows] of a part of K to all ranks."""
    sequence = _sequences(SIZES)[:, None]
    source = part * GROUP.WORLD + peers.rank
    own = area + (source * SIZES.BATCH + sequence) * SIZES.HIDDEN + row[None, :]
    for step in tl.static_range(1, GROUP.WORLD + 1):
        peer = (peers.rank + step) % GROUP.WORLD
        words = products.to(tl.int32, bitcast=True)
        packets.send(peers, translate(own, peers, peer), words, peer, mask=sequence >= 0)


@triton.jit
def _columns(program, SIZES: tl.constexpr):
    """Columns of the residual that a program has, and HIDDEN for none."""
    if SIZES.OWNED:
        column = program * SIZES.OWNED + tl.arange(0, SIZES.OWNED)
    else:
        column = tl.arange(0, triton.next_power_of_2(SIZES.HIDDEN))
    return tl.minimum(column, SIZES.HIDDEN)


@triton.jit
def _add_sum(
    residual, area, PARTS: tl.constexpr, program, peers,
    GROUP: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Wait for this program's columns of a sum, and add them in the order of sources.

    An owner empties what it has read.
    """
    sequence = _sequences(SIZES)[:, None]
    column = _columns(program, SIZES)[None, :]
    mask = (sequence >= 0) & (column < SIZES.HIDDEN)
    first = area + tl.maximum(sequence, 0) * SIZES.HIDDEN + tl.minimum(column, SIZES.HIDDEN - 1)
    total = tl.zeros(residual.shape, tl.float32)
    if program * SIZES.OWNED < SIZES.HIDDEN:  # the others own nothing
        for source in tl.static_range(GROUP.WORLD * PARTS):
            at = first + source * SIZES.BATCH * SIZES.HIDDEN
            of = tl.full((), source % GROUP.WORLD, tl.int32)
            words, _ = packets.receive(peers, at, of, GROUP, mask=mask)
            total += tl.where(mask, words.to(tl.float32, bitcast=True), 0.0)
            if SIZES.OWNED:
                empty = tl.full(at.shape, EMPTY, tl.int32)
                tl.store(at, empty, mask=mask, cache_modifier=".wt")
    return residual + total


@triton.jit
def _empty(area, program, programs, GROUP: tl.constexpr, SIZES: tl.constexpr):
    """Empty a program's share of an area."""
    WORDS: tl.constexpr = GROUP.WORLD * SIZES.DOWN_PARTS * SIZES.BATCH * SIZES.HIDDEN
    at = tl.arange(0, triton.next_power_of_2(WORDS))
    words = tl.full(at.shape, EMPTY, tl.int32)
    tl.store(area + at, words, mask=(at < WORDS) & (at % programs == program), cache_modifier=".wt")


@triton.jit
def _best_of_ranks(best, slot, peers, GROUP: tl.constexpr, SIZES: tl.constexpr):
    """The largest of all ranks' `best`, int64 [sequences], whose halves are never EMPTY."""
    sequence = _sequences(SIZES)
    place = slot + 2 * tl.maximum(sequence, 0)
    own = place + 2 * SIZES.BATCH * peers.rank
    for step in tl.static_range(1, GROUP.WORLD + 1):
        peer = (peers.rank + step) % GROUP.WORLD
        target = translate(own, peers, peer)
        packets.send(peers, target, (best >> 32).to(tl.int32), peer, mask=sequence >= 0)
        packets.send(peers, target + 1, best.to(tl.int32), peer, mask=sequence >= 0)
    for source in tl.static_range(GROUP.WORLD):
        at = place + 2 * SIZES.BATCH * source
        of = tl.full((), source, tl.int32)
        high, _ = packets.receive(peers, at, of, GROUP)
        low, _ = packets.receive(peers, at + 1, of, GROUP)
        best = tl.maximum(best, (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF))
    return best


@triton.jit
def _ordered(value, token):
    """int64 that are ordered as values are, and of equal ones as tokens, the lowest first."""
    bits = value.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(bits == EMPTY, 0, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _next_x(
    residual, weight_ptr, before, program, buffers, peers,
    GROUP: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """What products read: x [sequences, columns], the norm's factors; what is counted so far."""
    HIDDEN: tl.constexpr = SIZES.HIDDEN
    sequence, column = _sequences(SIZES), _columns(program, SIZES)
    weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    x = residual * weight[None, :]
    squares = tl.sum(residual * residual, 1)
    if SIZES.OWNED:
        mask = (sequence[:, None] >= 0) & (column[None, :] < HIDDEN)
        to = buffers.x + sequence[:, None] * HIDDEN + column[None, :]
        tl.store(to, x.to(buffers.x.dtype.element_ty), mask=mask)
        tl.store(buffers.squares + program * SIZES.BATCH + sequence, squares, mask=sequence >= 0)
        _hand_on(0, 0, buffers, program, GROUP, SIZES)
        before += tl.num_programs(0)
        sync.wait_for_units(buffers.counters + _DONE, before, peers, GROUP)
        squares = tl.zeros(sequence.shape, tl.float32)
        for other in range(tl.num_programs(0)):
            theirs = buffers.squares + other * SIZES.BATCH + sequence
            squares += tl.load(theirs, mask=sequence >= 0, other=0.0)
    return x, tl.rsqrt(squares / HIDDEN + SIZES.EPS)[:, None], before


# ---- attention --------------------------------------------------------------------------------


@triton.jit
def _attend(
    unit, splits, own, window, buffers, scale, strides,
    GROUP: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Attend to a split of a pair's keys; the last split of a pair merges all of them."""
    DIM: tl.constexpr = SIZES.HEAD_DIM
    KEYS: tl.constexpr = SIZES.KEYS
    HEADS: tl.constexpr = SIZES.HEADS // SIZES.KV_HEADS  # of a pair
    QKV: tl.constexpr = (SIZES.HEADS + 2 * SIZES.KV_HEADS) * DIM
    pair, split = unit % (SIZES.BATCH * SIZES.KV_HEADS), unit // (SIZES.BATCH * SIZES.KV_HEADS)
    sequence, head = pair // SIZES.KV_HEADS, pair % SIZES.KV_HEADS
    position = tl.load(buffers.positions + sequence).to(tl.int32)
    oldest = tl.maximum(position + 1 - window, 0) if window else position * 0
    first = oldest // KEYS
    chunks = position // KEYS + 1 - first
    each = tl.cdiv(chunks, splits)
    begin = tl.minimum(split * each, chunks)
    end = tl.minimum(begin + each, chunks)
    d = tl.arange(0, DIM)
    products = buffers.qkv + sequence * QKV
    k_ptr = products + (SIZES.HEADS + head) * DIM
    element: tl.constexpr = own.k_cache.dtype.element_ty
    new_k = _head_of(k_ptr, own.k_norm, position, buffers.inv_freq, scale, SIZES).to(element)
    new_v = tl.load(k_ptr + SIZES.KV_HEADS * DIM + d).to(element)
    cache = sequence * strides[0] + head * strides[1]
    if (begin < end) & ((first + end) * KEYS > position):  # this split has the new key
        to = cache + position * strides[2] + d
        tl.store(own.k_cache + to, new_k)
        tl.store(own.v_cache + to, new_v)
    for query in tl.static_range(HEADS):
        q_ptr = products + (head * HEADS + query) * DIM
        q = _head_of(q_ptr, own.q_norm, position, buffers.inv_freq, scale, SIZES)
        q *= _LOG2_E / DIM**0.5
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        acc = tl.zeros((DIM,), tl.float32)
        for chunk in range(begin, end):
            key = (first + chunk) * KEYS + tl.arange(0, KEYS)
            at = cache + key[:, None] * strides[2] + d[None, :]
            is_old = ((key < position) & (key >= oldest))[:, None]
            is_new = (key == position)[:, None]
            ks = tl.where(is_new, new_k[None, :], tl.load(own.k_cache + at, mask=is_old, other=0.0))
            vs = tl.where(is_new, new_v[None, :], tl.load(own.v_cache + at, mask=is_old, other=0.0))
            logits = tl.sum(ks.to(tl.float32) * q[None, :], 1)
            logits = tl.where((key <= position) & (key >= oldest), logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 0))
            weight, kept = tl.exp2(logits - higher), tl.exp2(top - higher)
            total = total * kept + tl.sum(weight, 0)
            acc = acc * kept + tl.sum(weight[:, None] * vs.to(tl.float32), 0)
            top = higher
        place = (pair * splits + split) * HEADS + query
        tl.store(buffers.parts + place * DIM + d, acc)
        tl.store(buffers.softmax + 2 * place, top)
        tl.store(buffers.softmax + 2 * place + 1, total)
    merged = buffers.counters + _CLAIMED + 2 * SIZES.XCDS + pair
    if sync.arrive(merged, splits, GROUP):
        for query in tl.static_range(HEADS):
            top = tl.full((), float("-inf"), tl.float32)
            total = tl.full((), 0.0, tl.float32)
            acc = tl.zeros((DIM,), tl.float32)
            for part in range(splits):
                place = (pair * splits + part) * HEADS + query
                part_top = tl.load(buffers.softmax + 2 * place)
                higher = tl.maximum(top, part_top)
                weight, kept = tl.exp2(part_top - higher), tl.exp2(top - higher)
                total = total * kept + tl.load(buffers.softmax + 2 * place + 1) * weight
                acc = acc * kept + tl.load(buffers.parts + place * DIM + d) * weight
                top = higher
            row = (sequence * SIZES.HEADS + head * HEADS + query) * DIM
            result = (acc / total).to(buffers.attended.dtype.element_ty)
            tl.store(buffers.attended + row + d, result)


# ---- the step ---------------------------------------------------------------------------------


@triton.jit
def _counts(buffers, programs, SIZES: tl.constexpr):
    """The splits of each pair, which depend on how many keys there are."""
    last = tl.load(buffers.positions).to(tl.int32)
    for each in tl.static_range(1, SIZES.BATCH):
        last = tl.maximum(last, tl.load(buffers.positions + each).to(tl.int32))
    chunks = last // SIZES.KEYS + 1
    each_split = tl.cdiv(chunks * SIZES.BATCH * SIZES.KV_HEADS, programs * SIZES.SPLITS)
    return tl.cdiv(chunks, each_split)


@triton.jit
def _qkv_rows(x, rstd, own, row, buffers, SIZES: tl.constexpr):
    """Products of rows of q, k and v, which are numbered one after the other."""
    Q: tl.constexpr = SIZES.HEADS * SIZES.HEAD_DIM
    K: tl.constexpr = SIZES.KV_HEADS * SIZES.HEAD_DIM
    first = tl.min(row, 0)
    if first < Q:
        products = _multiply_normed(x, buffers, own.q, row, SIZES, own.q_scale) * rstd
        if SIZES.HAS_BIAS:
            products += tl.load(own.q_bias + row).to(tl.float32)[None, :]
    elif first < Q + K:
        products = _multiply_normed(x, buffers, own.k, row - Q, SIZES, own.k_scale) * rstd
        if SIZES.HAS_BIAS:
            products += tl.load(own.k_bias + row - Q).to(tl.float32)[None, :]
    else:
        products = _multiply_normed(x, buffers, own.v, row - Q - K, SIZES, own.v_scale) * rstd
        if SIZES.HAS_BIAS:
            products += tl.load(own.v_bias + row - Q - K).to(tl.float32)[None, :]
    return products


@triton.jit
def _compute(
    layers, buffers, scale, strides, vocab_start, slot, peers, program,
    GROUP: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """All phases of all layers, then the head: int64 [sequences], the largest logits."""
    HIDDEN: tl.constexpr = SIZES.HIDDEN
    WIDTH: tl.constexpr = SIZES.HEADS * SIZES.HEAD_DIM
    QKV: tl.constexpr = WIDTH + 2 * SIZES.KV_HEADS * SIZES.HEAD_DIM
    WIDE: tl.constexpr = SIZES.INTERMEDIATE
    ROWS: tl.constexpr = SIZES.ROWS
    PARTS: tl.constexpr = SIZES.DOWN_PARTS
    WHOLE: tl.constexpr = 1 if SIZES.SCALES == "none" else _BLOCK  # parts begin with a group
    PART: tl.constexpr = (WIDE + PARTS * WHOLE - 1) // (PARTS * WHOLE) * WHOLE
    element: tl.constexpr = buffers.attended.dtype.element_ty
    programs = tl.num_programs(0)
    done = buffers.counters + _DONE
    sequence = _sequences(SIZES)
    lane, half = tl.arange(0, ROWS), tl.arange(0, ROWS // 2)
    splits = _counts(buffers, programs, SIZES)
    token = tl.load(buffers.tokens + sequence, mask=sequence >= 0, other=0)
    column = _columns(program, SIZES)[None, :]
    is_there = (sequence[:, None] >= 0) & (column < HIDDEN)
    embedded = buffers.embedding + token[:, None] * HIDDEN + column
    residual = tl.load(embedded, mask=is_there, other=0.0).to(tl.float32)
    x, rstd, before = _next_x(
        residual, layers[0].input_norm, programs * 0, program, buffers, peers, GROUP, SIZES
    )  # and units and programs of the counted phases before
    unit = _claim(buffers, program, SIZES)
    first = unit * 0  # unit of the phase, of those that the chiplet has
    for layer in tl.static_range(len(SIZES.WINDOWS)):
        own = layers[layer]
        begin, share = _share(QKV // ROWS, program, SIZES)
        end = first + share
        units = unit * 0
        while unit < end:
            row = (begin + unit - first) * ROWS + lane
            products = _qkv_rows(x, rstd, own, row, buffers, SIZES)
            _store(buffers.qkv, sequence, row, products, QKV)
            units += 1
            unit = _claim(buffers, program, SIZES)
        _hand_on(units, share, buffers, program, GROUP, SIZES)
        before += QKV // ROWS + programs
        first = end

        begin, share = _share(splits * SIZES.BATCH * SIZES.KV_HEADS, program, SIZES)
        end = first + share
        units = unit * 0
        sync.wait_for_units(done, before, peers, GROUP)
        if SIZES.OWNED == 0:  # of the last down
            _empty(_area_of(slot, 2 * layer + 2, GROUP, SIZES), program, programs, GROUP, SIZES)
        while unit < end:
            _attend(
                begin + unit - first, splits, own, SIZES.WINDOWS[layer], buffers, scale, strides,
                GROUP, SIZES,
            )  # fmt: skip
            units += 1
            unit = _claim(buffers, program, SIZES)
        _hand_on(units, share, buffers, program, GROUP, SIZES)
        before += splits * SIZES.BATCH * SIZES.KV_HEADS + programs
        first = end

        begin, share = _share(HIDDEN // ROWS, program, SIZES)
        end = first + share
        area = _area_of(slot, 2 * layer, GROUP, SIZES)
        sync.wait_for_units(done, before, peers, GROUP)
        while unit < end:
            row = (begin + unit - first) * ROWS + lane
            products = _multiply(buffers.attended, 0, WIDTH, own.o, row, WIDTH, SIZES, own.o_scale)
            _send(area, 0, row, products, peers, GROUP, SIZES)
            unit = _claim(buffers, program, SIZES)
        first = end

        residual = _add_sum(residual, area, 1, program, peers, GROUP, SIZES)
        residual = residual.to(element).to(tl.float32)
        x, rstd, before = _next_x(
            residual, own.post_norm, before, program, buffers, peers, GROUP, SIZES
        )
        begin, share = _share(WIDE // (ROWS // 2), program, SIZES)
        end = first + share
        units = unit * 0
        while unit < end:
            row = (begin + unit - first) * (ROWS // 2) + half
            gate = _multiply_normed(x, buffers, own.gate, row, SIZES, own.gate_scale) * rstd
            up = _multiply_normed(x, buffers, own.up, row, SIZES, own.up_scale) * rstd
            _store(buffers.activated, sequence, row, gate * tl.sigmoid(gate) * up, WIDE)
            units += 1
            unit = _claim(buffers, program, SIZES)
        _hand_on(units, share, buffers, program, GROUP, SIZES)
        before += WIDE // (ROWS // 2) + programs
        first = end

        begin, share = _share(HIDDEN // ROWS * PARTS, program, SIZES)
        end = first + share
        sync.wait_for_units(done, before, peers, GROUP)
        if SIZES.OWNED == 0:
            _empty(area, program, programs, GROUP, SIZES)
        area = _area_of(slot, 2 * layer + 1, GROUP, SIZES)
        while unit < end:
            at = begin + unit - first
            part, row = at % PARTS, at // PARTS * ROWS + lane
            products = _multiply(
                buffers.activated, part * PART, min(part * PART + PART, WIDE), own.down, row, WIDE,
                SIZES, own.down_scale,
            )  # fmt: skip
            _send(area, part, row, products, peers, GROUP, SIZES)
            unit = _claim(buffers, program, SIZES)
        first = end

        residual = _add_sum(residual, area, PARTS, program, peers, GROUP, SIZES)
        residual = residual.to(element).to(tl.float32)
        norm = buffers.norm
        if layer + 1 < len(SIZES.WINDOWS):
            norm = layers[layer + 1].input_norm
        x, rstd, before = _next_x(residual, norm, before, program, buffers, peers, GROUP, SIZES)

    best = tl.full(sequence.shape, -(1 << 63), tl.int64)
    begin, share = _share(SIZES.VOCAB // ROWS, program, SIZES)
    while unit < first + share:
        row = (begin + unit - first) * ROWS + lane
        logits = _multiply_normed(x, buffers, buffers.head, row, SIZES) * rstd
        _store(buffers.logits, sequence, row, logits, SIZES.VOCAB)
        best = tl.maximum(best, tl.max(_ordered(logits, (row + vocab_start)[None, :]), 1))
        unit = _claim(buffers, program, SIZES)
    return best


@triton.jit(do_not_specialize=["vocab_start", "rank", "stride_slot", "used"])
def _decode_step(
    layers, buffers, scale, strides, vocab_start, inbox_ptr, stride_slot, used, control_ptr,
    heap_bases, rank, GROUP: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    generation, turn = sync.running_generation(control_ptr), packets.running_turn(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot = inbox_ptr + turn % 3 * stride_slot
    packets.empty_last_turn(control_ptr, inbox_ptr, stride_slot, turn, used, program, programs)
    best = _compute(
        layers, buffers, scale, strides, vocab_start, slot, peers, program, GROUP, SIZES
    )
    sequence = _sequences(SIZES)
    is_one = sequence >= 0
    tl.store(buffers.bests + program * SIZES.BATCH + sequence, best, mask=is_one)
    if sync.arrive(buffers.counters + _LEFT, programs, GROUP):
        for other in range(programs):
            theirs = buffers.bests + other * SIZES.BATCH + sequence
            best = tl.maximum(best, tl.load(theirs, mask=is_one, other=0))
        best = _best_of_ranks(best, slot, peers, GROUP, SIZES)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        token = tl.where(sync.is_aborted(control_ptr), -1, token)
        tl.store(buffers.next_tokens + sequence, token, mask=is_one)
        for chiplet in tl.static_range(SIZES.XCDS):
            tl.store(buffers.counters + _CLAIMED + chiplet, 0)
        tl.store(buffers.counters + _DONE, 0)
    packets.leave_turn(control_ptr)
    sync.leave(control_ptr)


class TwinStep:
    """A decode step by the twin, as :class:`.step.DecodeStep`; for tests, the checker, and AMD.

    Args:
        decoder, cache: this rank's parts, of any dtype; the cache is dense.
        batch: sequences.
        fabric: this rank's.
        config: SPLITS, DOWN_PARTS and XCDS, see :class:`Sizes`; others change nothing here.
        programs: of a rank, at least one for each chiplet; all have to run at the same time.
        rows, keys: see :class:`Sizes`.

    Raises:
        PlanError: it does not compute such a model.
    """

    def __init__(
        self, decoder: Decoder, cache: Cache, batch: int, fabric: Fabric,
        config: Any = None, programs: int = 1, rows: int = 4, keys: int = 4,
    ) -> None:  # fmt: skip
        first_config = {"SPLITS": 1, "DOWN_PARTS": 1, "XCDS": fabric.hardware.num_xcds}
        config = first_config | dict(config or {})
        first, dim, world = decoder.layers[0], decoder.head_dim, fabric.world_size
        hidden = first.q.shape[1]
        sizes = Sizes(
            HIDDEN=hidden,
            HEADS=len(first.q) // dim,
            KV_HEADS=len(first.k) // dim,
            HEAD_DIM=dim,
            INTERMEDIATE=len(first.gate),
            VOCAB=len(decoder.head),
            EPS=decoder.eps,
            HAS_BIAS=first.q_bias is not None,
            HAS_QK_NORM=first.q_norm is not None,
            BATCH=batch,
            ROWS=rows,
            KEYS=keys,
            BLOCK=_BLOCK.value
            if first.scales
            else min(1024, triton.next_power_of_2(max(hidden, len(first.gate), len(first.q)))),
            SPLITS=config["SPLITS"],
            DOWN_PARTS=config["DOWN_PARTS"],
            XCDS=config["XCDS"],
            OWNED=1 << (-(-hidden // programs) - 1).bit_length()
            if batch > 1 or config["XCDS"] > 1 or first.scales
            else 0,
            SCALES=scales_of(first),
            WINDOWS=tuple(layer.window or 0 for layer in decoder.layers),
        )
        _require_served(sizes, decoder, cache)
        if programs < sizes.XCDS:
            raise PlanError(f"the twin of decode_step: {programs} programs, {sizes.XCDS} chiplets")
        self._held, self._fabric = (decoder, cache), fabric
        device, dtype = decoder.head.device, decoder.head.dtype
        pairs = batch * sizes.KV_HEADS

        def empty(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device=device)

        parts = pairs * (programs * sizes.SPLITS + 1) * (sizes.HEADS // sizes.KV_HEADS)
        self.buffers = Buffers(
            embedding=decoder.embedding,
            norm=decoder.norm,
            head=decoder.head,
            inv_freq=decoder.inv_freq,
            tokens=empty(batch, of=torch.int64),
            positions=empty(batch, of=torch.int64),
            next_tokens=empty(batch, of=torch.int64),
            logits=empty(batch, sizes.VOCAB),
            qkv=empty(batch, (sizes.HEADS + 2 * sizes.KV_HEADS) * dim),
            parts=empty(parts * dim),
            softmax=empty(parts * 2),
            attended=empty(batch, sizes.HEADS * dim, of=dtype),
            activated=empty(batch, sizes.INTERMEDIATE, of=dtype),
            x=empty(batch, hidden, of=dtype),
            squares=empty(programs, batch),
            bests=empty(programs, batch, of=torch.int64),
            counters=torch.zeros(
                _CLAIMED.value + 2 * sizes.XCDS + pairs, dtype=torch.int32, device=device
            ),
        )  # fmt: skip
        header = 2 * world * batch
        words = header + 3 * world * sizes.DOWN_PARTS * batch * hidden
        inbox, stride_slot = fabric.pool.lamport_slots(words)
        used = header if sizes.OWNED else words  # owners empty what they have read
        self._args = (
            tuple(map(_weights, decoder.layers, cache.keys, cache.values)),
            self.buffers, decoder.rope_scale, cache.keys[0].stride()[:3], decoder.vocab_start,
            inbox, stride_slot, used, fabric.pool.control, fabric.heap_bases, fabric.rank,
        )  # fmt: skip
        constants = {"GROUP": Group(world, fabric.backend), "SIZES": sizes}
        options = {"launch_cooperative_grid": True} if fabric.backend == "hip" else {}
        self._kernel = Kernel(_decode_step, programs, constants, options)

    @property
    def logits(self) -> torch.Tensor:
        """float32 [batch, vocabulary of this rank] of the last call."""
        return self.buffers.logits

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`.step.DecodeStep.__call__`."""
        self._fabric.pool.check()
        self.buffers.tokens.copy_(tokens)
        self.buffers.positions.copy_(positions)
        self.run()
        return self.buffers.next_tokens.clone()

    def run(self) -> None:
        """Launch, on the tokens and positions that are in :attr:`buffers`."""
        self._kernel(*self._args)


def _weights(layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> Weights:
    """What a layer lacks is another tensor, which nobody reads."""
    found = [getattr(layer, name) for name in Weights._fields[: Weights._fields.index("k_cache")]]
    others = (layer.input_norm if each is None else each for each in found)
    return Weights(*[*others, keys, values, *layer.scales])


def _require_served(sizes: Sizes, decoder: Decoder, cache: Cache) -> None:
    if {scales_of(layer) for layer in decoder.layers} != {sizes.SCALES}:
        raise PlanError("the twin of decode_step: layers with scales of different kinds")
    of_heads = (sizes.HEADS * sizes.HEAD_DIM, sizes.KV_HEADS * sizes.HEAD_DIM)
    for rows in (*of_heads, sizes.HIDDEN, 2 * sizes.INTERMEDIATE, sizes.VOCAB):
        if rows % sizes.ROWS:
            raise PlanError(f"the twin of decode_step: {rows} rows, units have {sizes.ROWS}")
    if sizes.HEAD_DIM & (sizes.HEAD_DIM - 1):
        raise PlanError("the twin of decode_step: head_dim is no power of two")
    strides = {each.stride() for each in (*cache.keys, *cache.values)}
    if cache.block_table is not None or len(strides) > 1 or {each[3] for each in strides} != {1}:
        raise PlanError("the twin of decode_step: a cache with pages, or with other strides")
    weights = [each for layer in decoder.layers for each in (*weights_of(layer), *layer.scales)]
    if not all(each.is_contiguous() for each in (*weights, decoder.head, decoder.embedding)):
        raise PlanError("the twin of decode_step: weights with other strides")
