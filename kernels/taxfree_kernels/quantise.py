"""Quantisation of activations to fp8 in one kernel: the scale of a row or group, and its elements.

Bit for bit what :func:`taxfree_kernels.fp8.quantised` computes; divisions are rounded correctly.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from taxfree_kernels.device.tiles import quantised_groups
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fp8 import fp8_dtype, quantised, scale_of, silu_and_mul
from taxfree_kernels.interpreter import is_interpreting
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import BLOCK, SCALES

_MOST_OF_A_ROW = 1 << 16  # elements that one program holds
_ELEMENTS = 1 << 12  # of a program, of several groups


@triton.jit
def _quantise(
    x_ptr, scale_ptr, values_ptr, k, stride_row, groups,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, IS_STATIC: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Quantise GROUPS groups of a row, of WIDTH elements or fewer; k is what a row of values has.

    Args:
        x_ptr: [m, k]; of what IS_GATED [m, 2 * k], gates before what they are multiplied with.
    """
    parts = tl.cdiv(groups, GROUPS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    group = tl.program_id(0) % parts * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = column < k
    x_ptrs = x_ptr + row * stride_row + column
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(x_ptrs + k, mask=mask, other=0.0).to(tl.float32)
        x = tl.div_rn(x, 1 + tl.exp(-x)) * up
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    given = None
    if IS_STATIC:
        given = tl.load(scale_ptr)
    values, scale = quantised_groups(x, given, values_ptr.dtype.element_ty)
    if not IS_STATIC:
        tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)
    tl.store(values_ptr + row * k + column, values, mask=mask)


def quantise(
    x: torch.Tensor, scales: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8, of the kind that its device multiplies, and its scales, for calls in fp8.

    A scale is the largest magnitude of its tensor, token or group divided by the largest of the
    format. Elements are clamped to the latter; NaN stays NaN. In compiled code it is written in
    torch, so that Inductor fuses it with what is around it.

    Args:
        x: [m, k], contiguous rows; float32, bfloat16 or float16.
        scales: "tensor", "channel" for each token, or "block" for each 128 elements of one.
        scale: float32 [1], a static scale, for "tensor" alone.

    Returns:
        [m, k] in e4m3; float32 [1], [m, 1] or [m, ceil(k / 128)].

    Raises:
        PlanError: there are no such scales, or x is no matrix of contiguous rows.
    """
    return _quantised(x, scales, scale, is_gated=False)


def silu_and_mul_quantise(
    x: torch.Tensor, scales: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of x = [gate, up], in fp8 as of :func:`quantise`: what a down projection has.

    One kernel; it computes in float32, and rounds to x's dtype before it quantises.

    Args:
        x: [m, 2 * k], contiguous rows; float32, bfloat16 or float16.
        scales, scale: as there. Where the scale of the tensor is not given, torch's kernels find
            it first.

    Returns:
        [m, k] in e4m3; float32 [1], [m, 1] or [m, ceil(k / 128)].

    Raises:
        PlanError: as there, or the columns of x are odd.
    """
    return _quantised(x, scales, scale, is_gated=True)


def _quantised(
    x: torch.Tensor, scales: str, scale: torch.Tensor | None, is_gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if scales not in SCALES or (scale is not None and scales != "tensor"):
        raise PlanError(f"scales is {scales!r}", f"one of {', '.join(SCALES)}; static: tensor")
    if x.dim() != 2 or x.stride(1) != 1:
        raise PlanError("x is no matrix of contiguous rows")
    if is_gated and x.shape[1] % 2:
        raise PlanError(f"x has {x.shape[1]} columns: no gate for each")
    m, k, dtype = x.shape[0], x.shape[1] >> is_gated, fp8_dtype(x.device)
    finds_one = scales == "tensor" and scale is None
    has_kernel = (
        not torch.compiler.is_compiling()  # first: no compiler traces what follows
        and (x.is_cuda or is_interpreting())
        and m > 0
        and k <= _MOST_OF_A_ROW
    )
    if not has_kernel or (is_gated and finds_one):
        return quantised(silu_and_mul(x) if is_gated else x, scales, scale, dtype)
    if finds_one:
        magnitudes = torch.where(x.isnan(), 0.0, x.abs())
        scale = scale_of(magnitudes.amax().float().view(1), torch.finfo(dtype).max)
    width = power_of_2(k, 1) if scales == "channel" else BLOCK
    groups, at_once = -(-k // width), max(1, _ELEMENTS // width)
    values = torch.empty(m, k, dtype=dtype, device=x.device)
    found = scale
    if found is None:
        found = torch.empty(m, groups, dtype=torch.float32, device=x.device)
    backend = "interpreter" if not x.is_cuda else "hip" if torch.version.hip else "cuda"
    kernel = _kernel(backend, width, at_once, scale is not None, is_gated)
    kernel.resized(m * -(-groups // at_once), (k, x.stride(0), groups))(x, found, values)
    return values, found


@cache
def _kernel(backend: str, width: int, groups: int, is_static: bool, is_gated: bool) -> Kernel:
    sizes = {"WIDTH": width, "GROUPS": groups}
    warps = min(16, max(1, width * groups // 1024))
    return Kernel(
        _quantise,
        grid=0,
        constants={**sizes, "IS_STATIC": is_static, "IS_GATED": is_gated},
        options=compile_options(backend, {"num_warps": warps}),
    )
