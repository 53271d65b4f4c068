"""How users call matmul_all_reduce."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from taxfree_kernels.arguments import (
    aligned,
    by_row,
    dtype_fields,
    matmul_sizes,
    matrix_rows,
    require,
    require_given_scale,
    require_normal,
    require_row,
    weight_layout,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import partial_product
from taxfree_kernels.gradients import Gradients
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.quantise import quantise
from taxfree_kernels.reduction.fused import columns_of, packed
from taxfree_kernels.signature import Signature


def _problem(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
    out_scales: str | None = None,
    out_scale: torch.Tensor | None = None,
    **scaled: Any,
) -> MatmulAllReduce:
    """See the methods of :class:`taxfree.Runtime`."""
    require_normal("eps", eps)
    if out_scales is not None:
        require_given_scale(fabric, out_scales, out_scale)
    m, k, n = matmul_sizes(x, weight)
    addends: dict[str, Any] = {"norm_weight": norm_weight, "bias": bias, "residual": residual}
    dtypes = dtype_fields(fabric, x, weight, **scaled, **addends)
    require_row("norm_weight", norm_weight, n)
    require_row("bias", bias, n)
    require(residual is None or residual.shape == (m, n), f"residual is not [{m}, {n}]")
    return MatmulAllReduce(
        m=m, n=n, k=k, world_size=fabric.world_size,
        weight_layout=weight_layout(weight), bias=bias is not None, residual=residual is not None,
        rms_norm=norm_weight is not None, out_scales=out_scales or "none", **dtypes,
    )  # fmt: skip


def _library(
    _: int,
    group_name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
    out_scales: str | None = None,
    out_scale: torch.Tensor | None = None,
    **scaled: Any,
) -> torch.Tensor:
    partial = partial_product(x, weight, **scaled)
    c10d = torch.ops._c10d_functional
    total: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(partial, "sum", group_name))
    for added in (bias, residual):
        total = total if added is None else total + added
    if norm_weight is None:
        return total
    normed = torch.nn.functional.rms_norm(total, norm_weight.shape, norm_weight, eps)
    if out_scales is None:
        return torch.stack((normed, total))
    return packed(*quantise(normed, out_scales, out_scale), total, out_scales)


def _fits(
    _: Fabric,
    m: int,
    residual: torch.Tensor | None,
    x_scale: torch.Tensor | None = None,
    **others: Any,
) -> bool:
    scaled = x_scale is None or x_scale.dim() < 2 or len(x_scale) == m
    return scaled and (residual is None or residual.shape[0] == m)


def _shape(
    _: int,
    m: int,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    out_scales: str | None = None,
    **others: Any,
) -> tuple[int, ...]:
    n = weight.shape[-1]
    if out_scales is not None:
        return m, columns_of(n, out_scales)
    return (m, n) if norm_weight is None else (2, m, n)


def _gradient(context: Any, grad: torch.Tensor) -> Gradients:
    """All ranks have the same gradient, since all compute the same from the same sum."""
    x, weight = context.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual, _ = context.needs_input_grad
    return (
        grad @ weight.t() if needs_x else None,
        x.t() @ grad if needs_weight else None,
        grad.sum(0) if needs_bias else None,
        grad if needs_residual else None,
    )


MATMUL_ALL_REDUCE = Signature(
    "matmul_all_reduce",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual",
    by_size={"x": by_row, "residual": by_row, "x_scale": by_row},
    sizes=lambda _, x, **others: (matrix_rows(x),),
    fits=_fits,
    problem=_problem,
    inputs=lambda on_device, x, weight, bias, residual, norm_weight=None, eps=None: (
        aligned(x), weight, bias, None if residual is None else aligned(residual), norm_weight,
        None if eps is None else on_device(eps),
    ),
    shape=_shape,
    reusable=3,
    library=_library,
    gradient=_gradient,
)  # fmt: skip

MATMUL_ALL_REDUCE_RMS_NORM = dataclasses.replace(
    MATMUL_ALL_REDUCE,
    name="matmul_all_reduce_rms_norm",
    schema=f"{MATMUL_ALL_REDUCE.schema}, Tensor norm_weight, float eps",
    gradient=None,
)

SCALED_MATMUL_ALL_REDUCE = dataclasses.replace(
    MATMUL_ALL_REDUCE,
    name="scaled_matmul_all_reduce",
    schema="Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, "
    "Tensor? residual, ScalarType dtype, bool fast_accumulation",
    inputs=lambda on_device, x, weight, x_scale, weight_scale, bias, residual, dtype,
    is_fast, norm_weight=None, eps=None: (
        aligned(x), weight, bias, None if residual is None else aligned(residual), norm_weight,
        None if eps is None else on_device(eps), aligned(x_scale), weight_scale,
    ),
    gradient=None,
)  # fmt: skip

SCALED_MATMUL_ALL_REDUCE_RMS_NORM = dataclasses.replace(
    SCALED_MATMUL_ALL_REDUCE,
    name="scaled_matmul_all_reduce_rms_norm",
    schema=f"{SCALED_MATMUL_ALL_REDUCE.schema}, Tensor norm_weight, float eps",
)


def _with_quantised(signature: Signature) -> Signature:
    """That of a normalised sum in fp8: who has a scale, and the scale if it is given, come last."""

    def inputs(on_device: Any, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        *others, _, out_scale = arguments
        found = signature.inputs(on_device, *others)
        given = () if out_scale is None else (out_scale,)
        return (*found[:6], *given, *found[6:])

    return dataclasses.replace(
        signature,
        name=f"{signature.name}_quantise",
        schema=f"{signature.schema}, str out_scales, Tensor? out_scale",
        inputs=inputs,
    )  # fmt: skip


MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE = _with_quantised(MATMUL_ALL_REDUCE_RMS_NORM)
SCALED_MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE = _with_quantised(SCALED_MATMUL_ALL_REDUCE_RMS_NORM)


#: A parallelised layer's: what its model adds to the sum, or multiplies it with, is the same on all
#: ranks, so that compiled code may let the operation do it.
LAYER_MATMUL_ALL_REDUCE = dataclasses.replace(MATMUL_ALL_REDUCE, name="layer_matmul_all_reduce")

_SUMS = (
    MATMUL_ALL_REDUCE,
    MATMUL_ALL_REDUCE_RMS_NORM,
    SCALED_MATMUL_ALL_REDUCE,
    SCALED_MATMUL_ALL_REDUCE_RMS_NORM,
    MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE,
    SCALED_MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE,
)
SIGNATURES = (
    *_SUMS,
    *(signature.over_fp8_wire for signature in _SUMS),
    LAYER_MATMUL_ALL_REDUCE,
)
