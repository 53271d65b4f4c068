"""Cost formulas of all_gather_matmul's variants of separate steps."""

from __future__ import annotations

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.spaces import SEND_BLOCK
from taxfree_kernels.variant import Config
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import (
    ITEM_BYTES,
    CostModel,
    Formula,
    Piece,
    collective,
    copy,
    exchange_us,
    matmul,
    own_collective,
    product_us,
)


def _shard_bytes(problem: AllGatherMatmul) -> float:
    return problem.slot_bytes / problem.world_size


def _library(*, registered: bool) -> Formula:
    def formula(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
        shard = _shard_bytes(problem)
        pieces = []
        if registered or (problem.gather_dim == 0 and problem.m % problem.world_size):
            pieces.append(copy(machine, shard, views=True))
        peers = problem.world_size - 1
        pieces.append(collective(machine, peers * shard, peers, registered=registered))
        if problem.gather_dim == 1 and problem.m > 1:
            pieces.append(copy(machine, problem.slot_bytes, views=True))
        return [*pieces, matmul(machine, problem)]

    return formula


def _one_shot(machine: Machine, problem: AllGatherMatmul, config: Config) -> list[Piece]:
    received = (problem.world_size - 1) * _shard_bytes(problem)
    message = _shard_bytes(problem) / config["CHUNKS"]
    gather = exchange_us(machine, received, message, ITEM_BYTES * SEND_BLOCK)
    return [own_collective(machine, [gather], 2 * problem.slot_bytes), matmul(machine, problem)]


COST = CostModel(
    vendor_us=product_us,
    variants={
        "baseline": _library(registered=False),
        "registered": _library(registered=True),
        "one_shot": _one_shot,
    },
)
