"""A wave without a kernel, on which single instructions are tried."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np

from taxfree_check.executed.caches import DeviceMemory, GpuMemory
from taxfree_check.executed.decode import instruction
from taxfree_check.executed.flight import OperationTiming
from taxfree_check.executed.lds import SharedMemory
from taxfree_check.executed.program import build_step
from taxfree_check.executed.tactics import Tactics
from taxfree_check.executed.wave import Wave

PROMPT = 1.0
LATE = 0.0


class Machine:
    """One wave on one of two GPUs, or one of several."""

    def __init__(self, promptness: float = PROMPT, view=None, is_fnuz: bool = False) -> None:
        self.is_fnuz = is_fnuz
        self.memory = view.memory if view else DeviceMemory()
        self.view = view or GpuMemory(self.memory).views[0][0]
        group = SimpleNamespace(shared=SharedMemory(1024))
        self.timing = OperationTiming(Random(0), Tactics(promptness))
        self.wave = Wave(SimpleNamespace(), group, self.view, self.timing, 0)

    def set(self, row: int, values, dtype=np.uint32) -> None:
        """Give a vector register its 64 values, or one for all lanes."""
        self.wave.registers.view(dtype)[row] = values

    def get(self, row: int, dtype=np.uint32):
        return self.wave.registers.view(dtype)[row].copy()

    def run(self, *texts: str) -> None:
        with np.errstate(all="ignore"):
            for text in texts:
                build_step(instruction(text, is_fnuz=self.is_fnuz), {})(self.wave)
