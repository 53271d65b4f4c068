"""Bias and residual, which are added once to the sum of the ranks' partial sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_bias_residual(
    total, columns, column_mask, at, mask, bias_ptr, residual_ptr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """`total`, float32, plus the bias and the residual, of those that are given.

    Args:
        columns, column_mask: of the elements of `total`, or what broadcasts to them.
        at, mask: their offsets in the residual.
    """
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total
