"""Products with weights in fp8 in the persistent step, and what quantises their inputs.

Weights come through the ring as 16-bit words of two elements, with twice as much of K in a chunk.
Whoever multiplies quantises its inputs, from the 16-bit elements that operations would quantise, in
registers: per token and output channel, or per group of 128 and block of 128 x 128. Nothing more
is handed on for it than the largest magnitudes of tokens, by several sequences, whose programs see
a part of a token at a time.

With one sequence, words are converted to float32, and multiplied and added. With several, matrix
instructions multiply fp8. There, each of eight warps has 128 of K of a chunk: a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taxfree_kernels.decode_step import chunks
from taxfree_kernels.decode_step.rows import (
    ACC,
    OF_SEQUENCES,
    PRODUCTS,
    make_row_staging,
    over_warps,
)
from taxfree_kernels.device.specialized import load_box, reinterpreted
from taxfree_kernels.variant import BLOCK, LEAST_SCALE

_MOST = gl.constexpr(448.0)  # of e4m3
_LEAST_SCALE = gl.constexpr(LEAST_SCALE)
_BLOCK = gl.constexpr(BLOCK)
WEIGHTS = gl.constexpr(7)  # of a layer, in the table of scales
_AT_ONCE = gl.constexpr(128)  # magnitudes

# ---- layouts --------------------------------------------------------------------------------

_OF_BLOCKS = gl.constexpr(gl.SliceLayout(2, chunks.TILE))  # of rows and blocks of K of a chunk
_GROUPS_OF_CHUNK = gl.constexpr(gl.SliceLayout(0, _OF_BLOCKS))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC, 4))
_INPUTS = gl.constexpr(gl.DotOperandLayout(1, ACC, 4))
_OF_TOKENS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, _INPUTS)))
_OF_ACC = gl.constexpr(gl.SliceLayout(1, ACC))  # of warps and sequences
_OF_WARPS = gl.constexpr(gl.SliceLayout(1, _OF_ACC))
_OF_CHANNELS = gl.constexpr(gl.SliceLayout(1, PRODUCTS))


class Scales(NamedTuple):
    """Addresses of the scales of the first row of both halves of a unit; of blocks, of a row's."""

    first: Any
    second: Any


@gluon.jit
def scales_of(table, layer, first, row, second, other_row, K: gl.constexpr, MODEL: gl.constexpr):
    """``Scales`` of a unit; nothing in 16 bits.

    Args:
        table: see ``tape.scale_addresses_of``.
        first, row, second, other_row: the weight of either half of its rows, and its first row.
    """
    scales = ()
    if MODEL.SCALES != "none":
        if MODEL.SCALES == "block":
            row = row // _BLOCK * (K // _BLOCK)
            other_row = other_row // _BLOCK * (K // _BLOCK)
        to = table + layer * WEIGHTS
        one, other = gl.load(to + first) + 4 * row, gl.load(to + second) + 4 * other_row
        scales = Scales(one, other)  # type: ignore[assignment]
    return scales


class _Divisor(NamedTuple):
    """A scale to divide by, and its inverse; zeros for one that is infinite."""

    by: Any
    inverse: Any


@gluon.jit
def _scale_and_divisor(largest):
    """Of what has these largest magnitudes."""
    is_finite = largest < float("inf")
    scale = gl.maximum(divided(largest, _Divisor(_MOST, 1.0 / _MOST)), _LEAST_SCALE)
    scale = gl.where(is_finite, scale, float("inf"))
    by = gl.where(is_finite, scale, 0.0)
    return scale, _Divisor(by, gl.where(is_finite, 1.0 / scale, 0.0))


@gluon.jit
def divided(value, divisor):
    """Correctly rounded: quotients of bf16 are often halfway between two numbers of e4m3."""
    by, inverse = divisor
    about = value * inverse
    return gl.fma(gl.fma(-about, by, value), inverse, about)


# ---- one sequence -----------------------------------------------------------------------------


