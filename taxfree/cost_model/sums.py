"""What the variants of matmul_all_reduce and matmul_reduce_scatter consist of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from taxfree.cost_model.machines import Machine
from taxfree.cost_model.pieces import (
    ITEM_BYTES,
    Config,
    Formula,
    Piece,
    announced_copy_us,
    barrier_us,
    collective,
    composed,
    copy,
    exchange_us,
    launch_us,
    matmul,
    matmul_us,
    own_collective,
    small,
    tiles_us,
)


def _library(*, registered: bool) -> Formula:
    """The library's matmul, then its sum; registered buffers cost a copy out."""

    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        pieces = [matmul(machine, problem.m, problem.n, problem.k)]
        whole = ITEM_BYTES * problem.m * problem.n
        if getattr(problem, "scatter_dim", 0) == 1:
            pieces.append(copy(machine, whole, views=True))
        received, peers = problem.cost.link_bytes, problem.world_size - 1
        rounds = 1 if hasattr(problem, "shard_rows") else 2
        summed = collective(machine, received, peers, registered=registered, rounds=rounds)
        pieces.append(summed)
        if getattr(problem, "residual", False):
            pieces.append(_addition(machine, problem))
        elif registered:
            pieces.append(copy(machine, _kept_bytes(problem)))
        return pieces

    return formula


def _kept_bytes(problem: Any) -> float:
    """Of the sum that a rank keeps: all of it, or its shard."""
    rows: int = getattr(problem, "shard_rows", problem.m)
    columns: int = getattr(problem, "shard_columns", problem.n)
    return float(ITEM_BYTES * rows * columns)


def _addition(machine: Machine, problem: Any) -> Piece:
    """Of a residual, by PyTorch: two are read, one is written."""
    return copy(machine, 1.5 * _kept_bytes(problem))


def _one_shot(machine: Machine, problem: Any, config: Config) -> Piece:
    """Every rank sends each rank its partial sum of what that rank keeps; it is added there."""
    kept, world = _kept_bytes(problem), problem.world_size
    block = ITEM_BYTES * config["SEND_BLOCK"]
    sent = exchange_us(machine, (world - 1) * kept, kept / config["CHUNKS"], block)
    return own_collective(machine, [sent], (world + 1) * kept)


def _two_shot(machine: Machine, problem: Any, config: Config) -> Piece:
    """Each rank adds a block, and sends the sum to all."""
    world, size = problem.world_size, _kept_bytes(problem)
    block = ITEM_BYTES * config["SEND_BLOCK"]
    received, message = size * (world - 1) / world, size / world / config["CHUNKS"]
    shot = exchange_us(machine, received, message, block)
    return own_collective(machine, [shot, shot], 3 * size)


def _then(add: Callable[[Machine, Any, Config], Piece]) -> Formula:
    """The vendor's matmul, then a sum of ours."""

    def formula(machine: Machine, problem: Any, config: Config) -> list[Piece]:
        return [
            matmul(machine, problem.m, problem.n, problem.k),
            add(machine, problem, config),
        ]

    return formula


