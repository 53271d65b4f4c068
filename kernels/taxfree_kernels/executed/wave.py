"""A wave: 64 lanes with their registers, and what is in flight between it and the memories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from taxfree_kernels.executed.caches import View
from taxfree_kernels.executed.flight import InFlight, Timing
from taxfree_kernels.executed.lanes import ALL, LANES, WORD, Lanes, lanes_of
from taxfree_kernels.executed.lds import Shared

#: numbers of special scalar registers
VCC, M0, EXEC = 106, 124, 126

#: what an instruction returns other than the index of the next one, or None for the one behind it
END, AT_BARRIER, AGAIN, ASLEEP = -1, -2, -3, -4

Step = Callable[["Wave"], "int | None"]


class Code(Protocol):
    """What a wave executes: a function for each instruction, and whether it was executed."""

    steps: list[Step]
    hits: bytearray


class Group(Protocol):
    """What the waves of a workgroup share."""

    shared: Shared


class Wave:
    """Registers of one wave, and its place in the program.

    Attributes:
        u, i, f: rows of 64 lanes: the vector registers as uint32, int32 and float32. Row 256 is the
            first accumulator.
        s: scalar registers, as unsigned integers of 32 bits.
        scc: the scalar condition code.
        exec, mask, is_full: the lanes that are on, as bits and as booleans; whether all are.
        priority: of running, where that decides.
        stalls: the chance that it lets others go first when it waits for memory.
        state: 0, AT_BARRIER, ASLEEP or END.
        executed: instructions so far.
        vector_queue, local_queue: what `vmcnt` and `lgkmcnt` count, oldest first.
    """

    def __init__(
        self, program: Code, group: Group, view: View, timing: Timing, number: int
    ) -> None:
        self.program, self.group, self.view, self.timing = program, group, view, timing
        registers = np.full((512, 64), timing.poison, np.uint32)
        self.registers = registers
        self.u, self.i, self.f = (
            list(registers.view(kind)) for kind in (np.uint32, np.int32, np.float32)
        )
        self.u[0][:] = LANES + 64 * number
        self.s = [timing.poison] * 128
        self.scc = 0
        self.pc = self._slept_at = 0
        self.state = 0
        self.priority = timing.rng.random()
        self.stalls = timing.stalls * timing.rng.choice((0.0, 1.0))
        self.executed = 0
        self.vector_queue: list[InFlight] = []
        self.local_queue: list[InFlight] = []
        self._polled: dict[tuple[Step, int], int] = {}
        self.set_exec(ALL)

    def set_exec(self, bits: int) -> None:
        """Turn lanes on and off."""
        self.s[EXEC], self.s[EXEC + 1] = bits & WORD, bits >> 32
        self.exec, self.mask, self.is_full = bits, lanes_of(bits), bits == ALL

    def run(self, budget: int) -> int:
        """Execute up to `budget` instructions; returns what stopped it, or 0."""
        steps, hits, pc, left = self.program.steps, self.program.hits, self.pc, budget
        try:
            while left:
                hits[pc] = 1
                left -= 1
                goes_to = steps[pc](self)
                if goes_to is None:
                    pc += 1
                elif goes_to >= 0:
                    pc = goes_to
                else:
                    pc += goes_to > AGAIN
                    return goes_to
        finally:
            self.pc = pc
            self.executed += budget - left
        return 0

    @property
    def has_woken(self) -> bool:
        """Whether it slept, and some memory has changed since; then it can go on."""
        if self.state == ASLEEP and self._slept_at != self.view.memory.version:
            self.state = 0
            return True
        return False

    def wake(self) -> None:
        """Let it poll once more, whether or not anything has changed."""
        self._polled.clear()
        if self.state == ASLEEP:
            self.state = 0

    def polls_in_vain(self, step: Step, places: Lanes) -> bool:
        """Whether it has read there before, by this step, and no memory has changed since.

        It would read the same again, so it may as well sleep.
        """
        if not places.size:
            return False
        version, key = self.view.memory.version, (step, int(places[0]))
        if self._polled.get(key) == version:
            self._slept_at = version
            return True
        self._polled[key] = version
        return False

    def poison(self, first: int, count: int) -> None:
        """Spoil destinations of a load until it takes effect."""
        self.put(first, count, self.timing.poison)

    def put(self, first: int, count: int, values: Any) -> None:
        """Give registers values [count, 64], in the lanes that are on."""
        if self.is_full:
            self.registers[first : first + count] = values
        else:
            np.copyto(self.registers[first : first + count], values, where=self.mask)
