"""Cost formulas of matmul_all_reduce's variants."""

from __future__ import annotations

import dataclasses
import math

from taxfree_kernels.cost.machines import Machine
from taxfree_kernels.cost.pieces import (
    ITEM_BYTES,
    CostModel,
    Formula,
    Piece,
    copy,
    exchange_us,
    launch_us,
    matmul,
    own_collective,
    product_us,
    tiles_us,
)
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.reduction.cost import (
    kept_bytes,
    push,
    push_lamport,
    summed,
    then,
    tiles_that_send,
)
from taxfree_kernels.variant import Config


def _library(*, registered: bool) -> Formula:
    """The library's matmul, then its all-reduce; registered buffers cost a copy out."""

    def formula(machine: Machine, problem: MatmulAllReduce, config: Config) -> list[Piece]:
        pieces = [
            matmul(machine, problem),
            summed(machine, problem, registered=registered, rounds=2),
        ]
        if problem.residual:
            pieces.append(_addition(machine, problem))
        elif registered:
            pieces.append(copy(machine, kept_bytes(problem)))
        return pieces

    return formula


def _addition(machine: Machine, problem: MatmulAllReduce) -> Piece:
    """PyTorch's addition of a residual: two reads, one write."""
    return copy(machine, 1.5 * kept_bytes(problem))


def _two_shot(machine: Machine, problem: MatmulAllReduce, config: Config) -> Piece:
    """Each rank adds a block, and sends the sum to all."""
    world, size = problem.world_size, kept_bytes(problem)
    block = ITEM_BYTES * config["SEND_BLOCK"]
    received, message = size * (world - 1) / world, size / world / config["CHUNKS"]
    shot = exchange_us(machine, received, message, block)
    return own_collective(machine, [shot, shot], 3 * size)


def _push_two_shot(machine: Machine, problem: MatmulAllReduce, config: Config) -> list[Piece]:
    """Tiles and sums are sent when finished; sums of the last AHEAD waves follow the matmul."""
    tma = config.get("TMA", False)
    tiles, wave = tiles_us(machine, problem, config, tma=tma)
    kept, world = kept_bytes(problem), problem.world_size
    shot = 1e6 * kept * (world - 1) / world / machine.link_bytes_per_s
    behind = min(1.0, config.get("AHEAD", 1) * wave / tiles) * shot
    added = 1e6 * 3 * kept / machine.memory_bytes_per_s
    us = max(tiles, wave + 2 * shot - behind) + behind + 2 * machine.signal_us + added
    return [Piece("fused", machine.tile_start_us + us, launch_us(machine, tma=tma))]


def _push_in_place(machine: Machine, problem: MatmulAllReduce, config: Config) -> list[Piece]:
    """Like `push`, but each wave of tiles waits for its peers, and the own part is not stored.

    LL packets take twice the bytes, but half a signal's time: a signal follows the arrival of its
    data, a packet crosses the link only once.
    """
    kept, peers, words = kept_bytes(problem), problem.world_size - 1, 1 + config["LL"]
    return tiles_that_send(
        machine, problem, config,
        sent=words * peers * kept, moved=(words * peers + 1) * kept,
        wave_us=machine.signal_us / words,
    )  # fmt: skip


def _push_two_shot_lamport(
    machine: Machine, problem: MatmulAllReduce, config: Config
) -> list[Piece]:
    """Like `push_lamport`, but first slices and then their sums cross the link."""
    kept, world = kept_bytes(problem), problem.world_size
    shot = kept * (world - 1) / world
    return tiles_that_send(
        machine, problem, config,
        sent=shot, moved=5 * kept, wave_us=2 * machine.round_trip_us,
        behind_us=1e6 * shot / machine.link_bytes_per_s,
    )  # fmt: skip


_TORCH_BLOCKS = 24  # limit in PyTorch's all-reduces over symmetric memory
_TORCH_THREADS = {1: 512, 2: 1024}  # per such block, by shots; each has 16 bytes in flight


def _torch_symm_mem(machine: Machine, problem: MatmulAllReduce, config: Config) -> list[Piece]:
    """The vendor's matmul, then ranks load from each other, between barriers inside a kernel.

    With one shot each rank loads the others' whole sums. With two it loads the block that it adds,
    then the blocks that the others have added.
    """
    world, size, shots = problem.world_size, kept_bytes(problem), config["SHOTS"]
    loaded = (world - 1) * (size if shots == 1 else size / world)
    block = 16 * _TORCH_THREADS[shots] * (world - 1)
    blocks = min(_TORCH_BLOCKS, math.ceil(loaded / block))
    shot = exchange_us(machine, loaded, loaded / blocks, block)
    # The last barrier protects ranks that still load.
    added = own_collective(machine, [*shots * [shot], machine.signal_us], (1 + shots) * size)
    pieces = [
        matmul(machine, problem),
        dataclasses.replace(added, host_us=machine.host_op_us),
    ]
    if problem.residual:
        pieces.append(_addition(machine, problem))
    return pieces


COST = CostModel(
    vendor_us=product_us,
    variants={
        "baseline": _library(registered=False),
        "registered": _library(registered=True),
        "torch_symm_mem": _torch_symm_mem,
        "two_shot": then(_two_shot),
        "push": push,
        "push_two_shot": _push_two_shot,
        "push_two_shot_two_kernel": _push_two_shot,
        "push_in_place": _push_in_place,
        "push_lamport": push_lamport,
        "push_two_shot_lamport": _push_two_shot_lamport,
        "push_two_shot_lamport_specialized": _push_two_shot_lamport,
    },
)
