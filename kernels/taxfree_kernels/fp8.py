"""Operands of matmuls in fp8 (e4m3) with float32 scales: their formats, in torch.

x is [m, k], a weight [k, n]. A scale belongs to a tensor, a token or output channel, or a block:

| scales | of x | of a weight |
| --- | --- | --- |
| "tensor" | [1] | [1] |
| "channel" | [m, 1] | [1, n] |
| "block" | [m, ceil(k / 128)] | [ceil(k / 128), ceil(n / 128)] |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import fp8_of
from taxfree_kernels.variant import BLOCK, LEAST_SCALE

DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_of_host = torch.float8_e4m3fn
_NEGATIVE_ZERO, _NAN, _OTHER_NAN = 0x80, 0x7F, 0xFF  # of e4m3fn; fnuz has NaN for the first alone


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The e4m3 that a device multiplies."""
    if device.type == "cuda" and torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return dtype_of(name.partition(":")[0])
    return _of_host


@contextmanager
def host_multiplies(dtype: torch.dtype) -> Iterator[None]:
    """Operands on the CPU are of this e4m3: those of kernels that are executed for another GPU."""
    global _of_host
    before, _of_host = _of_host, dtype
    try:
        yield
    finally:
        _of_host = before


def dtype_of(architecture: str) -> torch.dtype:
    """The e4m3 that an architecture multiplies."""
    return getattr(torch, fp8_of(architecture))


def quantised(
    x: torch.Tensor,
    scales: str,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8, and its scales; the reference of :func:`taxfree_kernels.quantise.quantise`.

    A scale is the largest magnitude that it belongs to, divided by the largest of the format, and
    at least ``LEAST_SCALE``. NaNs do not count. An element is divided by its scale, clamped to the
    largest magnitude of the format, and rounded to nearest even.

    Args:
        x: [m, k], of any floating type.
        scales: see the module.
        scale: float32 [1], a static scale for "tensor"; else scales are found in x.
        dtype: a member of ``DTYPES``.
    """
    m, k = x.shape
    height, width = {"tensor": (m, k), "channel": (1, k), "block": (1, BLOCK)}[scales]
    return _quantised(x, height, width, scale, dtype, scales == "tensor")


def quantised_cache(
    cache: torch.Tensor, scales: str, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [..., kv_heads, head_dim] in fp8; float32 [1], or [kv_heads] for "head"."""
    heads = cache.movedim(-2, 0).flatten(1)
    by_head = heads if scales == "head" else heads.flatten().unsqueeze(0)
    values, scale = quantised(by_head, "channel", dtype=dtype)
    lead = cache.movedim(-2, 0).shape
    return values.view(lead).movedim(0, -2).contiguous(), scale.view(-1)


def dequantised_cache(
    cache: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Each element of keys or values times the scale of its tensor or head."""
    return cache.to(dtype) * scale.to(dtype).view(-1, 1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate, up], [m, 2 * k]: [m, k], in float32, rounded once."""
    gate, up = x.float().chunk(2, 1)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def quantised_weight(
    weight: torch.Tensor, scales: str, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [k, n] in fp8 and its scales, both with k contiguous; as :func:`quantised`."""
    k, n = weight.shape
    height, width = {"tensor": (k, n), "channel": (k, 1), "block": (BLOCK, BLOCK)}[scales]
    values, scale = _quantised(
        weight.t().contiguous(), width, height, None, dtype, scales == "tensor"
    )
    return values.t(), scale.t() if scale.dim() == 2 else scale


def _quantised(
    matrix: torch.Tensor,
    height: int,
    width: int,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    is_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    matrix, most = matrix.float(), torch.finfo(dtype).max
    if scale is None:
        magnitudes = torch.where(matrix.isnan(), 0.0, matrix.abs())
        rows, columns = matrix.shape
        padding = (0, -columns % width, 0, -rows % height)
        padded = torch.nn.functional.pad(magnitudes, padding)
        blocks = padded.view(-(-rows // height), height, -(-columns // width), width)
        scale = scale_of(blocks.amax((1, 3)), most)
        scale = scale.view(1) if is_one else scale
    values = (matrix / _of_elements(scale, matrix)).clamp(-most, most).to(dtype)
    return values, scale


def scale_of(largest: torch.Tensor, most: float) -> torch.Tensor:
    """The scale of what has these largest magnitudes, float32, in a format up to `most`.

    Divided by a tensor: by a number CUDA multiplies with its reciprocal.
    """
    return (largest / torch.full_like(largest, most)).clamp(min=LEAST_SCALE)


def dequantised(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Each element of x or of a weight times its scale."""
    return values.to(dtype) * _of_elements(scale, values).to(dtype)


def product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """The float32 product of fp8 factors, by a matmul in float32: for any torch and device."""
    dtype = torch.float32
    return dequantised(x, x_scale, dtype) @ dequantised(weight, weight_scale, dtype)


def partial_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    **others: object,
) -> torch.Tensor:
    """x @ weight for PyTorch's collectives: of fp8 factors if they have scales, as `dtype`."""
    if x_scale is None or weight_scale is None:
        return x @ weight
    return product(x, x_scale, weight, weight_scale).to(dtype)


def _of_elements(scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The scale of each element, in a shape that broadcasts."""
    if scale.dim() < 2:
        return scale.view(1, 1)
    for dim, size in enumerate(values.shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scale


def converted(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of one e4m3 in the other, with scales to match: exactly the same factors.

    The same bits are half as large in fnuz.

    Raises:
        PlanError: an element has no equal: fnuz has one more magnitude than e4m3fn.
    """
    if values.dtype == dtype:
        return values, scale
    bits = values.view(torch.uint8)
    if dtype == torch.float8_e4m3fnuz:
        is_nan = (bits == _NAN) | (bits == _OTHER_NAN)
        bits = torch.where(bits == _NEGATIVE_ZERO, 0, bits)
        bits = torch.where(is_nan, _NEGATIVE_ZERO, bits)
        return bits.view(dtype), scale * 2
    if ((bits == _NAN) | (bits == _OTHER_NAN)).any():
        raise PlanError("elements of e4m3fnuz are as large as none of e4m3fn", "quantise again")
    return torch.where(bits == _NEGATIVE_ZERO, _NAN, bits).view(dtype), scale / 2
