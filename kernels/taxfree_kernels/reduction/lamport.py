"""Shared by the variants that send tiles of a partial sum as Lamport words."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.layout import BARE_BYTES
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.problem import PartialSum
from taxfree_kernels.reduction import spaces
from taxfree_kernels.reduction.fused import FusedPlan, FusedVariant
from taxfree_kernels.variant import Config, Space


class LamportPlan(FusedPlan):
    """A plan whose inbox holds Lamport words."""

    def inbox(self, fabric: Fabric, config: Config, elements: int) -> tuple[torch.Tensor, int]:
        return fabric.pool.lamport_slots(elements)


class LamportVariant(FusedVariant):
    """Programs send the tiles that they have computed, and wait for what belongs to them."""

    slots = 3

    @abstractmethod
    def words(self, problem: PartialSum, config: Config) -> int:
        """Lamport words of a slot that a call uses."""

    def unsupported_reason(self, problem: PartialSum, hardware: Hardware) -> str | None:
        reason = super().unsupported_reason(problem, hardware)
        if reason is None and not self.seed_configs(problem, hardware):
            return "its words fit no slot, or no program"
        return reason

    def space(self, problem: PartialSum, hardware: Hardware) -> Space:
        return {**spaces.tile_space(problem, hardware), "WIRE": problem.wires[:1]}

    def seed_configs(self, problem: PartialSum, hardware: Hardware) -> list[dict[str, Any]]:
        configs = [
            self.with_room(problem, hardware, config)
            for config in super().seed_configs(problem, hardware)
        ]
        return [each for each in configs if not self.prune_reason(problem, hardware, each)]

    def with_room(self, problem: PartialSum, hardware: Hardware, config: Config) -> dict[str, Any]:
        """A first config, with what the variant needs beside tiles."""
        return dict(config)

    def prune_reason(self, problem: PartialSum, hardware: Hardware, config: Config) -> str | None:
        if 4 * self.words(problem, config) > BARE_BYTES:
            return "more words than a slot holds"
        return super().prune_reason(problem, hardware, config)
