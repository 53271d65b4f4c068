"""The epilogue of a sum: adds bias and residual, and normalises rows (RMSNorm).

A normalised row stays in its program's registers, in float32, from the addition of the partial
sums to the result: nothing is read twice, and no program waits for another's part of the mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from taxfree_kernels.device.exchange import wait_for_channels
from taxfree_kernels.reduction.sums import with_sources


class Epilogue(NamedTuple):
    """The constants of a kernel's epilogue: ``EPILOGUE: tl.constexpr``.

    Args:
        BLOCK_ROW: lanes for a normalised row, at least n; 0 without RMSNorm.
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
    """`total`, float32, plus the bias and the residual, if given.

    Args:
        columns, column_mask: of the elements of `total`; they may broadcast.
        at, mask: their offsets in the residual.
    """
    if EPILOGUE.HAS_BIAS:
        total += tl.load(epilogue.bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    if EPILOGUE.HAS_RESIDUAL:
        total += tl.load(epilogue.residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_and_normalise(
    row, channel, channel_end, own_ptr, inbox_ptr, stride_source, stride_row, epilogue, out_ptr,
    count, n, peers, GROUP: tl.constexpr, EPILOGUE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Add one row of all ranks' partial sums, in rank order; store it and its RMSNorm.

    Args:
        channel, channel_end: channels that announce parts of the row; at most CHANNELS.
        own_ptr, inbox_ptr, stride_source: see :func:`with_sources`; rows are `stride_row` apart.
        out_ptr: see :func:`store_normalised`.
        n: elements of a row, at most BLOCK_ROW.
    """
    column = tl.arange(0, EPILOGUE.BLOCK_ROW)
    mask = column < n
    at = row.to(tl.int64) * n + column
    total = add_bias_residual(
        tl.zeros((EPILOGUE.BLOCK_ROW,), tl.float32), column, mask, at, mask, epilogue, EPILOGUE
    )
    norm_weight = tl.load(epilogue.norm_weight_ptr + column, mask=mask, other=0.0)
    arrived = wait_for_channels(peers, channel, channel_end, GROUP, CHANNELS)
    total = with_sources(
        total, row * stride_row + column, mask, own_ptr, inbox_ptr, stride_source, peers.rank, GROUP
    )
    total = tl.where(arrived, total, float("nan"))
    store_normalised(total, at, mask, norm_weight, epilogue.eps_ptr, out_ptr, count, n)


@triton.jit
def store_normalised(total, at, mask, norm_weight, eps_ptr, out_ptr, count, n):
    """Store a row and its RMSNorm.

    Args:
        total: float32, the row; 0 where it is masked. at, mask: its place in a sum [m, n].
        norm_weight: of the row's columns. eps_ptr: float32 [1].
        out_ptr: [2, m, n]: the normalised sum, then the sum, `count` elements.
    """
    total_square = tl.sum(total * total, 0)
    scale = tl.rsqrt(total_square / n + tl.load(eps_ptr))
    normalised = total * scale * norm_weight.to(tl.float32)
    tl.store(out_ptr + at, normalised.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + count + at, total.to(out_ptr.dtype.element_ty), mask=mask)
