"""Arithmetic of one lane that NumPy does not have, after the words of the ISA documents.

Words are int64 from 0 to 2**32 - 1; wherever a result is stored, its higher bits are dropped. All
is compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from taxfree_check.executed.encoding import compiled

Word = Any  # int64
Float = Any  # float32

_INFINITY = 0x7F800000
_QUIET = 0x400000


@compiled
def signed(a: Word) -> Word:
    """A word read as two's complement."""
    return np.int64(np.int32(a))


@compiled
def logical_shift(a: Word, by: Word) -> Word:
    """64 bits shifted to the right, without copies of the sign."""
    return np.int64(np.uint64(a) >> np.uint64(by))


@compiled
def is_below(a: Word, b: Word) -> bool:
    """Whether 64 bits are less than others, both unsigned."""
    return bool(np.uint64(a) < np.uint64(b))


@compiled
def f32(a: Word) -> Float:
    """The float32 that a word holds."""
    return np.int32(a).view(np.float32)


@compiled
def bits(x: Float) -> Word:
    """The word that holds a number as float32, rounded to it."""
    return np.int64(np.float32(x).view(np.uint32))


@compiled
def f64(a: Word) -> Any:
    """The float64 that 64 bits hold."""
    return np.int64(a).view(np.float64)


@compiled
def bits64(x: Any) -> Word:
    """The 64 bits that hold a float64."""
    return np.float64(x).view(np.int64)


@intrinsic
def fma(typing_context: Any, a: Float, b: Float, c: Float) -> Any:
    """``a * b + c``, rounded once."""
    return types.float32(a, b, c), lambda context, builder, signature, arguments: builder.fma(
        *arguments
    )


@intrinsic
def fma64(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """As :func:`fma`, of float64."""
    return types.float64(a, b, c), lambda context, builder, signature, arguments: builder.fma(
        *arguments
    )


@compiled
def minimum(x: Float, y: Float) -> Float:
    """The smaller one; of a number and a NaN, the number; of zeros, the negative one."""
    if x == y:
        return f32(bits(x) | bits(y))
    return x if x < y or y != y else y


@compiled
def maximum(x: Float, y: Float) -> Float:
    """The larger one, likewise."""
    if x == y:
        return f32(bits(x) & bits(y))
    return x if x > y or y != y else y


@compiled
def median(x: Float, y: Float, z: Float) -> Float:
    """V_MED3_F32: the middle one; with a NaN, the smallest of the numbers."""
    if x != x or y != y or z != z:
        return minimum(minimum(x, y), z)
    return maximum(minimum(x, y), minimum(maximum(x, y), z))


# -- exponents and divisions ----------------------------------------------------------------------


@compiled
def scaled(x: Float, by: Word) -> Float:
    """``x * 2**by``, rounded once."""
    by = min(max(by, -600), 600)  # float64 has room for that
    return np.float32(math.ldexp(np.float64(x), by))


@compiled
def exponent(x: Float) -> Word:
    """The biased exponent."""
    return bits(x) >> 23 & 255


@compiled
def is_subnormal(x: Float) -> bool:
    """Whether it is smaller than all normal numbers, and not zero."""
    return bool(exponent(x) == 0 and x != 0)


@compiled
def division_scale(x: Float, denominator: Float, numerator: Float) -> tuple[Float, bool]:
    """V_DIV_SCALE_F32: scale an operand of a division, `x`, so that no step overflows.

    Returns:
        the operand, and whether the quotient is to be scaled back.
    """
    d, n = denominator, numerator
    if n == 0 or d == 0:
        return np.float32(np.nan), False
    if exponent(n) - exponent(d) >= 96:
        return scaled(x, 64 if x == d else 0), True
    if is_subnormal(d):
        return scaled(x, 64), False
    inverse_is_tiny, quotient_is_tiny = is_subnormal(np.float32(1) / d), is_subnormal(n / d)
    if inverse_is_tiny and quotient_is_tiny:
        return scaled(x, 64 if x == d else 0), True
    if inverse_is_tiny:
        return scaled(x, -64), False
    if quotient_is_tiny:
        return scaled(x, 64 if x == n else 0), True
    return scaled(x, 64 if exponent(n) <= 23 else 0), False


@compiled
def division_fma(a: Float, b: Float, c: Float, scales_back: bool) -> Float:
    """V_DIV_FMAS_F32: a fused multiply-add, scaled back where V_DIV_SCALE_F32 asked for it."""
    if not scales_back:
        return fma(a, b, c)
    exact = np.float64(a) * np.float64(b) + np.float64(c)
    return np.float32(math.ldexp(exact, 64 if exponent(c) > 127 else -64))


@compiled
def division_fixup(quotient: Float, denominator: Float, numerator: Float) -> Float:
    """V_DIV_FIXUP_F32: what IEEE says of special operands, else the quotient with its sign."""
    d, n = denominator, numerator
    sign = (bits(d) ^ bits(n)) & 1 << 31
    if d != d or n != n or (d == 0 and n == 0) or (np.isinf(d) and np.isinf(n)):
        return np.float32(np.nan)
    if d == 0 or np.isinf(n):
        return f32(sign | _INFINITY)
    if np.isinf(d) or n == 0 or exponent(n) - exponent(d) < -150:
        return f32(sign)
    return f32(sign | bits(quotient) & 0x7FFFFFFF)


# -- conversions ----------------------------------------------------------------------------------


@compiled
def to_unsigned(x: Float) -> Word:
    """V_CVT_U32_F32: towards zero; what is out of range, to the nearest; NaN to 0."""
    return np.int64(min(x, np.float64(0xFFFFFFFF))) if x > 0 else 0


@compiled
def to_signed(x: Float) -> Word:
    """V_CVT_I32_F32: likewise."""
    if x != x:
        return 0
    return np.int64(min(max(np.float64(x), -2147483648.0), 2147483647.0))


@compiled
def to_bfloat16(a: Word) -> Word:
    """The bits of float32 as those of bfloat16: to the nearest, ties to even; NaNs stay NaNs."""
    if a & 0x7FFFFFFF > _INFINITY:
        return (a | _QUIET) >> 16
    return a + 0x7FFF + (a >> 16 & 1) >> 16


@compiled
def to_half(a: Word) -> Word:
    """The bits of float32 as those of float16, likewise."""
    sign, size = a >> 16 & 0x8000, a & 0x7FFFFFFF
    if size > _INFINITY:
        return sign | 0x7E00 | size >> 13 & 0x3FF
    if size < 113 << 23:  # subnormal, in steps of 2**-24
        return sign | np.int64(np.rint(np.float64(f32(size)) * 16777216.0))
    # a carry runs into the exponent
    return sign | min((size + 0xFFF + (size >> 13 & 1) >> 13) - (112 << 10), 0x7C00)


@compiled
def from_half(a: Word) -> Word:
    """The bits of float16 as those of float32."""
    sign, fraction = (a & 0x8000) << 16, a & 0x3FF
    if a >> 10 & 31 == 31:
        return sign | _INFINITY | fraction << 13 | (_QUIET if fraction else 0)
    if not a >> 10 & 31:
        return sign | bits(np.float32(fraction) * np.float32(2.0**-24))
    return sign | (a & 0x7FFF) + (112 << 10) << 13


@compiled
def to_fp8(a: Word, is_fnuz: Word, clamps: Word) -> Word:
    """The bits of float32 as those of e4m3: to the nearest, ties to even; NaNs stay NaNs.

    Args:
        is_fnuz: with the bias 8, and NaN for -0; else as the Open Compute Project has it.
        clamps: whether what is too large, and infinity, becomes the largest; else NaN.
    """
    sign, size, bias = a >> 24 & 0x80, a & 0x7FFFFFFF, 8 if is_fnuz else 7
    if size < 128 - bias << 23:  # subnormal
        code = np.int64(np.rint(np.float64(f32(size)) * 2.0 ** (bias + 2)))
    else:  # a carry runs into the exponent
        code = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (127 - bias << 3)
    most: Word = 0x7F if is_fnuz else 0x7E
    if size > _INFINITY or (code > most and not clamps):
        return 0x80 if is_fnuz else sign | 0x7F
    code = np.int64(min(np.int64(code), np.int64(most)))
    return code if is_fnuz and not code else code | sign


@compiled
def from_fp8(a: Word, is_fnuz: Word) -> Word:
    """The bits of e4m3, likewise, as those of float32."""
    sign, size, bias = (a & 0x80) << 24, a & 0x7F, 8 if is_fnuz else 7
    if a == 0x80 if is_fnuz else size == 0x7F:
        return _INFINITY | _QUIET
    if size < 8:  # subnormal
        return sign | bits(np.float32(size * 2.0 ** -(bias + 2)))
    return sign | (size << 20) + (127 - bias << 23)


@compiled
def packed_fp8(a: Word, b: Word, how: Word, before: Word) -> Word:
    """V_CVT_PK_FP8_F32: two float32 in e4m3, in half of a word, whose other half stays.

    Args:
        how: whether it clamps; 2 more for the upper half; 4 more for fnuz.
        before: the word.
    """
    pair = to_fp8(a, how & 4, how & 1) | to_fp8(b, how & 4, how & 1) << 8
    return before & 0xFFFF | pair << 16 if how & 2 else before & 0xFFFF0000 | pair


# -- bits -----------------------------------------------------------------------------------------


@compiled
def ones(count: Word) -> Word:
    """So many of the lowest bits, up to 64."""
    return -1 if count >= 64 else (1 << count) - 1


@compiled
def count_of_ones(a: Word) -> Word:
    """Of 64 bits, those that are set."""
    count = 0
    while a:
        a &= a - 1
        count += 1
    return count


@compiled
def length(a: Word) -> Word:
    """The position behind the highest bit that is set."""
    count = 0
    while a:
        a = logical_shift(a, 1)
        count += 1
    return count


@compiled
def sign_extended(a: Word, width: Word) -> Word:
    """The lowest bits, 1 to 64, as two's complement."""
    return a << 64 - width >> 64 - width


@compiled
def reversed_bits(a: Word) -> Word:
    """V_BFREV_B32."""
    result = 0
    for bit in range(32):
        result = result << 1 | a >> bit & 1
    return result


@compiled
def permuted_bytes(a: Word, b: Word, selectors: Word) -> Word:
    """V_PERM_B32: each byte of `selectors` picks one of `b` (0 to 3) or `a` (4 to 7).

    8 to 11 pick the sign of a half, 12 is 0, and more is 255.
    """
    both, result = a << 32 | b, 0
    for begin in range(0, 32, 8):
        selector = selectors >> begin & 255
        if selector < 8:
            byte = both >> 8 * selector & 255
        elif selector < 12:
            byte = 255 * (both >> 16 * (selector - 8) + 15 & 1)
        else:
            byte = 0 if selector == 12 else 255
        result |= byte << begin
    return result


@compiled
def bitwise(a: Word, b: Word, c: Word, table: Word) -> Word:
    """V_BITOP3_B32: any function of three bits, by its truth table."""
    result = 0
    for case in range(8):
        if table >> case & 1:
            term = a if case & 4 else ~a
            term &= b if case & 2 else ~b
            result |= term & (c if case & 1 else ~c)
    return result


@compiled
def order(is_less: bool, is_equal: bool, is_greater: bool) -> Word:
    """The bit of a relation that holds: less, equal, greater, or none, of NaNs."""
    return 1 if is_less else 2 if is_equal else 4 if is_greater else 8


#: relation -> the bits of :func:`order` that it accepts
RELATIONS = {
    "lt": 1, "eq": 2, "le": 3, "gt": 4, "lg": 5, "ne": 5, "ge": 6, "o": 7, "u": 8,
    "nge": 9, "nlg": 10, "ngt": 11, "nle": 12, "neq": 13, "nlt": 14,
}  # fmt: skip
