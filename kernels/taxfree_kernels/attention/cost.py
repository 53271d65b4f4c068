"""The pieces of attention's variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.cost.machines import Machine
from taxfree_kernels.cost.pieces import CostModel, Piece
from taxfree_kernels.variant import Config

if TYPE_CHECKING:
    from taxfree_kernels.cost.l2 import L2, Traffic


def _attention_us(machine: Machine, problem: Attention) -> float:
    """Both matmuls at the rate of large ones, or memory if that takes longer."""
    cost = problem.cost
    longer = max(cost.flops / machine.flops_per_s, cost.memory_bytes / machine.memory_bytes_per_s)
    return machine.tile_start_us + 1e6 * longer


def _library(machine: Machine, problem: Attention, config: Config) -> list[Piece]:
    return [Piece("consumer", _attention_us(machine, problem), machine.host_op_us)]


def _ours(machine: Machine, problem: Attention, config: Config) -> list[Piece]:
    return [Piece("fused", _attention_us(machine, problem), machine.host_kernel_us)]


_WAVES = 4  # of programs that are simulated; the rest is like them


def _traffic(l2: L2, problem: Attention, config: Config, in_flight: int) -> Traffic | None:
    """Reads of the kernel; None for packed sequences, whose lengths are on the device."""
    from taxfree_kernels.cost.l2 import attention  # loads numba where it is installed

    if problem.packed:
        return None
    steps = -(-problem.length // config["BLOCK_N"])
    return attention(
        l2, config["MAPPING"], heads=problem.q_heads, kv_heads=problem.kv_heads,
        length=problem.length, batch=problem.batch, head_dim=problem.head_dim,
        causal=problem.causal, block_m=config["BLOCK_M"], block_n=config["BLOCK_N"],
        in_flight=in_flight, xcds=config.get("XCDS", 1),
        most_steps=_WAVES * l2.units * in_flight * steps,
    )  # fmt: skip


COST = CostModel(
    vendor_us=_attention_us,
    variants={"baseline": _library, "flash": _ours, "warp_specialized": _ours},
    traffic={"flash": _traffic},
)
