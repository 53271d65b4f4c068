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
from taxfree_kernels.fp8 import fp8_dtype, quantised, scale_of
from taxfree_kernels.interpreter import is_interpreting
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import BLOCK, SCALES

_MOST_OF_A_ROW = 1 << 16  # elements that one program holds
_ELEMENTS = 1 << 12  # of a program, of several groups


@triton.jit
def _quantise(
    x_ptr, scale_ptr, values_ptr, k, stride_row, groups,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, IS_STATIC: tl.constexpr,
):  # fmt: skip
    """Quantise GROUPS groups of a row, of WIDTH elements or fewer; k is what a row has."""
    parts = tl.cdiv(groups, GROUPS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    group = tl.program_id(0) % parts * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = column < k
    x = tl.load(x_ptr + row * stride_row + column, mask=mask, other=0.0).to(tl.float32)
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
    if scales not in SCALES or (scale is not None and scales != "tensor"):
        raise PlanError(f"scales is {scales!r}", f"one of {', '.join(SCALES)}; static: tensor")
    if x.dim() != 2 or x.stride(1) != 1:
        raise PlanError("x is no matrix of contiguous rows")
    (m, k), dtype = x.shape, fp8_dtype(x.device)
    has_kernel = x.is_cuda or is_interpreting()
    if torch.compiler.is_compiling() or not has_kernel or not m or k > _MOST_OF_A_ROW:
        return quantised(x, scales, scale, dtype)
    if scales == "tensor" and scale is None:
        magnitudes = torch.where(x.isnan(), 0.0, x.abs())
        scale = scale_of(magnitudes.amax().float().view(1), torch.finfo(dtype).max)
    width = power_of_2(k, 1) if scales == "channel" else BLOCK
    groups, at_once = -(-k // width), max(1, _ELEMENTS // width)
    values = torch.empty(m, k, dtype=dtype, device=x.device)
    found = torch.empty(m, groups, device=x.device) if scale is None else scale
    backend = "interpreter" if not x.is_cuda else "hip" if torch.version.hip else "cuda"
    kernel = _kernel(backend, width, at_once, scale is not None)
    kernel.resized(m * -(-groups // at_once), (k, x.stride(0), groups))(x, found, values)
    return values, found


@cache
def _kernel(backend: str, width: int, groups: int, is_static: bool) -> Kernel:
    warps = min(16, max(1, width * groups // 1024))
    return Kernel(
        _quantise,
        grid=0,
        constants={"WIDTH": width, "GROUPS": groups, "IS_STATIC": is_static},
        options=compile_options(backend, {"num_warps": warps}),
    )
