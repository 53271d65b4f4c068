"""Fabrics of one process, whose ranks are simulated, executed or absent."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import Fabric


class NoGroup(PlanError):
    """A plan calls the collective library on a fabric without a process group."""


class GrouplessFabric(Fabric):
    """One rank of a group that is simulated, executed or absent: this process is alone."""

    @property
    def group(self) -> Any:
        raise NoGroup(f"fabric {self.name} has no process group")

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def synchronize(self) -> None:
        """Nothing runs on a device."""

    def barrier(self) -> None:
        """There is no other process."""

    def close(self) -> None:
        """The memory goes with its tensors."""
