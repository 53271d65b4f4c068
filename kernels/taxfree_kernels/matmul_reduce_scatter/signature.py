"""How users call matmul_reduce_scatter."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.arguments import (
    aligned,
    by_row,
    common_dtype,
    fixed,
    matmul_sizes,
    matrix_rows,
    require_addends,
    require_scales,
    weight_layout,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fp8 import product
from taxfree_kernels.gradients import Gradients, gather
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.signature import Signature
from taxfree_kernels.variant import own_rows


def _problem(
    fabric: Fabric, x: torch.Tensor, weight: torch.Tensor, scatter_dim: int
) -> MatmulReduceScatter:
    """See :meth:`taxfree.Runtime.matmul_reduce_scatter`."""
    dtype = common_dtype(fabric, x=x, weight=weight)
    m, k, n = matmul_sizes(x, weight)
    return MatmulReduceScatter(
        m=m, n=n, k=k, scatter_dim=scatter_dim, dtype=dtype,
        world_size=fabric.world_size, weight_layout=weight_layout(weight),
    )  # fmt: skip


def _scaled_problem(
    fabric: Fabric,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    scatter_dim: int,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> MatmulReduceScatter:
    """See :meth:`taxfree.Runtime.scaled_matmul_reduce_scatter`."""
    m, k, n = matmul_sizes(x, weight)
    scales = require_scales(fabric, x, weight, x_scale, weight_scale)
    return MatmulReduceScatter(
        m=m, n=n, k=k, scatter_dim=scatter_dim, dtype=require_addends(fabric, dtype),
        world_size=fabric.world_size, weight_layout=weight_layout(weight), x_dtype="fp8",
        scales=scales, fast_accumulation=fast_accumulation,
    )  # fmt: skip


def _library(
    world_size: int, group_name: str, x: torch.Tensor, weight: torch.Tensor, scatter_dim: int
) -> torch.Tensor:
    return _library_shard(world_size, group_name, x @ weight, scatter_dim)


def _scaled_library(
    world_size: int,
    group_name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    scatter_dim: int,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> torch.Tensor:
    sums = product(x, x_scale, weight, weight_scale).to(dtype)
    return _library_shard(world_size, group_name, sums, scatter_dim)


def _library_shard(
    world_size: int, group_name: str, partial: torch.Tensor, scatter_dim: int
) -> torch.Tensor:
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
    layout=lambda x, weight, scatter_dim: (
        "matmul_reduce_scatter", x.shape, x.dtype, x.device, weight.shape, weight.stride(),
        weight.dtype, weight.device, scatter_dim,
    ),
    key=lambda x, weight, scatter_dim: (by_row(x), fixed(weight), scatter_dim),
    sizes=lambda _, x, *others: (matrix_rows(x),),
    fits=lambda *_: True,
    problem=_problem,
    inputs=lambda _, x, weight, scatter_dim: (aligned(x), weight),
    shape=lambda world_size, m, x, weight, scatter_dim: (
        (m, weight.shape[-1] // world_size)
        if scatter_dim == 1
        else (-(-m // world_size), weight.shape[-1])
    ),
    library=_library,
    gradient=_gradient,
)  # fmt: skip

SCALED_MATMUL_REDUCE_SCATTER = Signature(
    "scaled_matmul_reduce_scatter",
    "Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, int scatter_dim, "
    "ScalarType dtype, bool fast_accumulation",
    layout=lambda x, weight, x_scale, weight_scale, scatter_dim, dtype, is_fast: (
        "scaled_matmul_reduce_scatter", x.shape, x.dtype, x.device, fixed(weight), x_scale.shape,
        x_scale.dtype, x_scale.device, fixed(weight_scale), scatter_dim, dtype, is_fast,
    ),
    key=lambda x, weight, x_scale, weight_scale, scatter_dim, dtype, is_fast: (
        by_row(x), fixed(weight), by_row(x_scale), fixed(weight_scale), scatter_dim, dtype,
        is_fast,
    ),
    sizes=lambda _, x, *others: (matrix_rows(x),),
    fits=lambda _, m, x, weight, x_scale, *others: x_scale.dim() < 2 or len(x_scale) == m,
    problem=_scaled_problem,
    inputs=lambda _, x, weight, x_scale, weight_scale, scatter_dim, *others: (
        aligned(x), weight, aligned(x_scale), weight_scale,
    ),
    shape=lambda world_size, m, x, weight, x_scale, weight_scale, scatter_dim, *others:
        MATMUL_REDUCE_SCATTER.shape(world_size, m, x, weight, scatter_dim),
    dtype=lambda x, weight, x_scale, weight_scale, scatter_dim, dtype, is_fast: dtype,
    library=_scaled_library,
)  # fmt: skip

SIGNATURES = (MATMUL_REDUCE_SCATTER, SCALED_MATMUL_REDUCE_SCATTER)
