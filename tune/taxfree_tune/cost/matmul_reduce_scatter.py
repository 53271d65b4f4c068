"""Cost formulas of matmul_reduce_scatter's variants of separate steps."""

from __future__ import annotations

from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
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


def _by_columns(machine: Machine, problem: MatmulReduceScatter) -> list[Piece]:
    """A copy, in which the columns of a rank are side by side."""
    is_by_columns = problem.scatter_dim == 1
    return [copy(machine, ITEM_BYTES * problem.elements, views=True)] if is_by_columns else []


def _one_shot(machine: Machine, problem: MatmulReduceScatter, config: Config) -> Piece:
    """Every rank sends each rank the partial sum of its shard, which is added there."""
    kept, world = kept_bytes(problem), problem.world_size
    block = ITEM_BYTES * config["SEND_BLOCK"]
    sent = exchange_us(machine, (world - 1) * kept, kept / config["CHUNKS"], block)
    return own_collective(machine, [sent], (world + 1) * kept)


COST = CostModel(
    vendor_us=product_us,
    variants=library(1, before=_by_columns) | {"one_shot": then(_one_shot)},
)
