"""Bias and residual, which are added once to the sum of the ranks' partial sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Epilogue(NamedTuple):
    """The constants of what follows the sum: a kernel's ``EPILOGUE: tl.constexpr``.

    Args:
        BLOCK_ROW: lanes for a row that is normalised, at least n; 0 when none is.
    """

    HAS_BIAS: bool
    HAS_RESIDUAL: bool
    BLOCK_ROW: int = 0


class Addends(NamedTuple):
    """The tensors that are added to a sum [m, n]: a bias [n] and a residual [m, n]."""

    bias_ptr: Any
    residual_ptr: Any


class EpilogueTensors(NamedTuple):
    """:class:`Addends`, the weight [n] of RMSNorm, and its epsilon, float32 [1]."""

    bias_ptr: Any
    residual_ptr: Any
    norm_weight_ptr: Any
    eps_ptr: Any


@triton.jit
def add_bias_residual(total, columns, column_mask, at, mask, epilogue, EPILOGUE: tl.constexpr):
    """`total`, float32, plus the bias and the residual, of those that are given.

    Args:
        columns, column_mask: of the elements of `total`, or what broadcasts to them.
        at, mask: their offsets in the residual.
    """
    if EPILOGUE.HAS_BIAS:
        total += tl.load(epilogue.bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    if EPILOGUE.HAS_RESIDUAL:
        total += tl.load(epilogue.residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total