@gluon.jit
def unpack_e4m3(words):
    """float32 of the first and of the second element of int16 words."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 p, q;
        mov.b32 {a, b}, $4;
        cvt.rn.f16x2.e4m3x2 p, a;
        cvt.rn.f16x2.e4m3x2 q, b;
        mov.b32 {a, b}, p;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $2, b;
        mov.b32 {a, b}, q;
        cvt.f32.f16 $1, a;
        cvt.f32.f16 $3, b;
        }""",
        "=&f,=&f,=&f,=&f,r", [words],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def pack_e4m3(first, second):
    """int16 words of float32, rounded to e4m3."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $2; mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f", [first, second], dtype=gl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _halves(pair, element: gl.constexpr):
    """float32 of both 16-bit elements of int32."""
    first = (pair & 0xFFFF).to(gl.int16).to(element, bitcast=True)
    second = (pair >> 16).to(gl.int16).to(element, bitcast=True)
    return first.to(gl.float32), second.to(gl.float32)


@gluon.jit
def _magnitude(pair, element: gl.constexpr):
    """The larger of both; a maximum takes no NaN."""
    first, second = _halves(pair, element)
    return gl.maximum(gl.maximum(first, -first), gl.maximum(second, -second))


@gluon.jit
def _pairs_of_slab(pairs, slab, K: gl.constexpr):
    """int32 [16, 64], each of two elements of K; zeros behind the last."""
    at = gl.arange(0, 16, gl.SliceLayout(1, chunks.X))[:, None] * 64
    at += gl.arange(0, 64, gl.SliceLayout(0, chunks.X))[None, :]
    return gl.where(slab * 1024 + at < K // 2, pairs.index(slab).load(chunks.X), 0)


@gluon.jit
def quantise_staged(staging, K: gl.constexpr, MODEL: gl.constexpr):
    """Quantise K elements that products read in place; returns a token's scale, if it has one.

    Args:
        staging: see ``sums.make_staging``; words go where elements were, as each slab is read
            before.
    """
    element: gl.constexpr = staging.slabs.dtype
    COUNT: gl.constexpr = chunks.slabs_in(chunks.words_in(K, MODEL.SCALES), 1)
    token_scale = ()
    if MODEL.SCALES == "channel":
        largest = gl.zeros([16, 64], gl.float32, chunks.X)
        for slab in range(chunks.rolled(COUNT)):
            pair = _pairs_of_slab(staging.pairs, slab, K)
            largest = gl.maximum(largest, _magnitude(pair, element))
        token_scale, divisor = _scale_and_divisor(gl.max(gl.max(largest, 1), 0))
    for slab in range(chunks.rolled(COUNT)):
        pair = _pairs_of_slab(staging.pairs, slab, K)
        first, second = _halves(pair, element)
        if MODEL.SCALES == "block":
            scale, of_group = _scale_and_divisor(gl.max(_magnitude(pair, element), 1))
            staging.scales.index(slab).store(scale)
            divisor = _Divisor(of_group.by[:, None], of_group.inverse[:, None])
        words = pack_e4m3(divided(first, divisor), divided(second, divisor))
        staging.words.index(slab).store(words)
    return token_scale


@gluon.jit
def _scales_of_chunk(scales, slab, K: gl.constexpr):
    """float32 [8, 16]: the scales of blocks of K of a chunk, for each row of a unit."""
    row = gl.arange(0, 8, gl.SliceLayout(1, _OF_BLOCKS))[:, None]
    block = slab * 16 + gl.arange(0, 16, gl.SliceLayout(0, _OF_BLOCKS))[None, :]
    address = gl.where(row < 4, scales.first, scales.second) + 4 * block
    there = block < K // _BLOCK
    return gl.load(tl.cast(address, gl.pointer_type(gl.float32)), mask=there, other=0.0)


@gluon.jit
def multiply_words(
    x_scale, scales, K: gl.constexpr, first, end, n, staging, pipe, MODEL: gl.constexpr
):
    """float32 [8]: the products of a unit's rows with slabs of words in shared memory, scaled."""
    acc = gl.zeros([8, 16, 64], gl.float32, chunks.TILE)
    if MODEL.SCALES == "channel":
        row = gl.arange(0, 8, chunks.OF_ROWS)
        address = gl.where(row < 4, scales.first, scales.second - 16) + 4 * row
        of_rows = gl.load(tl.cast(address, gl.pointer_type(gl.float32))) * x_scale
    for slab in range(first, chunks.rolled(end)):
        if MODEL.SCALES == "block":
            of_group = staging.scales.index(slab).load(_GROUPS_OF_CHUNK)
            factor = _scales_of_chunk(scales, slab, K) * of_group[None, :]
        stage = n % MODEL.STAGES
        mbarrier.wait(pipe.full.index(stage), n // MODEL.STAGES & 1)
        rows = pipe.tiles.index(stage).load(chunks.TILE)
        chunks.hand_back(stage, pipe)
        low, high = unpack_e4m3(rows.to(gl.int16, bitcast=True))
        x_low, x_high = unpack_e4m3(staging.words.index(slab).load(chunks.X))
        if MODEL.SCALES == "block":
            products = low * x_low[None, :, :] + high * x_high[None, :, :]
            acc += products * factor[:, :, None]
        else:
            acc += low * x_low[None, :, :]
            acc += high * x_high[None, :, :]
        n += 1
    total = gl.sum(gl.sum(acc, 2), 1)
    if MODEL.SCALES == "channel":
        total *= of_rows
    return total, n


# ---- several sequences ------------------------------------------------------------------------


class WideStaging(NamedTuple):
    """``rows.Staging`` of the head's inputs, and the same memory as those of words.

    Args:
        halves: [2, 8, 1, N, 64], halves of groups of 128, of [K / 128, half, sequence, 64].
        groups: [8, N, 128], of both.
        bytes: chunks of the ring in fp8, [STAGES, 8, 16, 128].
    """

    plain: Any
    halves: Any
    groups: Any
    bytes: Any


@gluon.jit
def joined_halves(inputs, N: gl.constexpr, layout: gl.constexpr):
    """[2, 8, N, 64] as [8, N, 128]: columns behind the 64th lie behind all rows."""
    return reinterpreted(inputs, [8, N, 128], layout)


@gluon.jit
def make_wide_staging(element: gl.constexpr, room, pipe, MODEL: gl.constexpr):
    """Allocate it."""
    N: gl.constexpr = chunks.sequences(MODEL.BATCH)
    plain = make_row_staging(element, room, MODEL)
    halves: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 1, N, 64], element)
    groups: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, N, 128], element)
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 16, 128], gl.float8e4nv)
    return WideStaging(
        plain,
        reinterpreted(plain.inputs, [2, 8, 1, N, 64], halves),
        joined_halves(plain.inputs, N, groups),
        reinterpreted(pipe.tiles, [MODEL.STAGES, 8, 16, 128], rows, gl.float8e4nv),
    )


