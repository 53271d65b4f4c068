"""A sum and its quantised norm in one tensor, because an operation has one output."""

from __future__ import annotations

from typing import NamedTuple

import torch

from taxfree_kernels.variant import groups_of

_ALIGNED = 8  # elements of 16 bits, so that each part begins at a multiple of 16 bytes


class Parts(NamedTuple):
    """Views of an output.

    Args:
        values: the normalised sum in fp8, [m, n].
        scale: its scales, float32; see :mod:`taxfree_kernels.fp8`.
        total: the sum, [m, n].
    """

    values: torch.Tensor
    scale: torch.Tensor
    total: torch.Tensor


def columns_of(n: int, out_scales: str) -> int:
    """Columns of an output [m, columns] that has room for the parts of m rows."""
    return n + -(-n // 2) + 2 * groups_of(n, out_scales) + 2 * _ALIGNED


def parts_of(
    out: torch.Tensor,
    n: int,
    out_scales: str,
    kind: torch.dtype,
    scale: torch.Tensor | None = None,
) -> Parts:
    """The parts of an output.

    Args:
        out: [m, :func:`columns_of`], contiguous, of 16 bits: the sum, the values, the scales.
        kind: the e4m3 of the values.
        scale: float32 [1], if it is given and not found.
    """
    m, flat = len(out), out.view(-1)
    values = _padded(m * n)
    if scale is None:
        begin, groups = values + _padded(-(-m * n // 2)), groups_of(n, out_scales)
        scale = flat[begin : begin + 2 * m * groups].view(torch.float32).view(m, groups)
    in_bytes = flat[values:].view(kind)
    return Parts(in_bytes[: m * n].view(m, n), scale, flat[: m * n].view(m, n))


def packed(
    values: torch.Tensor, scale: torch.Tensor, total: torch.Tensor, out_scales: str
) -> torch.Tensor:
    """The output that has these parts; see :class:`Parts`."""
    m, n = total.shape
    out = total.new_empty(m, columns_of(n, out_scales))
    given = (scale,) if out_scales == "tensor" else ()
    parts = parts_of(out, n, out_scales, values.dtype, *given)
    for part, own in zip(parts, (values, scale, total), strict=True):
        part.copy_(own)
    return out


def _padded(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED
