"""The pieces of attention's variants."""

from __future__ import annotations

from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.variant import Config
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost.pieces import CostModel, Piece


def _attention_us(machine: Machine, problem: Attention) -> float:
    """Both matmuls at the rate of large ones, or memory if that takes longer."""
    cost = problem.cost
    longer = max(cost.flops / machine.flops_per_s, cost.memory_bytes / machine.memory_bytes_per_s)
    return machine.attention_start_us + 1e6 * longer


def _library(machine: Machine, problem: Attention, config: Config) -> list[Piece]:
    return [Piece("consumer", _attention_us(machine, problem), machine.host_op_us)]


def _ours(machine: Machine, problem: Attention, config: Config) -> list[Piece]:
    return [Piece("fused", _attention_us(machine, problem), machine.host_kernel_us)]


COST = CostModel(
    vendor_us=_attention_us,
    variants={"baseline": _library, "flash": _ours, "warp_specialized": _ours},
)
