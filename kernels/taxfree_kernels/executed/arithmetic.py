"""The results of vector instructions, on arrays of lanes, in the words of the ISA documents."""

from __future__ import annotations

from typing import Any

import numpy as np

Lanes = Any  # arrays, or one number for all lanes

_HALF = np.uint64(0x10000000)
_LOW = np.uint64(0x1FFFFFFF)


def high_product(a: Lanes, b: Lanes) -> Lanes:
    """V_MUL_HI_U32."""
    return (np.multiply(a, b, dtype=np.uint64) >> np.uint64(32)).astype(np.uint32)


def high_signed_product(a: Lanes, b: Lanes) -> Lanes:
    """V_MUL_HI_I32."""
    return (np.multiply(a, b, dtype=np.int64) >> np.int64(32)).astype(np.int32)


def fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """``a * b + c`` of float32, rounded once.

    The product is exact in float64. The sum is rounded twice, which matters where the first
    rounding gives a number halfway between two of float32, and for results that are subnormal.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    low = total.view(np.uint64) & _LOW
    size = np.abs(total)
    if (low == _HALF).any() or ((size < 2.0**-125) & (size > 0)).any():
        total = _rounded_to_odd(product, np.asarray(c, np.float64), total)
    return total.astype(np.float32)


def _rounded_to_odd(product: Lanes, addend: Lanes, total: Lanes) -> Lanes:
    """The sum such that rounding it again is rounding the exact one (Boldo and Melquiond)."""
    back = total - product
    error = (product - (total - back)) + (addend - back)
    is_inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    bits = np.broadcast_to(total, np.broadcast(product, addend).shape).copy().view(np.uint64)
    is_away = is_inexact & (np.signbit(error) != np.signbit(total)) & (total != 0)
    bits = np.where(is_away, bits - np.uint64(1), bits)
    return np.where(is_inexact, bits | np.uint64(1), bits).view(np.float64)


def scaled(a: Lanes, exponent: Any) -> Lanes:
    """``a * 2**exponent`` in float32, rounded once."""
    return np.ldexp(np.asarray(a, np.float64), exponent).astype(np.float32)


def exponent(a: Lanes) -> Lanes:
    """The biased exponent of float32."""
    return (np.asarray(a, np.float32).view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(int)


def is_subnormal(a: Lanes) -> Lanes:
    """Whether float32 numbers are smaller than all normal ones, and not zero."""
    return (exponent(a) == 0) & (a != 0)


def division_scale(a: Lanes, denominator: Lanes, numerator: Lanes) -> tuple[Lanes, Lanes]:
    """V_DIV_SCALE_F32: scale an operand of a division, `a`, so that no step overflows.

    Returns:
        the operand, and whether the quotient is to be scaled back.
    """
    a, d, n = (
        np.broadcast_to(np.asarray(x, np.float32), (64,)) for x in (a, denominator, numerator)
    )
    is_denominator, is_numerator = a == d, a == n
    inverse_is_tiny, quotient_is_tiny = is_subnormal(np.float32(1) / d), is_subnormal(n / d)
    rules: list[
        tuple[Lanes, Lanes, bool]
    ] = [  # the first that holds: condition, exponent to add, whether to scale back
        (exponent(n) - exponent(d) >= 96, np.where(is_denominator, 64, 0), True),
        (is_subnormal(d), 64, False),
        (inverse_is_tiny & quotient_is_tiny, np.where(is_denominator, 64, 0), True),
        (inverse_is_tiny, -64, False),
        (quotient_is_tiny, np.where(is_numerator, 64, 0), True),
        (exponent(n) <= 23, 64, False),
    ]
    by, scales_back = np.zeros(64, int), np.zeros(64, bool)
    open_lanes = np.ones(64, bool)
    for holds, added, back in rules:
        by = np.where(open_lanes & holds, added, by)
        scales_back |= open_lanes & holds & back
        open_lanes &= ~holds
    is_zero = (n == 0) | (d == 0)
    return np.where(is_zero, np.float32(np.nan), scaled(a, by)), scales_back & ~is_zero


def division_fma(a: Lanes, b: Lanes, c: Lanes, scales_back: Lanes) -> Lanes:
    """V_DIV_FMAS_F32: a fused multiply-add, scaled back where V_DIV_SCALE_F32 asked for it."""
    exact = np.asarray(a, np.float64) * b + c
    by = np.where(exponent(c) > 127, 64, -64)
    plain = fma(a, b, c)
    return np.where(scales_back, np.ldexp(exact, by).astype(np.float32), plain)


def division_fixup(quotient: Lanes, denominator: Lanes, numerator: Lanes) -> Lanes:
    """V_DIV_FIXUP_F32: what IEEE says of special operands, else the quotient with its sign."""
    q, d, n = (np.asarray(x, np.float32) for x in (quotient, denominator, numerator))
    with_sign = np.copysign
    sign = np.where(np.signbit(d) ^ np.signbit(n), np.float32(-1), np.float32(1))
    result = with_sign(np.abs(q), sign)
    result = np.where(exponent(d) == 255, with_sign(np.float32(np.inf), sign), result)
    result = np.where(exponent(n) - exponent(d) < -150, with_sign(np.float32(0), sign), result)
    result = np.where(np.isinf(d) | (n == 0), with_sign(np.float32(0), sign), result)
    result = np.where((d == 0) | np.isinf(n), with_sign(np.float32(np.inf), sign), result)
    is_undefined = (d == 0) & (n == 0) | np.isinf(d) & np.isinf(n) | np.isnan(d) | np.isnan(n)
    return np.where(is_undefined, np.float32(np.nan), result)


def to_unsigned(a: Lanes) -> Lanes:
    """V_CVT_U32_F32: towards zero; what is out of range, to the nearest; NaN to 0."""
    whole = np.trunc(np.asarray(a, np.float64))
    return np.where(whole > 0, np.minimum(whole, 4294967295.0), 0.0).astype(np.uint32)


def to_signed(a: Lanes) -> Lanes:
    """V_CVT_I32_F32: likewise."""
    whole = np.nan_to_num(np.trunc(np.asarray(a, np.float64)), nan=0.0)
    return np.clip(whole, -2147483648.0, 2147483647.0).astype(np.int32)


def to_bfloat16(a: Lanes) -> Lanes:
    """Float32 to the bits of bfloat16, to the nearest, ties to even; NaNs stay NaNs."""
    bits = np.asarray(a, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    quiet = bits | np.uint32(0x400000)
    return np.where(np.isnan(a), quiet, rounded) >> np.uint32(16)


def to_half(a: Lanes) -> Lanes:
    """Float32 to the bits of float16."""
    halves: Lanes = np.asarray(a).astype(np.float16)
    return halves.view(np.uint16).astype(np.uint32)


def permuted_bytes(a: Lanes, b: Lanes, selectors: Lanes) -> Lanes:
    """V_PERM_B32: each byte of `selectors` picks one of `b` (0 to 3) or `a` (4 to 7)."""
    a, b, selectors = (np.broadcast_to(np.asarray(x, np.uint32), (64,)) for x in (a, b, selectors))
    both = np.stack([b, a], 1).view(np.uint8).reshape(64, 8)
    table = np.zeros((64, 256), np.uint8)
    table[:, :8] = both
    for selector, word, half in ((8, 0, 0), (9, 0, 1), (10, 1, 0), (11, 1, 1)):
        sign = both[:, 4 * word + 2 * half + 1] >> 7
        table[:, selector] = sign * 255
    table[:, 13:] = 255
    chosen = np.ascontiguousarray(selectors).view(np.uint8).reshape(64, 4)
    return np.take_along_axis(table, chosen.astype(np.intp), 1).view(np.uint32)[:, 0]


def field(a: Lanes, offset: Lanes, length: Lanes) -> Lanes:
    """V_BFE_U32."""
    length = length & np.uint32(31)
    return a >> (offset & np.uint32(31)) & ((np.uint32(1) << length) - np.uint32(1))


def signed_field(a: Lanes, offset: Lanes, length: Lanes) -> Lanes:
    """V_BFE_I32: beyond the highest bit of `a` lie copies of it."""
    length = length & np.uint32(31)
    ones = (np.uint32(1) << length) - np.uint32(1)
    shifted = np.asarray(a).view(np.int32) >> (offset & np.uint32(31)).astype(np.int32)
    sign = ones ^ ones >> np.uint32(1)
    return (shifted.view(np.uint32) & ones ^ sign) - sign


def reversed_bits(a: Lanes) -> Lanes:
    """V_BFREV_B32."""
    a = np.ascontiguousarray(np.broadcast_to(np.asarray(a, np.uint32), (64,)))
    bits = np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0]


def equal_leading_bits(a: Lanes) -> Lanes:
    """V_FFBH_I32: how many of the highest bits equal the sign; -1 if all do."""
    magnitude = np.broadcast_to(np.asarray(a ^ a >> np.int32(31), np.float64), (64,))
    _, bits = np.frexp(magnitude)  # of a whole number: its length
    return np.where(magnitude == 0, np.int32(-1), np.int32(32) - bits)


def shifted_pair(high: Lanes, low: Lanes, by: Lanes) -> Lanes:
    """V_ALIGNBIT_B32: the low word of two words shifted to the right."""
    both = np.left_shift(high, 32, dtype=np.uint64) | low
    return (both >> np.asarray(by & np.uint32(31), np.uint64)).astype(np.uint32)


def bitwise(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    """V_BITOP3_B32: any function of three bits, by its truth table."""
    result = np.zeros(64, np.uint32)
    for row in range(8):
        if table >> row & 1:
            term = a if row & 4 else ~a
            term = term & (b if row & 2 else ~b)
            result |= term & (c if row & 1 else ~c)
    return result
