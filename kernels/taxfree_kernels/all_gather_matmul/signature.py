"""How users call all_gather_matmul."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.arguments import (
    aligned,
    by_row,
    common_dtype,
    fixed,
    matrix_rows,
    require,
    require_addends,
    require_row,
    require_scales,
    weight_layout,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import product
from taxfree_kernels.gradients import Gradients, gather, gradients
from taxfree_kernels.signature import Signature
from taxfree_kernels.variant import own_rows, resized


def _problem(
    fabric: Fabric,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
) -> AllGatherMatmul:
    """See :meth:`taxfree.Runtime.all_gather_matmul`."""
    _require_matrices(a_shard, weight)
    dtype = common_dtype(fabric, a_shard=a_shard, weight=weight, bias=bias)
    return _of_sizes(fabric, a_shard, weight, bias, gather_dim, m, dtype=dtype)


def _require_matrices(a_shard: torch.Tensor, weight: torch.Tensor) -> None:
    require(a_shard.dim() == 2 and weight.dim() == 2, "a_shard and weight must be matrices")


def _scaled_problem(
    fabric: Fabric,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
    dtype: torch.dtype,
    is_fast: bool,
) -> AllGatherMatmul:
    """See :meth:`taxfree.Runtime.scaled_all_gather_matmul`."""
    _require_matrices(a_shard, weight)
    scales = require_scales(fabric, a_shard, weight, a_scale, weight_scale)
    name = require_addends(fabric, dtype, bias=bias)
    kind = {"dtype": name, "x_dtype": "fp8", "scales": scales, "fast_accumulation": is_fast}
    return _of_sizes(fabric, a_shard, weight, bias, gather_dim, m, **kind)


def _of_sizes(
    fabric: Fabric,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
    **kind: Any,
) -> AllGatherMatmul:
    """The problem of tensors in a dtype, with or without scales."""
    require(1 in weight.stride(), "neither stride of weight is 1")
    require(gather_dim in (0, 1), f"gather_dim is {gather_dim!r}, must be 0 or 1")
    rows, columns = a_shard.shape
    k, n = weight.shape
    if gather_dim == 0:
        m = m if m is not None else rows * fabric.world_size
    else:
        columns *= fabric.world_size
        m = m if m is not None else rows
    require(columns == k, f"the gathered A has {columns} columns, weight {k} rows")
    require_row("bias", bias, n)
    problem = AllGatherMatmul(
        m=m, n=n, k=k, gather_dim=gather_dim, world_size=fabric.world_size,
        weight_layout=weight_layout(weight), bias=bias is not None, **kind,
    )  # fmt: skip
    expected = own_rows(m, gather_dim, fabric.world_size, fabric.rank)
    require(
        rows == expected, f"a_shard has {rows} rows, rank {fabric.rank} of m={m} has {expected}"
    )
    return problem


def _library(
    world_size: int,
    group_name: str,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
) -> torch.Tensor:
    m = m if m is not None else a_shard.shape[0] * (world_size if gather_dim == 0 else 1)
    product = gather(a_shard, gather_dim, m, world_size, group_name)() @ weight
    return product if bias is None else product + bias


def _scaled_library(
    world_size: int,
    group_name: str,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
    dtype: torch.dtype,
    is_fast: bool,
) -> torch.Tensor:
    m = m if m is not None else a_shard.shape[0] * (world_size if gather_dim == 0 else 1)
    whole = gather(a_shard.view(torch.uint8), gather_dim, m, world_size, group_name)()
    is_of_block = weight_scale.shape != (1, weight.shape[1])
    if a_scale.dim() == 2 and (gather_dim == 0 or is_of_block):
        a_scale = gather(a_scale, gather_dim, m, world_size, group_name)()
    sums = product(whole.view(a_shard.dtype), a_scale, weight, weight_scale)
    return (sums if bias is None else sums + bias).to(dtype)


def _gradient(context: Any, grad: torch.Tensor) -> Gradients:
    a_shard, weight = context.saved_tensors
    *_, dim, _, group_name = context.arguments
    needs, m = context.needs_input_grad, grad.shape[0]
    gathered: Any = gather(a_shard, dim, m, context.world_size, group_name) if needs[1] else None

    def of_shard() -> Any:
        summed = torch.ops.taxfree.matmul_reduce_scatter(grad, weight.t(), dim, group_name)
        return summed[: a_shard.shape[0]]  # the shard of the last ranks may have fewer rows

    both = gradients(needs, grad, of_shard, lambda: gathered().t() @ grad)
    return *both, grad.sum(0) if needs[2] else None


ALL_GATHER_MATMUL = Signature(
    "all_gather_matmul",
    "Tensor a_shard, Tensor weight, Tensor? bias, int gather_dim, int? m",
    layout=lambda a, weight, bias, gather_dim, m: (
        "all_gather_matmul", a.shape, a.dtype, a.device, weight.shape, weight.stride(),
        weight.dtype, weight.device, None if bias is None else fixed(bias), gather_dim, m,
    ),
    key=lambda a, weight, bias, gather_dim, _: (
        by_row(a), fixed(weight), fixed(bias), gather_dim,
    ),
    sizes=lambda world_size, a, weight, bias, gather_dim, m: (
        m if m is not None else matrix_rows(a) * (1 if gather_dim == 1 else world_size),
    ),
    fits=lambda fabric, m, a, weight, bias, gather_dim, _: (
        matrix_rows(a) == own_rows(m, gather_dim, fabric.world_size, fabric.rank)
    ),
    problem=_problem,
    inputs=lambda _, a, weight, bias, *others: (aligned(a), weight, bias),
    shape=lambda _, m, a, weight, *others: (m, weight.shape[-1]),
    library=_library,
    gradient=_gradient,
)  # fmt: skip

SCALED_ALL_GATHER_MATMUL = Signature(
    "scaled_all_gather_matmul",
    "Tensor a_shard, Tensor weight, Tensor a_scale, Tensor weight_scale, Tensor? bias, "
    "int gather_dim, int? m, ScalarType dtype, bool fast_accumulation",
    layout=lambda a, weight, a_scale, weight_scale, bias, gather_dim, m, dtype, is_fast: (
        "scaled_all_gather_matmul", a.shape, a.dtype, a.device, fixed(weight), a_scale.shape,
        a_scale.dtype, a_scale.device, fixed(weight_scale), fixed(bias), gather_dim, m, dtype,
        is_fast,
    ),
    key=lambda a, weight, a_scale, weight_scale, bias, gather_dim, m, dtype, is_fast: (
        by_row(a), fixed(weight), by_row(a_scale), fixed(weight_scale), fixed(bias), gather_dim,
        dtype, is_fast,
    ),
    sizes=lambda world_size, a, weight, a_scale, weight_scale, bias, gather_dim, m, *others:
        ALL_GATHER_MATMUL.sizes(world_size, a, weight, bias, gather_dim, m),
    fits=lambda fabric, m, a, weight, a_scale, weight_scale, bias, gather_dim, *others: (
        ALL_GATHER_MATMUL.fits(fabric, m, a, weight, bias, gather_dim, None)
        and (a_scale.dim() < 2 or len(a_scale) == len(a))
    ),
    problem=_scaled_problem,
    inputs=lambda _, a, weight, a_scale, weight_scale, bias, *others: (
        aligned(a), weight, bias, aligned(a_scale), weight_scale,
    ),
    shape=lambda _, m, a, weight, *others: (m, weight.shape[-1]),
    dtype=lambda a, weight, a_scale, weight_scale, bias, gather_dim, m, dtype, is_fast: dtype,
    library=_scaled_library,
)  # fmt: skip

SIGNATURES = (ALL_GATHER_MATMUL, SCALED_ALL_GATHER_MATMUL)


def several_layout(
    a_shard: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[Any, ...]:
    """The properties of a call for several weights that decide what runs, as `layout`."""
    return (
        "all_gather_matmuls", a_shard.shape, a_shard.dtype, a_shard.device,
        *[fixed(weight) for weight in weights], *[fixed(bias) for bias in biases],
    )  # fmt: skip


def joint_problem(
    fabric: Fabric,
    a_shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> AllGatherMatmul:
    """The problem of one matmul with the columns of several weights.

    Raises:
        PlanError: the tensors do not fit together.
    """
    problems: list[Any] = [
        ALL_GATHER_MATMUL.problem(fabric, a_shard, weight, bias, 0, None)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    joint: AllGatherMatmul = resized(
        problems[0], n=sum(problem.n for problem in problems), bias=False
    )
    return joint
