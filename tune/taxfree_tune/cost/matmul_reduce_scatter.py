"""Cost formulas of the library's paths of matmul_reduce_scatter."""

from __future__ import annotations

from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import ITEM_BYTES, CostModel, Piece, copy, product_us
from taxfree_tune.cost.reduction import library


def _by_columns(machine: Machine, problem: MatmulReduceScatter) -> list[Piece]:
    """A copy, in which the columns of a rank are side by side."""
    is_by_columns = problem.scatter_dim == 1
    return [copy(machine, ITEM_BYTES * problem.elements, views=True)] if is_by_columns else []


COST = CostModel(vendor_us=product_us, variants=library(1, before=_by_columns))