@gluon.jit
def largest_of_tokens(tops, COUNT: gl.constexpr, MODEL: gl.constexpr):
    """The scale of each token, float32 [N], and its divisor, of COUNT magnitudes of each.

    Args:
        tops: float32 [BATCH, COUNT].
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [chunks.WARPS, 1], [1, 0])
    sequence = gl.arange(0, chunks.sequences(MODEL.BATCH), gl.SliceLayout(1, L))[:, None]
    largest = gl.zeros([chunks.sequences(MODEL.BATCH), _AT_ONCE], gl.float32, L)
    for first in gl.static_range(0, COUNT, _AT_ONCE):
        at = first + gl.arange(0, _AT_ONCE, gl.SliceLayout(0, L))[None, :]
        there = (sequence < MODEL.BATCH) & (at < COUNT)
        found = gl.load(tops + sequence * COUNT + at, mask=there, other=0.0, cache_modifier=".cg")
        largest = gl.maximum(largest, found)
    scale, divisor = _scale_and_divisor(gl.max(largest, 1))
    by = gl.convert_layout(divisor.by, _OF_TOKENS)
    inverse = gl.convert_layout(divisor.inverse, _OF_TOKENS)
    return gl.convert_layout(scale, OF_SEQUENCES), _Divisor(by, inverse)


@gluon.jit
def _load_halves(inputs, slab, staging, MODEL: gl.constexpr):
    """Let TMA bring a slab of the inputs, as two pieces."""
    for half in gl.static_range(2):
        full = staging.plain.full.index(half)
        mbarrier.expect(full, chunks.sequences(MODEL.BATCH) * 1024)
        load_box(inputs, [slab * 8, half, 0, 0], full, staging.halves.index(half))


@gluon.jit
def _quantised_slab(values, x, MODEL: gl.constexpr):
    """A slab in fp8, and with blocks the scale of each warp's group, float32 [8, N]."""
    values = values.to(gl.float32)
    if MODEL.SCALES == "channel":
        scale = ()
        by, inverse = x[1].by[None, :], x[1].inverse[None, :]
    else:
        scale, of_group = _scale_and_divisor(gl.max(gl.maximum(values, -values), 1))
        scale = gl.convert_layout(scale, _OF_ACC)
        by, inverse = of_group
    divisor = _Divisor(by[:, None, :], inverse[:, None, :])
    return divided(values, divisor).to(gl.float8e4nv), scale


