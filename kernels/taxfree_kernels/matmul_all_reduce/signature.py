"""How users call matmul_all_reduce."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from taxfree_kernels.arguments import (
    aligned,
    by_row,
    common_dtype,
    fixed,
    matmul_sizes,
    matrix_rows,
    require,
    require_addends,
    require_given_scale,
    require_normal,
    require_row,
    require_scales,
    weight_layout,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import product
from taxfree_kernels.gradients import Gradients
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.quantise import quantise
from taxfree_kernels.reduction.fused import columns_of, packed
from taxfree_kernels.signature import Signature
from taxfree_kernels.variant import Problem


def _problem(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> MatmulAllReduce:
    """See :meth:`taxfree.Runtime.matmul_all_reduce`, and with a norm that of its RMSNorm."""
    require_normal("eps", eps)
    dtype = common_dtype(
        fabric, x=x, weight=weight, norm_weight=norm_weight, bias=bias, residual=residual
    )
    fields = _fields(fabric, matmul_sizes(x, weight), weight, bias, residual, norm_weight)
    return MatmulAllReduce(dtype=dtype, **fields)


def _fields(
    fabric: Fabric,
    sizes: tuple[int, int, int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> dict[str, Any]:
    """What a problem has in any dtype."""
    m, k, n = sizes
    require_row("norm_weight", norm_weight, n)
    require_row("bias", bias, n)
    require(residual is None or residual.shape == (m, n), f"residual is not [{m}, {n}]")
    return {
        "m": m, "n": n, "k": k, "world_size": fabric.world_size,
        "weight_layout": weight_layout(weight), "bias": bias is not None,
        "residual": residual is not None, "rms_norm": norm_weight is not None,
    }  # fmt: skip


def _scaled_problem(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> MatmulAllReduce:
    """See :meth:`taxfree.Runtime.scaled_matmul_all_reduce`, and that with a norm."""
    require_normal("eps", eps)
    sizes = matmul_sizes(x, weight)
    scales = require_scales(fabric, x, weight, x_scale, weight_scale)
    name = require_addends(fabric, dtype, bias=bias, residual=residual, norm_weight=norm_weight)
    fields = _fields(fabric, sizes, weight, bias, residual, norm_weight)
    return MatmulAllReduce(
        dtype=name, x_dtype="fp8", scales=scales, fast_accumulation=fast_accumulation, **fields
    )


def _library(
    _: int,
    group_name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return _library_sum(x @ weight, group_name, bias, residual, norm_weight, eps)


def _scaled_library(
    _: int,
    group_name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    fast_accumulation: bool,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    sums = product(x, x_scale, weight, weight_scale).to(dtype)
    return _library_sum(sums, group_name, bias, residual, norm_weight, eps)


def _library_sum(
    partial: torch.Tensor,
    group_name: str,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float | None,
) -> torch.Tensor:
    c10d = torch.ops._c10d_functional
    total: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(partial, "sum", group_name))
    for added in (bias, residual):
        total = total if added is None else total + added
    if norm_weight is None:
        return total
    normed = torch.nn.functional.rms_norm(total, norm_weight.shape, norm_weight, eps)
    return torch.stack((normed, total))


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
    layout=lambda x, weight, bias, residual, norm_weight=None, eps=None: (
        "matmul_all_reduce", x.shape, x.dtype, x.device, weight.shape, weight.stride(),
        weight.dtype, weight.device, None if bias is None else fixed(bias),
        None if residual is None else (residual.shape, residual.dtype, residual.device),
        None if norm_weight is None else fixed(norm_weight), eps,
    ),
    key=lambda x, weight, bias, residual, norm_weight=None, eps=None: (
        by_row(x), fixed(weight), fixed(bias), by_row(residual), fixed(norm_weight), eps,
    ),
    sizes=lambda _, x, *others: (matrix_rows(x),),
    fits=lambda _, m, x, weight, bias, residual, *norm: residual is None or residual.shape[0] == m,
    problem=_problem,
    inputs=lambda on_device, x, weight, bias, residual, norm_weight=None, eps=None: (
        aligned(x), weight, bias, None if residual is None else aligned(residual), norm_weight,
        None if eps is None else on_device(eps),
    ),
    shape=lambda _, m, x, weight, *others: (m, weight.shape[-1]),
    reusable=3,
    library=_library,
    gradient=_gradient,
)  # fmt: skip

MATMUL_ALL_REDUCE_RMS_NORM = dataclasses.replace(
    MATMUL_ALL_REDUCE,
    name="matmul_all_reduce_rms_norm",
    schema=f"{MATMUL_ALL_REDUCE.schema}, Tensor norm_weight, float eps",
    shape=lambda _, m, x, weight, *others: (2, m, weight.shape[-1]),
    gradient=None,
)

SCALED_MATMUL_ALL_REDUCE = Signature(
    "scaled_matmul_all_reduce",
    "Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias, "
    "Tensor? residual, ScalarType dtype, bool fast_accumulation",
    layout=lambda x, weight, x_scale, weight_scale, bias, residual, *others: (
        "scaled_matmul_all_reduce", x.shape, x.dtype, x.device, fixed(weight),
        x_scale.shape, x_scale.dtype, x_scale.device, fixed(weight_scale), fixed(bias),
        None if residual is None else (residual.shape, residual.dtype, residual.device),
        *others[:2], *([fixed(others[2]), others[3]] if len(others) > 2 else []),
    ),
    key=lambda x, weight, x_scale, weight_scale, bias, residual, dtype, is_fast,
    norm_weight=None, eps=None: (
        by_row(x), fixed(weight), by_row(x_scale), fixed(weight_scale), fixed(bias),
        by_row(residual), dtype, is_fast, fixed(norm_weight), eps,
    ),
    sizes=lambda _, x, *others: (matrix_rows(x),),
    fits=lambda _, m, x, weight, x_scale, weight_scale, bias, residual, *norm: (
        (residual is None or residual.shape[0] == m) and (x_scale.dim() < 2 or len(x_scale) == m)
    ),
    problem=_scaled_problem,
    inputs=lambda on_device, x, weight, x_scale, weight_scale, bias, residual, dtype,
    is_fast, norm_weight=None, eps=None: (
        aligned(x), weight, bias, None if residual is None else aligned(residual), norm_weight,
        None if eps is None else on_device(eps), aligned(x_scale), weight_scale,
    ),
    shape=lambda _, m, x, weight, *others: (m, weight.shape[-1]),
    dtype=lambda x, weight, x_scale, weight_scale, bias, residual, dtype, *norm: dtype,
    reusable=3,
    library=_scaled_library,
)  # fmt: skip

SCALED_MATMUL_ALL_REDUCE_RMS_NORM = dataclasses.replace(
    SCALED_MATMUL_ALL_REDUCE,
    name="scaled_matmul_all_reduce_rms_norm",
    schema=f"{SCALED_MATMUL_ALL_REDUCE.schema}, Tensor norm_weight, float eps",
    shape=lambda _, m, x, weight, *others: (2, m, weight.shape[-1]),
)


def _with_quantised(signature: Signature) -> Signature:
    """That of a normalised sum in fp8: who has a scale, and the scale if it is given, come last."""

    def problem(fabric: Fabric, *arguments: Any) -> Problem:
        *others, out_scales, out_scale = arguments
        require_given_scale(fabric, out_scales, out_scale)
        return dataclasses.replace(signature.problem(fabric, *others), out_scales=out_scales)

    def inputs(on_device: Any, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        *others, _, out_scale = arguments
        found = signature.inputs(on_device, *others)
        given = () if out_scale is None else (out_scale,)
        return (*found[:6], *given, *found[6:])

    def library(world_size: int, group_name: str, *arguments: Any) -> torch.Tensor:
        *others, out_scales, out_scale = arguments
        assert signature.library is not None
        normed, total = signature.library(world_size, group_name, *others)
        return packed(*quantise(normed, out_scales, out_scale), total, out_scales)

    return dataclasses.replace(
        signature,
        name=f"{signature.name}_quantise",
        schema=f"{signature.schema}, str out_scales, Tensor? out_scale",
        layout=lambda *arguments: (
            "quantise", *signature.layout(*arguments[:-2]), arguments[-2], fixed(arguments[-1])
        ),
        key=lambda *arguments: (
            *signature.key(*arguments[:-2]), arguments[-2], fixed(arguments[-1])
        ),
        fits=lambda fabric, m, *arguments: signature.fits(fabric, m, *arguments[:-2]),
        problem=problem,
        inputs=inputs,
        shape=lambda _, m, x, weight, *others: (m, columns_of(weight.shape[-1], others[-2])),
        library=library,
    )  # fmt: skip


MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE = _with_quantised(MATMUL_ALL_REDUCE_RMS_NORM)
SCALED_MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE = _with_quantised(SCALED_MATMUL_ALL_REDUCE_RMS_NORM)


def _over_fp8_wire(signature: Signature) -> Signature:
    """The same, of partial sums that may travel in fp8."""
    return dataclasses.replace(
        signature,
        name=f"{signature.name}_over_fp8_wire",
        layout=lambda *arguments: ("over fp8 wire", *signature.layout(*arguments)),
        problem=lambda *arguments: dataclasses.replace(
            signature.problem(*arguments), fp8_wire=True
        ),
        gradient=None,
    )


_OVER_FP8_WIRE = {
    signature.name: _over_fp8_wire(signature)
    for signature in (
        MATMUL_ALL_REDUCE,
        MATMUL_ALL_REDUCE_RMS_NORM,
        SCALED_MATMUL_ALL_REDUCE,
        SCALED_MATMUL_ALL_REDUCE_RMS_NORM,
    )
}


def on_wire(signature: Signature, fp8_wire: bool) -> Signature:
    """That of a sum whose partial sums may travel in fp8, or must not."""
    return _OVER_FP8_WIRE[signature.name] if fp8_wire else signature


#: A parallelised layer's: what its model adds to the sum, or multiplies it with, is the same on all
#: ranks, so that compiled code may let the operation do it.
LAYER_MATMUL_ALL_REDUCE = dataclasses.replace(MATMUL_ALL_REDUCE, name="layer_matmul_all_reduce")

SIGNATURES = (
    MATMUL_ALL_REDUCE,
    MATMUL_ALL_REDUCE_RMS_NORM,
    SCALED_MATMUL_ALL_REDUCE,
    SCALED_MATMUL_ALL_REDUCE_RMS_NORM,
    MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE,
    SCALED_MATMUL_ALL_REDUCE_RMS_NORM_QUANTISE,
    *_OVER_FP8_WIRE.values(),
    LAYER_MATMUL_ALL_REDUCE,
)
