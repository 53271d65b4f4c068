"""What runs of a kernel show of its instructions: reasons why one of them does not matter there.

A witness watches runs of the unchanged code. Its reasons hold for what ran: these problems and
tactics, and the ways that branches went.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from taxfree_check.executed import shared, vector_memory
from taxfree_check.executed.caches import Scope, View, scope_of
from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.flight import InFlight
from taxfree_check.executed.operands import register, row_of, signs
from taxfree_check.executed.program import Program
from taxfree_check.executed.scalar import left_in_flight
from taxfree_check.executed.wave import Step, Wave

Place = tuple[str, int]  # a program's key, and the index of an instruction
Words = set[int]

_MOST_STORED = 1 << 16  # words; an operation that spans more is no store

# what a wave does to memory, as far as barriers are concerned
_READ, _POLL, _WRITE, _INVALIDATE, _RELEASE = 1, 2, 4, 8, 16
#: what a wave does before a barrier -> what other waves must do behind it only
_CONFLICTS = {
    _READ: _WRITE | _RELEASE,
    _POLL: _READ | _WRITE | _RELEASE,
    _WRITE: _READ | _POLL | _WRITE | _RELEASE,
    _INVALIDATE: _READ,
    _RELEASE: _READ | _POLL | _WRITE | _RELEASE,
}


def _registers(instruction: Instruction) -> frozenset[int]:
    """The registers that an instruction names, or uses without naming them; scalar ones below 0."""
    registers = [register(signs(text)[0]) for text in instruction.operands]
    least = 8 if "mfma" in instruction.opcode else 1
    numbers = {
        row if register.is_vector else ~row
        for register in registers
        if register is not None
        for row in range(register.row, register.row + max(register.words, least))
    }
    return frozenset(numbers)


class _Wait:
    """Operations that a wait has let go of: the registers they load, or that they load none."""

    def __init__(self, key: tuple[Place, str], counter: str, gone: list[InFlight]) -> None:
        self.key, self.counter = key, counter
        self.registers = {
            ~row if operation.is_scalar else row
            for operation in gone
            for row in range(*operation.rows)
        }
        without_result = [operation for operation in gone if operation.rows[0] == operation.rows[1]]
        self.orders = bool(without_result)
        #: the words that stores wrote; None for other operations, such as write-backs
        self.stored: list[range] | None = [
            range(operation.span[0] >> 2, (operation.span[1] + 3) >> 2)
            for operation in without_result
        ]
        if any(len(words) not in range(1, _MOST_STORED) for words in self.stored):
            self.stored = None


class _Phase:
    """What one wave does between two barriers: to memory, and to words of LDS."""

    __slots__ = ("does", "reads", "writes")

    def __init__(self) -> None:
        self.does = 0
        self.reads: Words = set()
        self.writes: Words = set()

    def is_before(self, later: _Phase) -> bool:
        """Whether a later phase of another wave must not begin sooner."""
        if self.writes & (later.reads | later.writes) or self.reads & later.writes:
            return True
        return any(self.does & one and later.does & others for one, others in _CONFLICTS.items())


class _Group:
    """A workgroup: the barriers that it passed, and its waves' phases."""

    def __init__(self) -> None:
        self.barriers: list[Place] = []
        self.phases: dict[Wave, list[_Phase]] = defaultdict(lambda: [_Phase()])

    def needed(self) -> set[Place]:
        """Barriers that keep phases apart; also those that follow themselves."""
        return {
            place
            for number, place in enumerate(self.barriers)
            if place in self.barriers[max(number - 1, 0) : number] or self._separates(number)
        }

    def _separates(self, number: int) -> bool:
        waves = [phases for phases in self.phases.values() if len(phases) > number + 1]
        return any(
            one[number].is_before(other[number + 1])
            for one in waves
            for other in waves
            if one is not other
        )


