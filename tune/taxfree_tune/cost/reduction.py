"""Common parts of the cost formulas of matmul_all_reduce and matmul_reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taxfree_kernels.variant import PartialSum, resized
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import ITEM_BYTES, Formula, Piece, collective, copy, matmul


def kept_bytes(problem: PartialSum) -> float:
    """Bytes of the sum that a rank keeps: all of it, or its shard."""
    return float(ITEM_BYTES * problem.kept_elements)


def _nothing(machine: Machine, problem: Any) -> list[Piece]:
    return []


def library(
    rounds: int,
    before: Callable[..., list[Piece]] = _nothing,
    after: Callable[..., list[Piece]] = _nothing,
) -> dict[str, Formula]:
    """The library's matmul and its sum, also on registered buffers, which cost a copy out.

    Args:
        rounds: of the ring of its sum.
        before, after: the pieces between the two, and those behind the sum, which spare the copy.
    """

    def of(registered: bool) -> Formula:
        def formula(machine: Machine, problem: PartialSum) -> list[Piece]:
            in_16_bits, peers = resized(problem, fp8_wire=False), problem.world_size - 1
            received = in_16_bits.cost.link_bytes
            total = collective(machine, received, peers, registered=registered, rounds=rounds)
            copied = [copy(machine, kept_bytes(problem))] if registered else []
            pieces = [matmul(machine, problem), *before(machine, problem), total]
            return pieces + (after(machine, problem) or copied)

        return formula

    return {"baseline": of(registered=False), "registered": of(registered=True)}
