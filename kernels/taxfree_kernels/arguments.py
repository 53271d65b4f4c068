"""Parts of signatures: what keys hold of a tensor, and checks of a call's arguments.

All checks raise :class:`PlanError`, when the arguments do not fit together.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import dtype_of
from taxfree_kernels.variant import BLOCK, SCALES

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_FLOAT32 = torch.finfo(torch.float32)


# -- parts of keys and inputs --


def fixed(tensor: torch.Tensor | None) -> Any:
    """The properties of a tensor that is the same in calls of all sizes."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def by_sequence(tensor: torch.Tensor | None) -> Any:
    """As `fixed`, for a tensor of which each sequence has a part."""
    if tensor is None:
        return None
    return tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.device


def by_row(tensor: torch.Tensor | None) -> Any:
    """As `fixed`, for a tensor with any strides and any rows: `aligned` copies it if need be."""
    return None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.device)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and aligned to 16 bytes; a copy if it is not."""
    if tensor.is_contiguous():
        return tensor.clone() if tensor.data_ptr() % 16 else tensor
    return tensor.contiguous()


def matrix_rows(matrix: torch.Tensor) -> int:
    """Rows of a matrix; negative if it is none."""
    return matrix.shape[0] if matrix.dim() == 2 else -1


# -- checks --


def require(holds: bool, message: str) -> None:
    """Refuse arguments for which something does not hold."""
    if not holds:
        raise PlanError(message)


def require_row(name: str, row: torch.Tensor | None, n: int) -> None:
    """Check that a row is a contiguous [n], or None."""
    require(
        row is None or (row.shape == (n,) and row.is_contiguous()),
        f"{name} is not a contiguous [{n}]",
    )


def require_integers(
    fabric: Fabric, name: str, tensor: torch.Tensor, shape: tuple[int, ...]
) -> None:
    """Check that a tensor is int32, of this shape, on the fabric's device and contiguous."""
    wanted = f"int32 {list(shape)} on {fabric.device}, contiguous"
    holds = (
        tensor.shape == shape
        and tensor.dtype == torch.int32
        and tensor.device == fabric.device
        and tensor.is_contiguous()
    )
    require(holds, f"{name} is {tensor.dtype} {list(tensor.shape)}, must be {wanted}")


def require_normal(name: str, number: float | None) -> None:
    """Check that a number is positive and neither too small nor too large for float32, or None."""
    require(number is None or is_normal(number), f"{name} is {number}, must be a positive float32")


def is_normal(number: float) -> bool:
    """Whether a number is positive and neither too small nor too large for float32."""
    return bool(_FLOAT32.tiny <= number <= _FLOAT32.max)


def matmul_sizes(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int]:
    """Check that x is [m, k] and weight [k, n], and return m, k and n."""
    require(x.dim() == 2 and weight.dim() == 2, "x and weight must be matrices")
    require(1 in weight.stride(), "neither stride of weight is 1")
    (m, k), (height, n) = x.shape, weight.shape
    require(k == height, f"x has {k} columns, weight {height} rows")
    return m, k, n


