"""Corrections to Triton's interpreter, and patches that make it several times faster.

Up to Triton 3.9 it computes bf16 wrongly: its dot multiplies bit patterns as integers, and its cast
from fp32 does not round to nearest even. It knows no NaN of e4m3, and rounds to it half up. All of
this is overridden on its single builder instance, and tested bit for bit against torch.

It is slow because it repeats work: it patches the language at each call of a device function,
builds a type with its shape for each value, and finds the types of operands that are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core


def is_interpreting() -> bool:
    """Whether this process interprets its kernels; fixed when the kernels are defined."""
    return bool(triton.knobs.runtime.interpret)


def correct_types() -> None:
    """Install the corrections; idempotent."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if getattr(builder, "types_are_correct", False):
        return
    builder.types_are_correct = True
    handle: Any = interpreter.TensorHandle
    original_cast, original_dot = builder.cast_impl, builder.create_dot
    original_fp_to_fp = builder.create_fp_to_fp

    def cast_impl(source: Any, dst_type: Any) -> Any:
        source_type, target_type = source.dtype.scalar, dst_type.scalar
        if source_type in _FP8 and source_type != target_type:
            return cast_impl(handle(_FP8[source_type][source.data], tl.float32), dst_type)
        if target_type in _FP8 and source_type != target_type:
            wide = cast_impl(source, tl.float32)
            return handle(_to_fp8(wide.data, target_type), target_type)
        if source_type == target_type or tl.bfloat16 not in (source_type, target_type):
            return original_cast(source, dst_type)
        if source_type == tl.bfloat16:
            wide = handle(_to_float32(source.data), tl.float32)
            return wide if target_type == tl.float32 else original_cast(wide, dst_type)
        wide = source if source_type == tl.float32 else original_cast(source, tl.float32)
        return handle(_to_bfloat16(wide.data), tl.bfloat16)

    def create_fp_to_fp(source: Any, dst_type: Any, rounding_mode: Any) -> Any:
        nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        kinds = (source.dtype.scalar, dst_type.scalar)
        if nearest and (tl.bfloat16 in kinds or not _FP8.keys().isdisjoint(kinds)):
            return cast_impl(source, dst_type)
        return original_fp_to_fp(source, dst_type, rounding_mode)

    def create_dot(a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a = handle(_to_float32(a.data), tl.float32)
            b = handle(_to_float32(b.data), tl.float32)
        elif a.dtype.scalar in _FP8:
            a = handle(_FP8[a.dtype.scalar][a.data], tl.float32)
            b = handle(_FP8[b.dtype.scalar][b.data], tl.float32)
        return original_dot(a, b, d, *rest)

    def get_bf16(value: float) -> Any:  # 3.6 has none
        return cast_impl(builder.get_fp32(value), tl.bfloat16)

    builder.cast_impl, builder.create_dot, builder.get_bf16 = cast_impl, create_dot, get_bf16
    builder.create_fp_to_fp = create_fp_to_fp


def hasten() -> None:
    """Install the patches for speed; idempotent."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if getattr(builder, "is_hastened", False):
        return
    builder.is_hastened = True
    interpreter._patch_lang = _patch_once(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._patch_attr = _patch_directly(interpreter._patch_attr, interpreter)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.TensorHandle.__init__ = _init_handle
    core._unwrap_if_constexpr = _unless_tensor(core._unwrap_if_constexpr)
    tl.tensor.__init__ = _init_tensor
    tl.block_type.__init__ = _by_shape(tl.block_type.__init__)
    tl.block_type.name = _name_of_block
    tl.tuple.__eq__ = _or_the_same(tl.tuple.__eq__)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)
    check = semantic.binary_op_type_checking_impl
    semantic.binary_op_type_checking_impl = _unless_of_one_type(check)
    semantic.computation_type_impl = cache(semantic.computation_type_impl)  # of two types
    # Checking integer arithmetic for overflow takes a third of the interpreter's time.
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once(original: Callable[[Any], Any], nothing: Callable[[], Any]) -> Callable[[Any], Any]:
    """Patch only at the outermost call, a launch; the patch lasts until that call restores it."""
    is_patched = False

    def patch(function: Any) -> Any:
        nonlocal is_patched
        if is_patched:
            return nothing()
        scope, is_patched = original(hasten), True  # all of the language, as this module sees it
        original_restore = scope.restore

        def restore() -> None:
            nonlocal is_patched
            original_restore()
            is_patched = False

        scope.restore = restore
        return scope

    return patch


def _patch_directly(original: Callable[..., None], interpreter: Any) -> Callable[..., None]:
    """Patch a built-in function with what it wraps; Triton calls it through two wrappers."""
    wrapper = core.builtin(lambda: None).__code__
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not wrapper:
            original(obj, name, member, builder, scope)
            return
        function = member.__wrapped__

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(obj, name, call)

    return patch


def _by_name(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Triton's look-up of NumPy types, cached; Triton builds its table at each call."""
    known: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = original(kind)
        return known[name]

    return numpy_type


def _init_handle(self: Any, data: np.ndarray, dtype: Any, attr: Any = None) -> None:
    """``TensorHandle.__init__`` that does not compare the sizes of types."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _unless_tensor(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Unwrapping of constants; the most frequent arguments are none."""
    plain = (tl.tensor, int, tl.dtype, type(None))
    return lambda value: value if type(value) in plain else original(value)


_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """``tl.tensor.__init__`` with one shape object for all tensors of a shape."""
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _shapes:
        size = tl.constexpr(int(np.prod(shape)))
        _shapes[shape] = tl.tuple([tl.constexpr(length) for length in shape]), size
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[shape]


def _by_shape(original: Callable[..., None]) -> Callable[..., None]:
    """``tl.block_type.__init__`` that checks each shape once."""
    known: dict[tuple[int, ...], tuple[Any, int]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = known[key]

    return init


_name_of_block = property(  # is rarely read
    lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None
)


def _or_the_same(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Comparison of shapes; most equal shapes are the same object."""
    true = tl.constexpr(True)

    def equal(self: Any, other: Any) -> Any:
        return true if self is other else original(self, other)

    return equal


def _unless_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcasting of two tensors; returns tensors of equal shape unchanged."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else original(self, lhs, rhs)

    return broadcast


def _unless_of_one_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Conversion of the operands of a binary operator to one type.

    Most are tensors of one type, or one is an integer whose tensor is already known.
    """
    alike = {"int1", "int8", "int16", "int32", "int64", "uint32", "uint64", "fp32"}
    known: dict[tuple[int, str], tl.tensor] = {}

    def convert(self: Any, lhs: Any, rhs: Any, *allowed: bool, **named: bool) -> tuple[Any, Any]:
        if not isinstance(lhs, tl.tensor) or lhs.dtype.name not in alike:
            return original(self, lhs, rhs, *allowed, **named)
        kind = lhs.dtype
        other = known.get((rhs, kind.name), rhs) if type(rhs) is int else rhs
        if isinstance(other, tl.tensor) and other.dtype is kind:
            return self.broadcast_impl_value(lhs, other)
        converted = original(self, lhs, rhs, *allowed, **named)
        if type(rhs) is int and kind.is_int() and converted[0].dtype is kind:
            known[rhs, kind.name] = self.scalar_constant(rhs, kind)
        return converted

    return convert


def _every(kind: torch.dtype) -> np.ndarray:
    """float32 [256]: the value of each bit pattern."""
    values: np.ndarray = (
        torch.arange(256, dtype=torch.uint8, device="cpu").view(kind).float().numpy()
    )
    return values


_FP8_OF_TORCH = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}
_FP8 = {kind: _every(of_torch) for kind, of_torch in _FP8_OF_TORCH.items()}


def _to_fp8(values: np.ndarray, kind: Any) -> np.ndarray:
    """As torch does, but that of all too large becomes the largest of e4m3fn, as on Hopper."""
    of_torch, wide = _FP8_OF_TORCH[kind], torch.from_numpy(np.array(values, np.float32))
    if kind == tl.float8e4nv:
        wide = wide.clamp(-448.0, 448.0)
    bits: np.ndarray = wide.to(of_torch).view(torch.uint8).numpy()
    return bits


def _to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    half_minus_tie = np.uint32(0x7FFF) + ((bits >> 16) & 1)  # round to nearest, ties to even
    rounded = ((bits + half_minus_tie) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)
