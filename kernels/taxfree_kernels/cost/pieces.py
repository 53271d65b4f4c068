"""Pieces of a call: kernels of ours, the vendor's matmul, the collective library, copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from taxfree_kernels.cost.machines import Machine
from taxfree_kernels.problem import MatmulProblem
from taxfree_kernels.variant import Config

ITEM_BYTES = 2  # of float16 and bfloat16, which all problems have
_GEMM_ROWS = 64  # a matrix instruction's rows, to which M is rounded up
_VENDOR_TILE = 128, 64


@dataclass(frozen=True)
class Piece:
    """A part of a call that begins when the part before it has ended.

    Args:
        kind: see `taxfree_kernels.variant.Step`.
        us: microseconds.
        host_us: host time to launch it.
        latency_us: the part of a collective's time that does not depend on its size.
        memory_bytes: moved by a copy.
        kernels: number of kernels launched.
    """

    kind: Literal["collective", "copy", "consumer", "fused"]
    us: float
    host_us: float
    latency_us: float = 0.0
    memory_bytes: float = 0.0
    kernels: int = 1


#: (machine, problem, config) -> the pieces of a call, in order
Formula = Callable[..., list[Piece]]


@dataclass(frozen=True)
class CostModel:
    """The formulas of an operation.

    Args:
        variants: name -> formula.
        vendor_us: (machine, problem) -> microseconds of the vendor's kernel on what a rank computes
            itself; None where that is not modelled.
    """

    variants: Mapping[str, Formula]
    vendor_us: Callable[..., float] | None = None


def matmul_us(machine: Machine, m: int, n: int, k: int) -> float:
    """The vendor's kernel alone."""
    rows = -(-m // _GEMM_ROWS) * _GEMM_ROWS
    moved = ITEM_BYTES * (m * k + k * n + m * n)
    longer = max(2 * rows * n * k / machine.flops_per_s, moved / machine.memory_bytes_per_s)
    tiles = -(-m // _VENDOR_TILE[0]) * -(-n // _VENDOR_TILE[1])
    is_split = tiles < machine.hardware.compute_units / 2
    return machine.matmul_start_us + 1e6 * longer + is_split * machine.split_us


def product_us(machine: Machine, problem: MatmulProblem) -> float:
    """The vendor's kernel alone, on a problem's m, n and k."""
    return matmul_us(machine, problem.m, problem.n, problem.k)


def exchange_us(
    machine: Machine, received: float, message: float, block: int, rounds: int = 1
) -> float:
    """Time of senders that each store one message after another at a peer, and signal.

    Args:
        received: bytes that a rank receives from all peers.
        message: bytes per message.
        block: bytes that a sender has in flight at a time.
        rounds: messages per sender.
    """
    link = received / machine.link_bytes_per_s
    # The last block's round trip is part of the signal, which waits for it.
    sender = max(0.0, rounds * message / block - 1) * machine.round_trip_us * 1e-6
    return machine.signal_us + 1e6 * max(link, sender)


def tiles_us(
    machine: Machine, problem: MatmulProblem, config: Config, *, tma: bool
) -> tuple[float, float]:
    """All tiles of a matmul, and one wave of them."""
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    depth = problem.k / config["SPLIT_K"]
    programs = -(-problem.m // block_m) * -(-problem.n // block_n) * config["SPLIT_K"]
    units = machine.hardware.compute_units
    waves = math.ceil(programs / units)
    flops = 2 * block_m * block_n * depth / (machine.flops_per_s / units)
    rate = machine.tma_bytes_per_s if tma else machine.loads_bytes_per_s
    loads = ITEM_BYTES * (block_m + block_n) * depth / rate
    memory = problem.cost.memory_bytes / machine.memory_bytes_per_s / waves
    wave = 1e6 * max(flops, loads, memory)
    return waves * wave, wave


def launch_us(machine: Machine, *, tma: bool) -> float:
    """Host time to launch a kernel of ours."""
    return machine.host_kernel_us + tma * machine.host_descriptors_us


def matmul(machine: Machine, problem: MatmulProblem) -> Piece:
    """The vendor's."""
    return Piece("consumer", product_us(machine, problem), machine.host_op_us)


def collective(
    machine: Machine, received: float, peers: int, *, registered: bool, rounds: int = 0
) -> Piece:
    """The collective library's.

    Args:
        received: bytes that a rank receives.
        registered: whether its buffers are registered.
        rounds: of its ring, for sums: one for a reduce-scatter, two for an all-reduce; 0 for a
            gather.
    """
    latency = machine.registered_latency_us
    if not registered:
        latency = machine.latency_us + max(1, rounds) * peers * machine.step_us
    if rounds:
        pace = 1 / machine.link_bytes_per_s + 1 / (max(1, peers) * machine.summed_bytes_per_s)
    elif registered:
        pace = 1 / machine.link_bytes_per_s
    else:
        pace = 1 / machine.collective_bytes_per_s
    us = latency + 1e6 * received * pace
    return Piece("collective", us, machine.host_collective_us, latency_us=latency)


def copy(machine: Machine, size: float, *, views: bool = False) -> Piece:
    """A PyTorch copy; creating a view of the source costs the host as much as the copy."""
    us = machine.kernel_start_us + 2e6 * size / machine.copy_bytes_per_s
    return Piece("copy", us, (1 + views) * machine.host_op_us, memory_bytes=2 * size)


def own_collective(machine: Machine, exchanges: list[float], memory_bytes: float) -> Piece:
    """A kernel of ours between library kernels: exchanges one after another, and local traffic."""
    local = 1e6 * memory_bytes / machine.memory_bytes_per_s
    us = machine.kernel_start_us + sum(exchanges) + local
    latency = machine.kernel_start_us + len(exchanges) * machine.signal_us
    return Piece("collective", us, machine.host_kernel_us, latency_us=latency)


def small(machine: Machine, memory_bytes: float = 0.0) -> Piece:
    """A kernel that does little."""
    us = machine.kernel_start_us + 1e6 * memory_bytes / machine.memory_bytes_per_s
    return Piece("copy", us, machine.host_kernel_us, memory_bytes=memory_bytes)


def barrier_us(machine: Machine) -> float:
    """A kernel in which each rank signals all others, and waits for them."""
    return machine.kernel_start_us + machine.signal_us


def composed(machine: Machine, us: float, ops: int, barriers: int, waits: int) -> Piece:
    """A PyTorch op that is composed in Python of `ops` others, barriers and stream waits.

    A barrier, which is not an op, takes the host half as long as one.
    """
    host = (
        machine.host_composed_us
        + (ops + barriers / 2) * machine.host_op_us
        + waits * machine.host_stream_us
    )
    return Piece("fused", us, host, kernels=ops + barriers)


def fetched_shards_us(machine: Machine, world: int, shard_bytes: float, matmul_us: float) -> float:
    """A matmul for each rank's shard, while an engine copies the next shard from its rank."""
    copied = machine.engine_us + 1e6 * shard_bytes / machine.link_bytes_per_s
    return max(world * matmul_us, (world - 1) * copied + matmul_us)


def announced_copy_us(machine: Machine) -> float:
    """Time of a copy by an engine and the kernel that signals it, without that of the bytes."""
    return machine.engine_us + machine.gap_us + barrier_us(machine) + machine.gap_us
