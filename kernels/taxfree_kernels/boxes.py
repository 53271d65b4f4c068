"""Tensor descriptors: matrices as the boxes that Hopper's tensor memory accelerator (TMA) loads.

Rows have to start at multiples of 16 bytes. What of a box lies beyond its tensor reads as 0.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows start at multiples of 16 bytes: itself, or for odd views a copy."""
    if (matrix.data_ptr() | matrix.stride(0) * matrix.itemsize) % 16:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix


def rows_in_boxes(a: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """a [rows, k], aligned, as [slots, sources, rows, k] with one slot and one source."""
    return TensorDescriptor(a, [1, 1, *a.shape], [a.numel(), a.numel(), *a.stride()], box)


def weight_in_boxes(
    weight: torch.Tensor, columns: int, box: list[int], is_nk: bool
) -> TensorDescriptor:
    """weight [k, n] as [sources, n, columns] when `is_nk`, else as [sources, columns, n].

    Args:
        columns: of A, hence rows of the weight, that each source has.
    """
    rows = aligned(weight.t() if is_nk else weight)
    pitch, (sources, n) = rows.stride(0), (weight.shape[0] // columns, weight.shape[1])
    if is_nk:
        return TensorDescriptor(rows, [sources, n, columns], [columns, pitch, 1], box)
    return TensorDescriptor(rows, [sources, columns, n], [columns * pitch, pitch, 1], box)
