"""Corrections to Triton's interpreter, which computes bf16 wrongly (all versions up to 3.9).

Its dot multiplies bf16 bit patterns as integers, and its fp32 -> bf16 cast does not round to
nearest even. Both are overridden on the one builder instance, and tested bit for bit against torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl


def is_interpreting() -> bool:
    """Whether kernels of this process are interpreted; decided when they are defined."""
    return bool(triton.knobs.runtime.interpret)


def correct_bfloat16() -> None:
    """Install the corrections; doing so again changes nothing."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if getattr(builder, "bfloat16_is_correct", False):
        return
    builder.bfloat16_is_correct = True
    handle: Any = interpreter.TensorHandle
    original_cast, original_dot = builder.cast_impl, builder.create_dot
    original_fp_to_fp = builder.create_fp_to_fp

    def cast_impl(source: Any, dst_type: Any) -> Any:
        source_type, target_type = source.dtype.scalar, dst_type.scalar
        if source_type == target_type or tl.bfloat16 not in (source_type, target_type):
            return original_cast(source, dst_type)
        if source_type == tl.bfloat16:
            wide = handle(_to_float32(source.data), tl.float32)
            return wide if target_type == tl.float32 else original_cast(wide, dst_type)
        wide = source if source_type == tl.float32 else original_cast(source, tl.float32)
        return handle(_to_bfloat16(wide.data), tl.bfloat16)

    def create_fp_to_fp(source: Any, dst_type: Any, rounding_mode: Any) -> Any:
        nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if tl.bfloat16 in (source.dtype.scalar, dst_type.scalar) and nearest:
            return cast_impl(source, dst_type)
        return original_fp_to_fp(source, dst_type, rounding_mode)

    def create_dot(a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a = handle(_to_float32(a.data), tl.float32)
            b = handle(_to_float32(b.data), tl.float32)
        return original_dot(a, b, d, *rest)

    def get_bf16(value: float) -> Any:  # which 3.6 does not have at all
        return cast_impl(builder.get_fp32(value), tl.bfloat16)

    builder.cast_impl, builder.create_dot, builder.get_bf16 = cast_impl, create_dot, get_bf16
    builder.create_fp_to_fp = create_fp_to_fp


def _to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    half_minus_tie = np.uint32(0x7FFF) + ((bits >> 16) & 1)  # round to nearest, ties to even
    rounded = ((bits + half_minus_tie) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)
