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
    require_normal,
    require_row,
    weight_layout,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.gradients import Gradients
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.signature import Signature


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
    m, k, n = matmul_sizes(x, weight)
    require_row("norm_weight", norm_weight, n)
    require_row("bias", bias, n)
    require(residual is None or residual.shape == (m, n), f"residual is not [{m}, {n}]")
    return MatmulAllReduce(
        m=m, n=n, k=k, dtype=dtype, world_size=fabric.world_size,
        weight_layout=weight_layout(weight), bias=bias is not None, residual=residual is not None,
        rms_norm=norm_weight is not None,
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
) -> torch.Tensor:
    c10d = torch.ops._c10d_functional
    total: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(x @ weight, "sum", group_name))
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

#: A parallelised layer's: what its model adds to the sum, or multiplies it with, is the same on all
#: ranks, so that compiled code may let the operation do it.
LAYER_MATMUL_ALL_REDUCE = dataclasses.replace(MATMUL_ALL_REDUCE, name="layer_matmul_all_reduce")

SIGNATURES = (MATMUL_ALL_REDUCE, MATMUL_ALL_REDUCE_RMS_NORM, LAYER_MATMUL_ALL_REDUCE)
