"""Launches of kernels in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from taxfree_kernels.checker.clocks import Actor
from taxfree_kernels.launch import Kernel


@dataclass(eq=False)
class Launch:
    """One launch.

    Args:
        kernel, arguments: the kernel, and the arguments of each program.
        host: the actor that launches it.
        weight: of its programs, for the scheduler.
        before: the launch before it, if this one may start before that has ended.
    """

    kernel: Kernel
    arguments: dict[str, Any]
    host: Actor
    weight: int
    before: Launch | None = None
    begun: np.ndarray = field(init=False)  # clocks before it
    ended: np.ndarray = field(init=False)  # clocks after the programs that have ended
    next_program: int = 0
    running: int = 0
    ready: int = 0  # programs that have called gdc_launch_dependents

    def __post_init__(self) -> None:
        self.begun, self.ended = self.host.clocks.copy(), self.host.clocks.copy()

    @property
    def name(self) -> str:
        return str(self.kernel.function.__name__)

    @property
    def first_slot(self) -> int:
        """First slot of its programs: beside the slots of a launch that may still be running."""
        if self.before is None or self.before.first_slot >= self.kernel.grid:
            return 0
        return self.before.end_slot

    @property
    def end_slot(self) -> int:
        return self.first_slot + self.kernel.grid

    @property
    def has_started(self) -> bool:
        """Whether all of its programs have."""
        return self.next_program == self.kernel.grid

    @property
    def has_ended(self) -> bool:
        return self.has_started and self.running == 0

    @property
    def has_launched_dependents(self) -> bool:
        """Whether the next launch may begin: all programs let it, or have ended."""
        return self.ready == self.kernel.grid or self.has_ended
