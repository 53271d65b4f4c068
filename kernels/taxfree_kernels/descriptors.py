"""Tensor descriptors for matrices that Hopper's Tensor Memory Accelerator (TMA) loads.

Rows have to start at multiples of 16 bytes. Elements beyond the ends of a tensor read as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class OperandDescriptors:
    """Descriptors of an operand that is a different matrix in each call.

    Triton's constructor validates every dimension, which takes several microseconds on the host.
    Here it runs again only when the strides change.
    """

    def __init__(self, describe: Callable[[torch.Tensor], TensorDescriptor]) -> None:
        self._describe = describe
        self._strides: tuple[int, ...] | None = None
        self._last: TensorDescriptor | None = None

    def __call__(self, matrix: torch.Tensor) -> TensorDescriptor:
        if self._last is None or matrix.stride() != self._strides or matrix.data_ptr() % 16:
            descriptor = self._describe(matrix)
            if descriptor.base.data_ptr() == matrix.data_ptr():  # it is no copy
                self._strides = matrix.stride()
                self._last = with_fields(descriptor, base=None)  # the matrix is not held
            return descriptor
        return with_fields(self._last, base=matrix)  # of which the address matters


def with_fields(descriptor: TensorDescriptor, **fields: Any) -> TensorDescriptor:
    """A copy of a valid descriptor with other valid fields; skips the validation."""
    other: TensorDescriptor = object.__new__(type(descriptor))
    other.__dict__ = vars(descriptor) | fields
    return other


class RowDescriptors(OperandDescriptors):
    """Descriptors of a [rows, k] as [slots, sources, rows, k] with one slot and one source.

    Args:
        kind: a class of descriptors, Triton's or Gluon's, with what else its constructor takes.
        fold: see :func:`folded`; 0 for matrices as they are.
    """

    def __init__(
        self, box: list[int], kind: Any = TensorDescriptor, *others: Any, fold: int = 0
    ) -> None:
        self._fold = fold

        def describe(a: torch.Tensor) -> Any:
            a = _aligned(a)
            return kind(a, *self._one_source(a), box, *others)

        super().__init__(describe)

    def __call__(self, matrix: torch.Tensor) -> TensorDescriptor:
        descriptor = super().__call__(matrix)
        if descriptor.shape[-2] != matrix.shape[0]:
            descriptor.shape, descriptor.strides = self._one_source(matrix)
        return descriptor

    def _one_source(self, a: torch.Tensor) -> tuple[list[int], list[int]]:
        shape, strides = [1, 1, *a.shape], [a.numel(), a.numel(), *a.stride()]
        return folded(shape, strides, self._fold) if self._fold else (shape, strides)


def folded(shape: Sequence[int], strides: Sequence[int], fold: int) -> tuple[list[int], list[int]]:
    """Shape and strides of [..., rows, k] as [..., fold, rows, k // fold]: equal parts of rows."""
    width = shape[-1] // fold
    return [*shape[:-2], fold, shape[-2], width], [*strides[:-2], width, *strides[-2:]]


class HeadDescriptors(OperandDescriptors):
    """Descriptors of a [batch, length, heads, head_dim] as [batch, heads, length, head_dim].

    Args:
        kind: a class of descriptors, Triton's or Gluon's, with what else its constructor takes.
    """

    def __init__(self, box: list[int], kind: Any = TensorDescriptor, *others: Any) -> None:
        def describe(tokens: torch.Tensor) -> Any:
            strides = tokens.stride()[:3]
            if tokens.data_ptr() % 16 or any(stride * tokens.itemsize % 16 for stride in strides):
                tokens = tokens.clone(memory_format=torch.contiguous_format)
            heads = tokens.transpose(1, 2)
            return kind(heads, [*heads.shape], [*heads.stride()], box, *others)

        super().__init__(describe)

    def __call__(self, matrix: torch.Tensor) -> TensorDescriptor:
        descriptor = super().__call__(matrix)
        batch, length, heads, head_dim = matrix.shape
        descriptor.shape = [batch, heads, length, head_dim]
        return descriptor


def weight_descriptors(
    sources: int, box: list[int], is_nk: bool, kind: Any = TensorDescriptor, *others: Any
) -> OperandDescriptors:
    """weight [k, n] as [sources, n, columns] when `is_nk`, else as [sources, columns, n].

    Args:
        sources: ranks that have columns of A, hence rows of the weight.
    """

    def describe(weight: torch.Tensor) -> Any:
        rows = _aligned(weight.t() if is_nk else weight)
        pitch, columns, n = rows.stride(0), weight.shape[0] // sources, weight.shape[1]
        if is_nk:
            return kind(rows, [sources, n, columns], [columns, pitch, 1], box, *others)
        return kind(rows, [sources, columns, n], [columns * pitch, pitch, 1], box, *others)

    return OperandDescriptors(describe)


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes; descriptors are of copies of other matrices."""
    return (matrix.data_ptr() | matrix.stride(0) * matrix.itemsize) % 16 == 0


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows start at multiples of 16 bytes: itself, or for odd views a copy."""
    if not is_aligned(matrix):
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix
