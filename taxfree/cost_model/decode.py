"""What the variants of flash_decode consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taxfree.cost_model.machines import Machine
from taxfree.cost_model.pieces import (
    Config,
    Formula,
    Piece,
    attention,
    collective,
    own_collective,
    small,
)


def _after_attention(pieces: Callable[[Machine, Any], list[Piece]]) -> Formula:
    """The attention of this rank's keys, then other pieces."""

    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        return [attention(machine, problem), *pieces(machine, problem)]

    return formula


def _part_bytes(problem: Any) -> float:
    return float(4 * problem.part_elements)


def _parts_exchanged(machine: Machine, problem: Any) -> Piece:
    """The exchange of parts, which are small: only the link and signals count."""
    received = (problem.world_size - 1) * _part_bytes(problem)
    us = machine.signal_us + 1e6 * received / machine.link_bytes_per_s
    return own_collective(machine, [us], received)


def _library(machine: Machine, problem: Any) -> list[Piece]:
    peers = problem.world_size - 1
    gathered = collective(machine, peers * _part_bytes(problem), peers, registered=False)
    return [small(machine), gathered, small(machine)]


def _gather(machine: Machine, problem: Any) -> list[Piece]:
    return [small(machine), _parts_exchanged(machine, problem), small(machine)]


def _persistent(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    us = attention(machine, problem).us + _parts_exchanged(machine, problem).us
    return [Piece("fused", us, machine.host_kernel_us)]


FLASH_DECODE: dict[str, Formula] = {
    "baseline": _after_attention(_library),
    "library": _after_attention(_library),
    "gather": _after_attention(_gather),
    "fine_wait": _after_attention(_gather),
    "fused": _after_attention(lambda m, p: [_parts_exchanged(m, p)]),
    "persistent": _persistent,
}