def require_scales(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> str:
    """Check fp8 factors and their scales, and return who has a scale.

    They are [m, k] and [k, n]; or [m, k of a shard], of which groups are counted in the shard.
    """
    kind = dtype_of(fabric.hardware.architecture)
    for name, factor in (("x", x), ("weight", weight)):
        require(factor.dtype == kind, f"{name} is {factor.dtype}, this device multiplies {kind}")
    for name, tensor in (
        ("x", x), ("weight", weight), ("x_scale", x_scale), ("weight_scale", weight_scale),
    ):  # fmt: skip
        _require_on(fabric, name, tensor)
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        require(scale.dtype == torch.float32, f"{name} is {scale.dtype}, must be float32")
    (m, columns), (k, n) = x.shape, weight.shape
    shapes = {
        "tensor": ((1,), (1,)),
        "channel": ((m, 1), (1, n)),
        "block": ((m, -(-columns // BLOCK)), (-(-k // BLOCK), -(-n // BLOCK))),
    }
    given = tuple(x_scale.shape), tuple(weight_scale.shape)
    scales = next((name for name, each in shapes.items() if each == given), None)
    if scales is None:
        raise PlanError(
            f"x_scale is {list(given[0])}, weight_scale {list(given[1])}",
            "one of: "
            + ", ".join(f"{list(one)} and {list(other)}" for one, other in shapes.values()),
        )
    require(weight_scale.t().is_contiguous(), "weight_scale's rows, of k, are not contiguous")
    return scales


def cache_dtype(
    fabric: Fabric,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[str, str]:
    """Check queries, keys and values [..., kv_heads, .], in fp8 with their scales.

    Returns:
        The name of the dtype of q, and who has a scale in keys and values.
    """
    require((k_scale is None) == (v_scale is None), "one of k_scale and v_scale is missing")
    if k_scale is None or v_scale is None:
        return common_dtype(fabric, q=q, k=k, v=v), "none"
    kind, heads = dtype_of(fabric.hardware.architecture), k.shape[-2]
    for name, cache in (("k", k), ("v", v)):
        require(cache.dtype == kind, f"{name} is {cache.dtype}, scales are of {kind} here")
        _require_on(fabric, name, cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        require(
            scale.dtype == torch.float32 and scale.shape in ((1,), (heads,)),
            f"{name} is {scale.dtype} {list(scale.shape)}, must be float32 [1] or [{heads}]",
        )
        require(scale.is_contiguous(), f"{name} is not contiguous")
        _require_on(fabric, name, scale)
    require(k_scale.shape == v_scale.shape, "k_scale and v_scale have different shapes")
    return common_dtype(fabric, q=q), "tensor" if k_scale.shape == (1,) else "head"


def require_given_scale(fabric: Fabric, scales: str, scale: torch.Tensor | None) -> None:
    """Check who has a scale in a result in fp8; that of a tensor is given, float32 [1]."""
    require(scales in SCALES, f"out_scales is {scales!r}, not one of {', '.join(SCALES)}")
    is_given = scale is not None and scale.shape == (1,) and scale.dtype == torch.float32
    if scales == "tensor":
        require(is_given, "out_scale is no float32 [1], as out_scales 'tensor' has")
    else:
        require(scale is None, f"out_scale is given, but out_scales {scales!r} are found")
    if scale is not None:
        _require_on(fabric, "out_scale", scale)


def require_addends(fabric: Fabric, dtype: torch.dtype, **tensors: torch.Tensor | None) -> str:
    """Check that tensors are of a 16-bit dtype and on the device, and return its name."""
    require(dtype in _DTYPES, f"dtype is {dtype}, not float16 or bfloat16")
    for name, tensor in tensors.items():
        if tensor is not None:
            require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, dtype {dtype}")
            _require_on(fabric, name, tensor)
    return _DTYPES[dtype]


def dtype_fields(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    fast_accumulation: bool = False,
    x_name: str = "x",
    **addends: torch.Tensor | None,
) -> dict[str, Any]:
    """Check the factors of a matmul, their scales if they have any, and what is added.

    Returns:
        The problem's fields of dtypes and scales.
    """
    if x_scale is None or weight_scale is None or dtype is None:
        return {"dtype": common_dtype(fabric, **{x_name: x}, weight=weight, **addends)}
    scales = require_scales(fabric, x, weight, x_scale, weight_scale)
    return {
        "dtype": require_addends(fabric, dtype, **addends), "x_dtype": "fp8", "scales": scales,
        "fast_accumulation": fast_accumulation,
    }  # fmt: skip


def weight_layout(weight: torch.Tensor) -> str:
    """Which dimension of a [K, N] weight is contiguous, as problems name it."""
    return "nk" if weight.stride(0) == 1 else "kn"


def common_dtype(fabric: Fabric, **tensors: torch.Tensor | None) -> str:
    """The name of the dtype these tensors must share; all must be on the fabric's device."""
    named = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = named[0]
    require(first.dtype in _DTYPES, f"{first_name} is {first.dtype}, not float16 or bfloat16")
    for name, tensor in named:
        require(tensor.dtype == first.dtype, f"{name} is {tensor.dtype}, {first_name} not")
        _require_on(fabric, name, tensor)
    return _DTYPES[first.dtype]


def _require_on(fabric: Fabric, name: str, tensor: torch.Tensor) -> None:
    require(
        tensor.device == fabric.device,
        f"{name} is on {tensor.device}, the fabric on {fabric.device}",
    )
