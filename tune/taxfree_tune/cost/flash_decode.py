"""Cost formulas of the library's path of flash_decode, which begins with our attention."""

from __future__ import annotations

from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import CostModel, Piece, attention_us, collective, small


def _library(machine: Machine, problem: FlashDecode) -> list[Piece]:
    peers = problem.world_size - 1
    received = peers * 4.0 * problem.part_elements
    return [
        Piece("consumer", attention_us(machine, problem), machine.host_kernel_us),
        small(machine),
        collective(machine, received, peers, registered=False),
        small(machine),
    ]


COST = CostModel(vendor_us=attention_us, variants={"baseline": _library, "splits": _library})
