"""The vendor's matmul of factors in 16 bits, or in fp8 with scales."""

from __future__ import annotations

from functools import cache

import torch

from taxfree_kernels.fp8 import fp8_dtype, product
from taxfree_kernels.launch import is_compiling
from taxfree_kernels.variant import BLOCK, MatmulProblem
from taxfree_kernels.vendor import matmul_into

_ROWS = (16, 7, 1)  # of matmuls that are tried


def multiply_into(
    out: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *scales: torch.Tensor,
    is_fast: bool = False,
) -> torch.Tensor:
    """out [m, n] = a [m, k] @ weight [k, n] (+ bias [n]); returns it.

    Args:
        scales: of a and of the weight, if these are fp8.
        is_fast: see `fast_accumulation` of :class:`MatmulProblem`.
    """
    if not scales:
        return matmul_into(out, a, weight, bias)
    return out if is_compiling() else _scaled_matmul_into(out, a, weight, bias, is_fast, *scales)


def _scaled_matmul_into(
    out: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_fast: bool,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    (k, n), scales = weight.shape, _scales_of(a_scale, weight_scale, weight)
    kind = (a.dtype, out.dtype, bias is not None, is_fast)
    if not multiplies_fp8(scales, k, n % BLOCK, *kind, a.device):
        sums = product(a, a_scale, weight, weight_scale)
        return out.copy_(sums if bias is None else sums + bias)
    return _scaled_mm(out, a, weight, bias, a_scale, weight_scale, scales, is_fast)


def _scales_of(a_scale: torch.Tensor, weight_scale: torch.Tensor, weight: torch.Tensor) -> str:
    if a_scale.dim() == 1:
        return "tensor"
    is_of_columns = weight_scale.shape == (1, weight.shape[1])
    return "channel" if is_of_columns and a_scale.shape[1] == 1 else "block"


def _scaled_mm(
    out: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    scales: str,
    is_fast: bool,
) -> torch.Tensor:
    if scales == "block":  # cuBLAS reads the scales of a column by column
        a_scale = a_scale.t().contiguous().t()
    if a_scale.data_ptr() % 16:  # and by 16 bytes
        a_scale = a_scale.clone()
    return torch._scaled_mm(
        a, weight, a_scale, weight_scale, bias=bias, out_dtype=out.dtype, use_fast_accum=is_fast,
        out=out,
    )  # fmt: skip


@cache
def multiplies_fp8(
    scales: str,
    k: int,
    columns: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    has_bias: bool,
    is_fast: bool,
    device: torch.device,
) -> bool:
    """Whether this torch has such an fp8 matmul, for any rows; the first time, it is tried.

    Args:
        columns: of the weight, modulo those of a block.
    """
    if device.type == "meta":
        return False
    n, groups = BLOCK + columns, -(-k // BLOCK)
    weight = torch.ones(n, k, device=device).to(dtype).t()
    bias = torch.zeros(n, dtype=out_dtype, device=device) if has_bias else None
    for m in _ROWS:
        a, out = torch.ones(m, k, device=device).to(dtype), torch.empty(m, n, device=device)
        of_a, of_weight = {
            "tensor": ((1,), (1,)),
            "channel": ((m, 1), (n, 1)),
            "block": ((m, groups), (-(-n // BLOCK), groups)),
        }[scales]
        factors = (
            torch.ones(of_a, dtype=torch.float32, device=device),
            torch.ones(of_weight, dtype=torch.float32, device=device).t(),
        )
        try:
            found = _scaled_mm(out.to(out_dtype), a, weight, bias, *factors, scales, is_fast)
        except (RuntimeError, ValueError):  # NotImplementedError is one, too
            return False
        if not bool(((found.float() - k).abs() <= k / 64).all()):
            return False
    return True


def try_fp8(problem: MatmulProblem, device: torch.device, has_bias: bool = False) -> None:
    """Find out, before a call may be captured, whether this torch multiplies such operands."""
    if problem.is_fp8:
        kind = fp8_dtype(device), getattr(torch, problem.dtype), has_bias, problem.fast_accumulation
        multiplies_fp8(problem.scales, problem.k, problem.n % BLOCK, *kind, device)