class Witness:
    """Watches runs of the programs that :meth:`watching` returns."""

    def __init__(self) -> None:
        self._waited: set[tuple[Place, str]] = set()  # with the counter
        self._waits: dict[Wave, list[_Wait]] = defaultdict(list)  # not yet followed by another
        self._ordered: dict[tuple[Place, str], dict[View, Words]] = defaultdict(
            lambda: defaultdict(set)
        )  # words stored before these waits, and before a barrier or an atomic behind them
        self._ways: dict[Place, set[bool]] = defaultdict(set)
        self._groups: dict[Any, _Group] = defaultdict(_Group)
        self._reads: dict[View, Words] = defaultdict(set)
        self._writes: dict[View, Words] = defaultdict(set)
        self._polled: dict[Place, dict[View, Words]] = defaultdict(lambda: defaultdict(set))
        self._written: dict[Place, dict[View, Words]] = defaultdict(lambda: defaultdict(set))
        self._flushed: dict[Place, dict[View, Words]] = defaultdict(lambda: defaultdict(set))
        self._stale: dict[Any, dict[tuple[Place, Scope], Words]] = defaultdict(dict)  # by workgroup
        self._freshened: set[tuple[Place, Scope]] = set()  # what they dropped was read later
        self._changed: set[Place] = set()  # instructions that changed their destinations

    # -- watching ---------------------------------------------------------------------------------

    def watching(self, key: str, program: Program) -> Program:
        """The program, but watched."""
        steps = {}
        for index, instruction in enumerate(program.listing.instructions):
            step = program.step(index)
            if instruction.opcode.startswith("s_cbranch"):
                step = self._branch((key, index), step)
            elif (watch := self._watch((key, index), instruction)) is not None:
                step = _behind(watch, step)
            if instruction.opcode.startswith("ds_") or "mfma" in instruction.opcode:
                step = self._destination((key, index), instruction, step)
            steps[index] = _behind(self._open_waits(instruction), step)
        return program.with_steps(steps)

    def _watch(self, place: Place, instruction: Instruction) -> Callable[[Wave], None] | None:
        name = instruction.opcode
        if name == "s_waitcnt":
            return self._wait(place, instruction)
        if name == "s_barrier":
            return lambda wave: self._barrier(place, wave)
        if name == "buffer_wbl2":
            return lambda wave: self._write_back(place, wave)
        if name == "buffer_inv":
            return lambda wave: self._invalidate(place, wave, scope_of(instruction.modifiers))
        if name.startswith(("global_", "buffer_")):
            return self._access(place, instruction)
        if name.startswith(("ds_read", "ds_write")):
            return self._share(instruction)
        return None

    def _branch(self, place: Place, step: Step) -> Step:
        def watched(wave: Wave) -> int | None:
            goes_to = step(wave)
            self._ways[place].add(goes_to is not None)
            return goes_to

        return watched

    def _destination(self, place: Place, instruction: Instruction, step: Step) -> Step:
        first = row_of(instruction.operands[0])
        rows = slice(first, first + 16)

        def watched(wave: Wave) -> int | None:
            for operation in wave.local_queue:
                operation.perform()
            before = wave.registers[rows].copy(), wave.group.shared.words.copy()
            goes_to = step(wave)
            if wave.local_queue:
                wave.local_queue[-1].perform()
            after = wave.registers[rows], wave.group.shared.words
            if not all(map(np.array_equal, before, after)):
                self._changed.add(place)
            return goes_to

        return watched

    def _wait(self, place: Place, instruction: Instruction) -> Callable[[Wave], None]:
        """Note what it lets go of; a wait that follows covers what nobody has used till then."""
        left = left_in_flight(instruction)

        def watch(wave: Wave) -> None:
            for counter, leave, queue in zip(
                ("vmcnt", "lgkmcnt"), left, (wave.vector_queue, wave.local_queue), strict=True
            ):
                waits = self._waits[wave]
                if leave <= len(queue):
                    waits[:] = [wait for wait in waits if wait.counter != counter]
                gone = queue[: max(len(queue) - leave, 0)]
                if leave and any(operation.is_scalar for operation in queue):
                    gone = queue
                if gone:
                    waits.append(_Wait((place, counter), counter, gone))

        return watch

    def _open_waits(self, instruction: Instruction) -> Callable[[Wave], None]:
        """Note the waits whose results an instruction needs."""
        named = _registers(instruction)
        orders = (
            instruction.opcode == "s_barrier"
            or "atomic" in instruction.opcode
            or "wbl2" in instruction.opcode
        )

        def watch(wave: Wave) -> None:
            waits = self._waits[wave]
            for wait in waits:
                if not wait.registers.isdisjoint(named):
                    self._waited.add(wait.key)
                elif wait.orders and orders:
                    if wait.stored is None:
                        self._waited.add(wait.key)
                    else:
                        for words in wait.stored:
                            self._ordered[wait.key][wave.view].update(words)
            waits[:] = [wait for wait in waits if wait.key not in self._waited]

        return watch

    def _phase(self, wave: Wave) -> _Phase:
        return self._groups[wave.group].phases[wave][-1]

    def _barrier(self, place: Place, wave: Wave) -> None:
        group = self._groups[wave.group]
        phases = group.phases[wave]
        if len(phases) > len(group.barriers):
            group.barriers.append(place)
        phases.append(_Phase())

    def _share(self, instruction: Instruction) -> Callable[[Wave], None]:
        touched, writes = shared.touched(instruction), "write" in instruction.opcode

        def watch(wave: Wave) -> None:
            phase = self._phase(wave)
            (phase.writes if writes else phase.reads).update(touched(wave).tolist())

        return watch

    def _access(self, place: Place, instruction: Instruction) -> Callable[[Wave], None]:
        touched, changes = vector_memory.touched(instruction), "store" in instruction.opcode
        operand = None
        if "atomic" in instruction.opcode:
            changes = True
            if re.search("_(add|or)(_x2)?$", instruction.opcode):  # of 0: a poll
                returns = "sc0" in instruction.modifiers
                place_of = 0 if instruction.opcode.startswith("buffer") else 1 + returns
                operand = row_of(instruction.operands[place_of])
        has_scope = scope_of(instruction.modifiers) > Scope.UNIT or "atomic" in instruction.opcode
        words_of_operand = 2 if instruction.opcode.endswith("_x2") else 1

        def watch(wave: Wave) -> None:
            words, view, writes = set(touched(wave).tolist()), wave.view, changes
            if operand is not None:
                added = wave.registers[operand : operand + words_of_operand, wave.mask]
                writes = bool(added.any())
            self._phase(wave).does |= (
                (_RELEASE if has_scope else _WRITE) if writes else (_POLL if has_scope else _READ)
            )
            (self._writes if writes else self._reads)[view] |= words
            if not has_scope:
                for key, stale in self._stale[wave.group].items():
                    if key not in self._freshened and not stale.isdisjoint(words):
                        self._freshened.add(key)
            if has_scope:
                (self._written if writes else self._polled)[place][view] |= words
            if "lds" in instruction.modifiers or "_lds_" in instruction.opcode:
                self._phase(wave).does |= _WRITE

        return watch

    def _write_back(self, place: Place, wave: Wave) -> None:
        self._phase(wave).does |= _RELEASE
        for operation in wave.vector_queue:  # which it would not overtake
            operation.perform()
        levels, used = wave.view.levels, wave.view.memory.used
        for level in (levels[Scope.CHIPLET], levels[Scope.AGENT]):
            dirty = np.flatnonzero(level.dirty[1][:used]) >> 2
            self._flushed[place][wave.view].update(np.unique(dirty).tolist())

    def _invalidate(self, place: Place, wave: Wave, scope: Scope) -> None:
        self._phase(wave).does |= _INVALIDATE
        levels, used = wave.view.levels, wave.view.memory.used
        below = levels[scope].bytes[:used]
        stale = self._stale[wave.group]
        for key in [key for key in stale if key[1] < scope and key[0] != place]:
            del stale[key]  # what the earlier one has dropped, this one would drop too
        for number in range(scope):
            differs = (levels[number].bytes[:used] != below).nonzero()[0] >> 2
            self._stale[wave.group][place, Scope(number)] = set(np.unique(differs).tolist())

    # -- reasons ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """All runs are over."""
        self._barriers = {place for group in self._groups.values() for place in group.needed()}
        self._groups.clear()
        self._waits.clear()

    def reason(self, key: str, at: int, kind: str) -> str:
        """Why a change cannot matter in these runs; else empty.

        Args:
            key, at: the instruction.
            kind: of the change, as in :func:`tests.check.executed.mutate.changes`.
        """
        place, counter = (key, at), kind.removeprefix("s_waitcnt ")
        if kind.startswith("s_waitcnt"):
            is_needed = (place, counter) in self._waited or self._meets(
                self._ordered[place, counter], self._reads, between_gpus=False
            )
            return "" if is_needed else "a later wait, or none, is soon enough"
        if kind.startswith("branch"):
            way = {"always" in kind}
            return "the branch goes that way in all runs" if self._ways[place] == way else ""
        if kind == "s_barrier":
            return "" if place in self._barriers else "no conflict between waves across it"
        if kind.startswith("buffer_wbl2"):
            is_read = self._meets(self._flushed[place], self._reads, "sc0" in kind)
            return "" if is_read else "nobody reads what it writes back"
        if kind.startswith("buffer_inv"):
            levels = (Scope.AGENT,) if "sc0" in kind else tuple(Scope)[:3]
            is_read = any((place, level) in self._freshened for level in levels)
            return "" if is_read else "nothing that it drops is out of date and read later"
        if kind.startswith(("ds_", "mfma")):
            return "" if place in self._changed else "its destination has that value already"
        if " of a" in kind:
            between_gpus = "atomic" in kind or "sc0" in kind
            meets = self._meets(self._polled[place], self._writes, between_gpus) or any(
                self._meets(self._written[place], others, between_gpus)
                for others in (self._reads, self._writes)
            )
            where = "GPU" if between_gpus else "compute unit"
            return "" if meets else f"no other {where} touches these words"
        return ""

    def _meets(self, own: dict[View, Words], others: dict[View, Words], between_gpus: bool) -> bool:
        return any(
            words & theirs
            for view, words in own.items()
            for other, theirs in others.items()
            if (other.gpu is not view.gpu if between_gpus else other is not view)
        )


def _behind(watch: Callable[[Wave], None], step: Step) -> Step:
    def watched(wave: Wave) -> int | None:
        watch(wave)
        return step(wave)

    return watched
