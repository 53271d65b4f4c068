"""How users call all_gather_matmul."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.arguments import (
    aligned,
    by_row,
    dtype_fields,
    fixed,
    matrix_rows,
    require,
    require_row,
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
    a_scale: torch.Tensor | None = None,
    **scaled: Any,
) -> AllGatherMatmul:
    """See the methods of :class:`taxfree.Runtime`."""
    require(a_shard.dim() == 2 and weight.dim() == 2, "a_shard and weight must be matrices")
    dtypes = dtype_fields(fabric, a_shard, weight, a_scale, **scaled, x_name="a_shard", bias=bias)
    require(1 in weight.stride(), "neither stride of weight is 1")
    require(gather_dim in (0, 1), f"gather_dim is {gather_dim!r}, must be 0 or 1")
    rows, columns = a_shard.shape
    k, n = weight.shape
    m = _rows(fabric.world_size, a_shard, gather_dim, m)
    columns *= fabric.world_size if gather_dim == 1 else 1
    require(columns == k, f"the gathered A has {columns} columns, weight {k} rows")
    require_row("bias", bias, n)
    problem = AllGatherMatmul(
        m=m, n=n, k=k, gather_dim=gather_dim, world_size=fabric.world_size,
        weight_layout=weight_layout(weight), bias=bias is not None, **dtypes,
    )  # fmt: skip
    expected = own_rows(m, gather_dim, fabric.world_size, fabric.rank)
    require(
        rows == expected, f"a_shard has {rows} rows, rank {fabric.rank} of m={m} has {expected}"
    )
    return problem


def _rows(
    world_size: int, a_shard: torch.Tensor, gather_dim: int, m: int | None, **others: Any
) -> int:
    """Rows of the gathered A."""
    return m if m is not None else matrix_rows(a_shard) * (1 if gather_dim == 1 else world_size)


def _library(
    world_size: int,
    group_name: str,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gather_dim: int,
    m: int | None,
    a_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    m = _rows(world_size, a_shard, gather_dim, m)
    if a_scale is None or weight_scale is None:
        sums = gather(a_shard, gather_dim, m, world_size, group_name)() @ weight
        return sums if bias is None else sums + bias
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
    by_size={"a_shard": by_row, "a_scale": by_row, "m": lambda _: None},
    sizes=lambda world_size, **arguments: (_rows(world_size, **arguments),),
    fits=lambda fabric, rows, a_shard, gather_dim, a_scale=None, **others: (
        matrix_rows(a_shard) == own_rows(rows, gather_dim, fabric.world_size, fabric.rank)
        and (a_scale is None or a_scale.dim() < 2 or len(a_scale) == len(a_shard))
    ),
    problem=_problem,
    inputs=lambda _, a, weight, bias, *others: (aligned(a), weight, bias),
    shape=lambda _, rows, weight, **others: (rows, weight.shape[-1]),
    library=_library,
    gradient=_gradient,
)  # fmt: skip

SCALED_ALL_GATHER_MATMUL = dataclasses.replace(
    ALL_GATHER_MATMUL,
    name="scaled_all_gather_matmul",
    schema="Tensor a_shard, Tensor weight, Tensor a_scale, Tensor weight_scale, Tensor? bias, "
    "int gather_dim, int? m, ScalarType dtype, bool fast_accumulation",
    inputs=lambda _, a, weight, a_scale, weight_scale, bias, *others: (
        aligned(a), weight, bias, aligned(a_scale), weight_scale,
    ),
    gradient=None,
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
