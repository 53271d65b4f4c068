"""How users call matmul_reduce_scatter."""

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
    weight_layout,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import partial_product
from taxfree_kernels.gradients import Gradients, gather
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.signature import Signature
from taxfree_kernels.variant import own_rows


def _problem(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    scatter_dim: int,
    **scaled: Any,
) -> MatmulReduceScatter:
    """See the methods of :class:`taxfree.Runtime`."""
    m, k, n = matmul_sizes(x, weight)
    return MatmulReduceScatter(
        m=m, n=n, k=k, scatter_dim=scatter_dim, world_size=fabric.world_size,
        weight_layout=weight_layout(weight), **dtype_fields(fabric, x, weight, **scaled),
    )  # fmt: skip


def _library(
    world_size: int,
    group_name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scatter_dim: int,
    **scaled: Any,
) -> torch.Tensor:
    partial = partial_product(x, weight, **scaled)
    if scatter_dim == 1:
        partial = torch.cat(partial.chunk(world_size, 1))
    else:
        partial = torch.nn.functional.pad(partial, (0, 0, 0, -len(partial) % world_size))
    c10d = torch.ops._c10d_functional
    shard = c10d.reduce_scatter_tensor(partial, "sum", world_size, group_name)
    found: torch.Tensor = c10d.wait_tensor(shard)
    return found


def _gradient(context: Any, grad: torch.Tensor) -> Gradients:
    """Both gradients are of the gathered one, which travels once."""
    x, weight = context.saved_tensors
    *_, dim, group_name = context.arguments
    needs, m, world_size = context.needs_input_grad, x.shape[0], context.world_size
    shard = grad[: own_rows(m, dim, world_size, context.rank)]  # the others are padding
    if not needs[1]:
        operation = torch.ops.taxfree.all_gather_matmul
        return operation(shard.contiguous(), weight.t(), None, dim, m, group_name), None
    if needs[0] and dim == 0 and m % world_size == 0:
        operation = torch.ops.taxfree.all_gather_matmuls
        grad_x, whole = operation(shard.contiguous(), [weight.t()], [None], True, group_name)
    else:
        whole = gather(shard, dim, m, world_size, group_name)()
        grad_x = whole @ weight.t() if needs[0] else None
    return grad_x, x.t() @ whole


MATMUL_REDUCE_SCATTER = Signature(
    "matmul_reduce_scatter",
    "Tensor x, Tensor weight, int scatter_dim",
    by_size={"x": by_row, "x_scale": by_row},
    sizes=lambda _, x, **others: (matrix_rows(x),),
    fits=lambda _, m, x_scale=None, **others: (
        x_scale is None or x_scale.dim() < 2 or len(x_scale) == m
    ),
    problem=_problem,
    inputs=lambda _, x, weight, scatter_dim: (aligned(x), weight),
    shape=lambda world_size, m, weight, scatter_dim, **others: (
        (m, weight.shape[-1] // world_size)
        if scatter_dim == 1
        else (-(-m // world_size), weight.shape[-1])
    ),
    library=_library,
    gradient=_gradient,
)  # fmt: skip

SCALED_MATMUL_REDUCE_SCATTER = dataclasses.replace(
    MATMUL_REDUCE_SCATTER,
    name="scaled_matmul_reduce_scatter",
    schema="Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, int scatter_dim, "
    "ScalarType dtype, bool fast_accumulation",
    inputs=lambda _, x, weight, x_scale, weight_scale, scatter_dim, *others: (
        aligned(x), weight, aligned(x_scale), weight_scale,
    ),
    gradient=None,
)  # fmt: skip

_SUMS = (MATMUL_REDUCE_SCATTER, SCALED_MATMUL_REDUCE_SCATTER)
SIGNATURES = (*_SUMS, *(signature.over_fp8_wire for signature in _SUMS))
