"""Pieces of a call: the vendor's matmul, attention, the collective library, copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from taxfree_kernels.variant import MatmulProblem, Problem
from taxfree_tune.cost.machines import Machine

ITEM_BYTES = 2  # of float16 and bfloat16, which all outputs have
_GEMM_ROWS = 64  # a matrix instruction's rows, to which M is rounded up
_VENDOR_TILE = 128, 64


@dataclass(frozen=True)
class Piece:
    """A kernel, or a call of the collective library, that begins when the one before has ended.

    Args:
        kind: see `taxfree_kernels.variant.Step`.
        us: microseconds.
        host_us: host time to launch it.
        latency_us: the part of a collective's time that does not depend on its size.
        memory_bytes: moved by a copy.
    """

    kind: Literal["collective", "copy", "consumer"]
    us: float
    host_us: float
    latency_us: float = 0.0
    memory_bytes: float = 0.0


#: (machine, problem) -> the pieces of a call, in order
Formula = Callable[..., list[Piece]]


@dataclass(frozen=True)
class CostModel:
    """The formulas of an operation.

    Args:
        variants: the library's -> formula.
        vendor_us: (machine, problem) -> microseconds of the vendor's kernel on what a rank computes
            itself; None where that is not modelled.
    """

    variants: Mapping[str, Formula]
    vendor_us: Callable[..., float] | None = None


def product_us(machine: Machine, problem: MatmulProblem) -> float:
    """The vendor's kernel alone, on a problem's m, n and k."""
    m, n, k = problem.m, problem.n, problem.k
    rows = -(-m // _GEMM_ROWS) * _GEMM_ROWS
    moved = problem.factor_bytes * (m * k + k * n) + problem.scale_bytes + ITEM_BYTES * m * n
    longer = max(2 * rows * n * k / machine.rate_of(problem), moved / machine.memory_bytes_per_s)
    tiles = -(-m // _VENDOR_TILE[0]) * -(-n // _VENDOR_TILE[1])
    is_split = tiles < machine.hardware.compute_units / 2
    return machine.matmul_start_us + 1e6 * longer + is_split * machine.split_us


def attention_us(machine: Machine, problem: Problem) -> float:
    """Attention alone: flops at the rate of large matmuls, or memory if that takes longer."""
    cost = problem.cost
    longer = max(cost.flops / machine.flops_per_s, cost.memory_bytes / machine.memory_bytes_per_s)
    return machine.attention_start_us + 1e6 * longer


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


def small(machine: Machine) -> Piece:
    """A kernel that does little."""
    return Piece("copy", machine.kernel_start_us, machine.host_kernel_us)
