"""Tensor descriptors for matrices that Hopper's Tensor Memory Accelerator (TMA) loads in boxes.

Rows have to start at multiples of 16 bytes. The part of a box outside its tensor reads as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class Boxes:
    """Descriptors of an operand that is a different matrix of the same shape in each call.

    Triton's constructor validates every dimension, which takes the host several microseconds. Here
    that is done only once, for as long as the strides do not change.
    """

    def __init__(self, describe: Callable[[torch.Tensor], TensorDescriptor]) -> None:
        self._describe = describe
        self._strides: tuple[int, ...] | None = None
        self._fields: dict[str, Any] = {}

    def __call__(self, matrix: torch.Tensor) -> TensorDescriptor:
        if matrix.stride() != self._strides or matrix.data_ptr() % 16:
            descriptor = self._describe(matrix)
            if descriptor.base.data_ptr() == matrix.data_ptr():  # it is no copy
                self._strides = matrix.stride()
                self._fields = vars(descriptor) | {"base": None}
            return descriptor
        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        descriptor.__dict__ = self._fields | {"base": matrix}  # of which the address matters
        return descriptor


def rows_in_boxes(box: list[int]) -> Boxes:
    """a [rows, k] as [slots, sources, rows, k] with one slot and one source."""

    def describe(a: torch.Tensor) -> TensorDescriptor:
        a = _aligned(a)
        return TensorDescriptor(a, [1, 1, *a.shape], [a.numel(), a.numel(), *a.stride()], box)

    return Boxes(describe)


def weight_in_boxes(sources: int, box: list[int], is_nk: bool) -> Boxes:
    """weight [k, n] as [sources, n, columns] when `is_nk`, else as [sources, columns, n].

    Args:
        sources: ranks that have columns of A, hence rows of the weight.
    """

    def describe(weight: torch.Tensor) -> TensorDescriptor:
        rows = _aligned(weight.t() if is_nk else weight)
        pitch, columns, n = rows.stride(0), weight.shape[0] // sources, weight.shape[1]
        if is_nk:
            return TensorDescriptor(rows, [sources, n, columns], [columns, pitch, 1], box)
        return TensorDescriptor(rows, [sources, columns, n], [columns * pitch, pitch, 1], box)

    return Boxes(describe)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows start at multiples of 16 bytes: itself, or for odd views a copy."""
    if (matrix.data_ptr() | matrix.stride(0) * matrix.itemsize) % 16:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix
