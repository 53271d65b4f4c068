"""A wave: 64 lanes with their registers, and what is in flight between it and the memories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from taxfree_check.executed.caches import View
from taxfree_check.executed.encoding import CLAMPS, EXEC, SCALARS, SCC, STATE_WORDS, VECTORS, Kind
from taxfree_check.executed.flight import InFlight, OperationTiming
from taxfree_check.executed.lanes import ALL, LANES, WORD, Lanes, lanes_of
from taxfree_check.executed.lds import SharedMemory
from taxfree_check.executed.operands import Source

#: what an instruction returns other than the index of the next one, or None for the one behind it
END, AT_BARRIER, AGAIN, ASLEEP = -1, -2, -3, -4

Step = Callable[["Wave"], "int | None"]


class Code(Protocol):
    """What a wave executes: instructions, a function for some, and whether each was executed."""

    rows: Any
    steps: list[Step | None]
    hits: bytearray


class WaveGroup(Protocol):
    """What the waves of a workgroup share."""

    shared: SharedMemory


class Wave:
    """Registers of one wave, and its place in the program.

    Attributes:
        words: all of them, see :mod:`taxfree_check.executed.encoding`.
        registers: of these, uint32 [512, 64]: the vector registers. Row 256 is the first
            accumulator.
        s: likewise, the scalar registers.
        priority: of running, where that decides.
        stalls: the chance that it lets others go first when it waits for memory.
        state: 0, AT_BARRIER, ASLEEP or END.
        executed: instructions so far.
        vector_queue, local_queue: what `vmcnt` and `lgkmcnt` count, oldest first.
    """

    def __init__(
        self, program: Code, group: WaveGroup, view: View, timing: OperationTiming, number: int
    ) -> None:
        self.program, self.group, self.view, self.timing = program, group, view, timing
        self.words = np.full(STATE_WORDS, timing.poison, np.uint32)
        self.registers = self.words[:SCALARS].reshape(VECTORS, 64)
        self.s = self.words[SCALARS:]
        self._pairs = self.s.view(np.uint64)
        self.registers[0] = LANES + 64 * number
        self.s[SCC] = self.s[CLAMPS] = 0
        self.set_exec(ALL)
        self.pc = self._slept_at = 0
        self._awaits_arrivals = False
        self.state = 0
        self.priority = timing.rng.random()
        self.stalls = timing.stalls * timing.rng.choice((0.0, 1.0))
        self.executed = 0
        self.vector_queue: list[InFlight] = []
        self.local_queue: list[InFlight] = []
        self._polled: dict[tuple[Step, int], int] = {}

    def pair(self, number: int) -> int:
        """Two scalar registers, the first of an even number, as one number."""
        return int(self._pairs.item(number // 2))

    def scalar(self, source: Source) -> int:
        """The value of a scalar source, unsigned."""
        kind, index = source[:2]
        if kind == Kind.CONSTANT:
            return index
        return self.pair(index - SCALARS) if kind == Kind.SCALAR_PAIR else self.words.item(index)

    def set_exec(self, bits: int) -> None:
        """Turn lanes on and off."""
        self.s[EXEC], self.s[EXEC + 1] = bits & WORD, bits >> 32

    @property
    def exec(self) -> int:
        """The lanes that are on, as bits."""
        return self.pair(EXEC)

    @property
    def mask(self) -> Lanes:
        """The lanes that are on, as booleans."""
        return lanes_of(self.pair(EXEC))

    @property
    def is_full(self) -> bool:
        """Whether all lanes are on."""
        return self.pair(EXEC) == ALL

    @property
    def has_woken(self) -> bool:
        """Whether it slept, and some memory has changed since; then it can go on."""
        if self.state == ASLEEP and self._slept_at != self._changes(self._awaits_arrivals):
            self.state = 0
            return True
        return False

    def _changes(self, arrivals: bool) -> int:
        memory = self.view.memory
        return memory.arrivals if arrivals else memory.version

    def wake(self) -> None:
        """Let it poll once more, whether or not anything has changed."""
        self._polled.clear()
        if self.state == ASLEEP:
            self.state = 0

    def polls_in_vain(self, step: Step, places: Lanes, *, by_atomics: bool = False) -> bool:
        """Whether it has read there before, by this step, and no memory has changed since.

        It would read the same again, so it may as well sleep. Atomics read where caches do not
        matter: that one forgets lines, as an acquire has it do after each, changes nothing.
        """
        if not places.size:
            return False
        version, key = self._changes(by_atomics), (step, int(places[0]))
        if self._polled.get(key) == version:
            self._slept_at, self._awaits_arrivals = version, by_atomics
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
