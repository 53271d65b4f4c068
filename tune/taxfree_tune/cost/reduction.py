"""Common parts of the cost formulas of matmul_all_reduce and matmul_reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable

from taxfree_kernels.variant import Config, PartialSum
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import ITEM_BYTES, Formula, Piece, collective, matmul


def kept_bytes(problem: PartialSum) -> float:
    """Bytes of the sum that a rank keeps: all of it, or its shard."""
    return float(ITEM_BYTES * problem.kept_elements)


def summed(machine: Machine, problem: PartialSum, *, registered: bool, rounds: int) -> Piece:
    """The collective library's sum, with `rounds` of its ring."""
    received, peers = problem.cost.link_bytes, problem.world_size - 1
    return collective(machine, received, peers, registered=registered, rounds=rounds)


def then(add: Callable[..., Piece]) -> Formula:
    """The vendor's matmul, then our sum."""

    def formula(machine: Machine, problem: PartialSum, config: Config) -> list[Piece]:
        return [matmul(machine, problem), add(machine, problem, config)]

    return formula
