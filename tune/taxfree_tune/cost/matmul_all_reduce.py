"""Cost formulas of matmul_all_reduce's variants of separate steps."""

from __future__ import annotations

from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.variant import Config
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import (
    ITEM_BYTES,
    CostModel,
    Piece,
    copy,
    exchange_us,
    own_collective,
    product_us,
)
from taxfree_tune.cost.reduction import kept_bytes, library, then


def _addition(machine: Machine, problem: MatmulAllReduce) -> list[Piece]:
    """PyTorch's addition of a residual: two reads, one write."""
    return [copy(machine, 1.5 * kept_bytes(problem))] if problem.residual else []


def _two_shot(machine: Machine, problem: MatmulAllReduce, config: Config) -> Piece:
    """Each rank adds a block, and sends the sum to all."""
    world, size = problem.world_size, kept_bytes(problem)
    block = ITEM_BYTES * config["SEND_BLOCK"]
    received, message = size * (world - 1) / world, size / world / config["CHUNKS"]
    shot = exchange_us(machine, received, message, block)
    return own_collective(machine, [shot, shot], 3 * size)


COST = CostModel(
    vendor_us=product_us,
    variants=library(2, after=_addition) | {"two_shot": then(_two_shot)},
)