def _overlap(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """Copy engines scatter while the vendor's matmul computes, peers' shards first, in parts.

    Then each rank adds.
    """
    world, m, n = problem.world_size, problem.shard_rows, problem.shard_columns
    messages = (world - 1) * config["CHUNKS"]
    parts = -(-messages // config["CHUNKS_PER_WAIT"])
    start, gap = machine.kernel_start_us, machine.gap_us
    shard = float(ITEM_BYTES * m * n)
    link = 1e6 * (world - 1) * shard / machine.link_bytes_per_s
    # The copy of a matmul's result waits for earlier copies on the same stream.
    copied = -(-messages // config["STREAMS"]) * announced_copy_us(machine) + link
    part = matmul_us(machine, -(-(world - 1) * m // parts), n, problem.k) + gap
    turn = parts * part + matmul_us(machine, m, n, problem.k) + gap
    us = max(turn, parts * part + copied / parts, part + copied)
    us += gap + start + 1e6 * (world + 1) * shard / machine.memory_bytes_per_s  # the addition
    us += gap + start  # a kernel ends the call
    kernels, ops = 3 + messages, parts + 1 + messages
    waits = config["STREAMS"] * (parts + 3)
    host = kernels * machine.host_kernel_us + ops * machine.host_op_us
    host += waits * machine.host_stream_us
    return [Piece("fused", us, host, kernels=kernels + ops)]


def _tiles_that_send(
    machine: Machine,
    problem: Any,
    config: Config,
    *,
    sent: float,
    moved: float,
    wave_us: float = 0.0,
    behind_us: float = 0.0,
) -> list[Piece]:
    """Tiles are sent when they are finished; what the last wave sends follows the matmul.

    Args:
        sent: bytes that cross the link while tiles are computed.
        moved: bytes that additions read and write.
        wave_us: wait of each wave of tiles.
        behind_us: what follows the last tile's transfer.
    """
    tma = config.get("TMA", False)
    tiles, wave = tiles_us(machine, problem, config, tma=tma)
    link = 1e6 * sent / machine.link_bytes_per_s
    us = max(tiles, wave + link) + tiles / wave * wave_us + behind_us
    us += machine.tile_start_us + 1e6 * moved / machine.memory_bytes_per_s
    return [Piece("fused", us, launch_us(machine, tma=tma))]


def _push(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """The sum of the last tile is waited for."""
    kept, world = _kept_bytes(problem), problem.world_size
    return _tiles_that_send(
        machine, problem, config,
        sent=(world - 1) * kept, moved=(world + 1) * kept, behind_us=machine.signal_us,
    )  # fmt: skip


def _push_two_shot(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """Tiles and sums are sent when finished; the last AHEAD waves' sums follow the matmul."""
    tma = config.get("TMA", False)
    tiles, wave = tiles_us(machine, problem, config, tma=tma)
    kept, world = _kept_bytes(problem), problem.world_size
    shot = 1e6 * kept * (world - 1) / world / machine.link_bytes_per_s
    behind = min(1.0, config["AHEAD"] * wave / tiles) * shot
    added = 1e6 * 3 * kept / machine.memory_bytes_per_s
    us = max(tiles, wave + 2 * shot - behind) + behind + 2 * machine.signal_us + added
    return [Piece("fused", machine.tile_start_us + us, launch_us(machine, tma=tma))]


def _push_in_place(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """As `_push`, but each wave of tiles waits for its peers, and the own part is not stored.

    Words are half flag: twice the bytes, but half a signal. A signal is sent once the data before
    it has arrived; a word crosses the link only once.
    """
    kept, peers, words = _kept_bytes(problem), problem.world_size - 1, 1 + config["LL"]
    return _tiles_that_send(
        machine, problem, config,
        sent=words * peers * kept, moved=(words * peers + 1) * kept,
        wave_us=machine.signal_us / words,
    )  # fmt: skip


def _push_lamport(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """As `_push`, by Lamport words: each wave of tiles polls for its peers', without signals."""
    kept, world = _kept_bytes(problem), problem.world_size
    return _tiles_that_send(
        machine, problem, config,
        sent=(world - 1) * kept, moved=(world + 1) * kept, wave_us=machine.round_trip_us,
    )  # fmt: skip


def _push_two_shot_lamport(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """As `_push_lamport`, but slices cross the link, and then their sums."""
    kept, world = _kept_bytes(problem), problem.world_size
    shot = kept * (world - 1) / world
    return _tiles_that_send(
        machine, problem, config,
        sent=shot, moved=5 * kept, wave_us=2 * machine.round_trip_us,
        behind_us=1e6 * shot / machine.link_bytes_per_s,
    )  # fmt: skip


_TORCH_BLOCKS = 24  # at most, in PyTorch's all-reduces over symmetric memory
_TORCH_THREADS = {1: 512, 2: 1024}  # per such block, by shots; each has 16 bytes in flight


def _torch_symm_mem(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """The vendor's matmul, then ranks load from each other, between barriers inside a kernel.

    In one shot each loads all of the others' sums; in two the block that it adds, and then the
    blocks that the others have added.
    """
    world, size, shots = problem.world_size, _kept_bytes(problem), config["SHOTS"]
    loaded = (world - 1) * (size if shots == 1 else size / world)
    block = 16 * _TORCH_THREADS[shots] * (world - 1)
    blocks = min(_TORCH_BLOCKS, math.ceil(loaded / block))
    shot = exchange_us(machine, loaded, loaded / blocks, block)
    # The last barrier is for those that still load.
    added = own_collective(machine, [*shots * [shot], machine.signal_us], (1 + shots) * size)
    pieces = [
        matmul(machine, problem.m, problem.n, problem.k),
        dataclasses.replace(added, host_us=machine.host_op_us),
    ]
    if problem.residual:
        pieces.append(_addition(machine, problem))
    return pieces


def _torch_fused(machine: Machine, problem: Any, config: Config) -> list[Piece]:
    """PyTorch's op: per shard a matmul, a barrier, a copy from the peer, a barrier; then the sum.

    Its two streams hide copies behind matmuls, but not barriers: work of both is short.
    """
    world, kept = problem.world_size, _kept_bytes(problem)
    m, n = problem.m, problem.n
    m, n = (m, n // world) if problem.scatter_dim == 1 else (m // world, n)
    multiplied = matmul_us(machine, m, n, problem.k)
    copied = machine.engine_us + 1e6 * kept / machine.link_bytes_per_s
    pipeline = max(world * multiplied, (world - 1) * copied + multiplied)
    barriers = 2 * world
    added = small(machine, (world + 1) * kept).us + copy(machine, kept).us
    gaps = (barriers + 2) * machine.gap_us
    us = pipeline + barriers * barrier_us(machine) + added + gaps
    ops = 2 * world - 1 + 3  # a kernel that sleeps, the sum, the copy of it
    return [composed(machine, us, ops, barriers, waits=2)]


MATMUL_ALL_REDUCE: dict[str, Formula] = {
    "baseline": _library(registered=False),
    "registered": _library(registered=True),
    "torch_symm_mem": _torch_symm_mem,
    "two_shot": _then(_two_shot),
    "push": _push,
    "push_two_shot": _push_two_shot,
    "push_in_place": _push_in_place,
    "push_lamport": _push_lamport,
    "push_two_shot_lamport": _push_two_shot_lamport,
}

MATMUL_REDUCE_SCATTER: dict[str, Formula] = {
    "baseline": _library(registered=False),
    "registered": _library(registered=True),
    "one_shot": _then(_one_shot),
    "overlap": _overlap,
    "push": _push,
    "push_lamport": _push_lamport,
    "torch_fused": _torch_fused,
}
