"""Cost formulas of flash_decode's variants."""

from __future__ import annotations

from collections.abc import Callable

from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.variant import Config
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import (
    CostModel,
    Formula,
    Piece,
    collective,
    own_collective,
    small,
)


def _attention(machine: Machine, problem: FlashDecode) -> Piece:
    """Our attention to a rank's own keys."""
    cost = problem.cost
    longer = max(cost.flops / machine.flops_per_s, cost.memory_bytes / machine.memory_bytes_per_s)
    return Piece("consumer", machine.attention_start_us + 1e6 * longer, machine.host_kernel_us)


def _after_attention(pieces: Callable[[Machine, FlashDecode], list[Piece]]) -> Formula:
    """The attention to this rank's keys, then other pieces."""

    def formula(machine: Machine, problem: FlashDecode, config: Config) -> list[Piece]:
        return [_attention(machine, problem), *pieces(machine, problem)]

    return formula


def _part_bytes(problem: FlashDecode) -> float:
    return float(4 * problem.part_elements)


def _parts_exchanged(machine: Machine, problem: FlashDecode) -> Piece:
    """The exchange of parts, which are small: only the link and signals count."""
    received = (problem.world_size - 1) * _part_bytes(problem)
    us = machine.signal_us + 1e6 * received / machine.link_bytes_per_s
    return own_collective(machine, [us], received)


def _library(machine: Machine, problem: FlashDecode) -> list[Piece]:
    peers = problem.world_size - 1
    gathered = collective(machine, peers * _part_bytes(problem), peers, registered=False)
    return [small(machine), gathered, small(machine)]


def _gather(machine: Machine, problem: FlashDecode) -> list[Piece]:
    return [small(machine), _parts_exchanged(machine, problem), small(machine)]


COST = CostModel(
    vendor_us=lambda machine, problem: _attention(machine, problem).us,
    variants={
        "baseline": _after_attention(_library),
        "splits": _after_attention(_library),
        "gather": _after_attention(_gather),
        "fine_wait": _after_attention(_gather),
        "fused": _after_attention(lambda m, p: [_parts_exchanged(m, p)]),
    },
)
