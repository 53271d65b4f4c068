"""Cost formulas of the library's paths of matmul_all_reduce."""

from __future__ import annotations

from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import CostModel, Piece, copy, product_us
from taxfree_tune.cost.reduction import kept_bytes, library


def _addition(machine: Machine, problem: MatmulAllReduce) -> list[Piece]:
    """PyTorch's addition of a residual: two reads, one write."""
    return [copy(machine, 1.5 * kept_bytes(problem))] if problem.residual else []


COST = CostModel(vendor_us=product_us, variants=library(2, after=_addition))
