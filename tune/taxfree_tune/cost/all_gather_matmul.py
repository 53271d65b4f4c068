"""Cost formulas of the library's paths of all_gather_matmul."""

from __future__ import annotations

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import (
    CostModel,
    Formula,
    Piece,
    collective,
    copy,
    matmul,
    product_us,
)


def _library(*, registered: bool) -> Formula:
    def formula(machine: Machine, problem: AllGatherMatmul) -> list[Piece]:
        shard = problem.slot_bytes / problem.world_size
        pieces = []
        if registered or (problem.gather_dim == 0 and problem.m % problem.world_size):
            pieces.append(copy(machine, shard, views=True))
        peers = problem.world_size - 1
        pieces.append(collective(machine, peers * shard, peers, registered=registered))
        if problem.gather_dim == 1 and problem.m > 1:
            pieces.append(copy(machine, problem.slot_bytes, views=True))
        return [*pieces, matmul(machine, problem)]

    return formula


COST = CostModel(
    vendor_us=product_us,
    variants={
        "baseline": _library(registered=False),
        "registered": _library(registered=True),
    },
)
