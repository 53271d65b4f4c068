"""Cost formulas of matmul_reduce_scatter's variants of separate steps."""

from __future__ import annotations

from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Config
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import (
    ITEM_BYTES,
    CostModel,
    Formula,
    Piece,
    copy,
    exchange_us,
    matmul,
    own_collective,
    product_us,
)
from taxfree_tune.cost.reduction import kept_bytes, summed, then


def _library(*, registered: bool) -> Formula:
    """The library's matmul, then its reduce-scatter; registered buffers cost a copy out."""

    def formula(machine: Machine, problem: MatmulReduceScatter, config: Config) -> list[Piece]:
        pieces = [matmul(machine, problem)]
        if problem.scatter_dim == 1:
            pieces.append(copy(machine, ITEM_BYTES * problem.elements, views=True))
        pieces.append(summed(machine, problem, registered=registered, rounds=1))
        if registered:
            pieces.append(copy(machine, kept_bytes(problem)))
        return pieces

    return formula


def _one_shot(machine: Machine, problem: MatmulReduceScatter, config: Config) -> Piece:
    """Every rank sends each rank the partial sum of its shard, which is added there."""
    kept, world = kept_bytes(problem), problem.world_size
    block = ITEM_BYTES * config["SEND_BLOCK"]
    sent = exchange_us(machine, (world - 1) * kept, kept / config["CHUNKS"], block)
    return own_collective(machine, [sent], (world + 1) * kept)


COST = CostModel(
    vendor_us=product_us,
    variants={
        "baseline": _library(registered=False),
        "registered": _library(registered=True),
        "one_shot": then(_one_shot),
    },
)