@gluon.jit
def _scale_of_warp(address, slab, K: gl.constexpr):
    """float32 [8]: the scales of the blocks of K of a chunk."""
    block = slab * 8 + gl.arange(0, 8, _OF_WARPS)
    ptr = tl.cast(address, gl.pointer_type(gl.float32)) + block
    return gl.load(ptr, mask=block < K // _BLOCK, other=0.0)


@gluon.jit
def multiply_words_of_rows(
    x, scales, inputs, K: gl.constexpr, first, end, n, pieces, staging, pipe, MODEL: gl.constexpr
):
    """The products of a unit's rows with so many slabs of the inputs, scaled.

    Args:
        x: scales of tokens and their divisors, where weights have scales of channels.
        inputs: a descriptor, [K / 128, 2, BATCH, 64]; rows behind the last sequence are 0.
        pieces: of inputs, read before.

    Returns:
        float32 [16, N] of each group of rows; the numbers of chunks and of pieces.
    """
    N: gl.constexpr = chunks.sequences(MODEL.BATCH)
    sums, of_rows = (), ()
    for group in gl.static_range(chunks.GROUPS):
        sums = sums + (gl.zeros([chunks.WARPS, 16, N], gl.float32, ACC),)  # type: ignore[assignment]
        if MODEL.SCALES == "channel":
            row = gl.arange(0, 16, _OF_CHANNELS)
            ptr = tl.cast(scales[group], gl.pointer_type(gl.float32)) + row
            of_rows = of_rows + (gl.load(ptr),)  # type: ignore[assignment]
    if first < end:
        _load_halves(inputs, first, staging, MODEL)
    for slab in range(first, end):
        of_warps = ()
        if MODEL.SCALES == "block":
            for group in gl.static_range(chunks.GROUPS):
                of_warps = of_warps + (_scale_of_warp(scales[group], slab, K),)  # type: ignore[assignment]
        for half in gl.static_range(2):
            mbarrier.wait(staging.plain.full.index(half), pieces // 2 & 1)
        values = staging.groups.permute((0, 2, 1)).load(_INPUTS)
        if slab + 1 < end:
            chunks.fence_stage()
            tl.debug_barrier()  # all warps have loaded, and fenced
            _load_halves(inputs, slab + 1, staging, MODEL)
        quantised, scale = _quantised_slab(values, x, MODEL)
        new = ()
        for group in gl.static_range(chunks.GROUPS):
            stage = n % MODEL.STAGES
            mbarrier.wait(pipe.full.index(stage), n // MODEL.STAGES & 1)
            rows = staging.bytes.index(stage).load(_WEIGHTS)
            chunks.hand_back(stage, pipe)
            if MODEL.SCALES == "block":
                zeros = gl.zeros([chunks.WARPS, 16, N], gl.float32, ACC)
                factor = (scale * of_warps[group][:, None])[:, None, :]
                new = new + (sums[group] + mma_v2(rows, quantised, zeros) * factor,)  # type: ignore[assignment]
            else:
                new = new + (mma_v2(rows, quantised, sums[group]),)  # type: ignore[assignment]
            n += 1
        sums = new
        pieces += 2
    products = ()
    for group in gl.static_range(chunks.GROUPS):
        total = over_warps(sums[group], staging.plain.sums.index(group))
        if MODEL.SCALES == "channel":
            total *= of_rows[group][:, None] * x[0][None, :]
        products = products + (total,)  # type: ignore[assignment]
    return products, n, pieces
