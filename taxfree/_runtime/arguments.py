"""Errors of a call's arguments, as its caller gets them; checks of the caller's output tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from taxfree.errors import UsageError
from taxfree_kernels.errors import PlanError

_HINT = "the docstring of the runtime's method says what tensors must be"


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """What a signature refuses is the caller's error."""
    try:
        yield
    except PlanError as error:
        raise UsageError(error.message, error.hint or _HINT) from error


def require_output(
    out: torch.Tensor,
    shape: tuple[int, ...],
    like: torch.Tensor,
    dtype: torch.dtype,
    inputs: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None,
) -> None:
    """Check the caller's output tensor: kernels rely on its shape, and on memory of its own.

    Args:
        like: a tensor on the device that it must be on.
        dtype: that it must have.
        residual: the input that may be the output, or the last part of it.
    """
    require_like(out, shape, like, dtype)
    begin, end = _extent(out)
    for tensor in inputs:
        if tensor is None or tensor.device != out.device:
            continue
        first, last = _extent(tensor)
        if first >= end or begin >= last:
            continue
        is_residual = tensor is residual and tensor.is_contiguous() and last == end
        _require(
            is_residual and last - first == out.nbytes // (out.dim() - 1),
            "out overlaps an input in memory; only a contiguous residual may be the output",
        )


def require_like(
    out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype
) -> None:
    """Check the caller's output tensor, but for overlaps; arguments as of `require_output`."""
    _require(out.shape == shape and out.is_contiguous(), f"out is not a contiguous {list(shape)}")
    _require(out.dtype == dtype, f"out is {out.dtype}, the result {dtype}")
    _require(out.device == like.device, f"out is on {out.device}, the inputs on {like.device}")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor, and that after its last element."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.itemsize


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message, _HINT)
