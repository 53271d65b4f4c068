"""Cost formulas of the variants of matmul_all_reduce and matmul_reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable

from taxfree_kernels.cost.machines import Machine
from taxfree_kernels.cost.pieces import (
    ITEM_BYTES,
    Formula,
    Piece,
    collective,
    launch_us,
    matmul,
    tiles_us,
)
from taxfree_kernels.problem import PartialSum
from taxfree_kernels.variant import Config


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


def tiles_that_send(
    machine: Machine,
    problem: PartialSum,
    config: Config,
    *,
    sent: float,
    moved: float,
    wave_us: float = 0.0,
    behind_us: float = 0.0,
) -> list[Piece]:
    """Tiles are sent when they are finished; the last wave is sent after the matmul.

    Args:
        sent: bytes that cross the link while tiles are computed.
        moved: bytes that additions read and write.
        wave_us: wait of each wave of tiles.
        behind_us: time after the last tile's transfer.
    """
    tma = config.get("TMA", False)
    tiles, wave = tiles_us(machine, problem, config, tma=tma)
    link = 1e6 * sent / machine.link_bytes_per_s
    us = max(tiles, wave + link) + tiles / wave * wave_us + behind_us
    us += machine.tile_start_us + 1e6 * moved / machine.memory_bytes_per_s
    return [Piece("fused", us, launch_us(machine, tma=tma))]


def push(machine: Machine, problem: PartialSum, config: Config) -> list[Piece]:
    """The time of the last tile's sum."""
    kept, world = kept_bytes(problem), problem.world_size
    return tiles_that_send(
        machine, problem, config,
        sent=(world - 1) * kept, moved=(world + 1) * kept, behind_us=machine.signal_us,
    )  # fmt: skip


def push_lamport(machine: Machine, problem: PartialSum, config: Config) -> list[Piece]:
    """Like `push`, but each wave of tiles polls for its peers' Lamport words, without signals."""
    kept, world = kept_bytes(problem), problem.world_size
    return tiles_that_send(
        machine, problem, config,
        sent=(world - 1) * kept, moved=(world + 1) * kept, wave_us=machine.round_trip_us,
    )  # fmt: skip
