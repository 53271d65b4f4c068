"""The piece of attention's library path."""

from __future__ import annotations

from taxfree_kernels.attention.problem import Attention
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import CostModel, Piece, attention_us


def _library(machine: Machine, problem: Attention) -> list[Piece]:
    return [Piece("consumer", attention_us(machine, problem), machine.host_op_us)]


COST = CostModel(vendor_us=attention_us, variants={"baseline": _library})
