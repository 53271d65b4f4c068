"""How users call matmul_reduce_scatter."""

from __future__ import annotations

import torch

from taxfree_kernels.arguments import (
    aligned,
    by_row,
    common_dtype,
    fixed,
    matmul_sizes,
    matrix_rows,
    weight_layout,
)
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.signature import Signature


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
)  # fmt: skip

SIGNATURES = (MATMUL_REDUCE_SCATTER,)
