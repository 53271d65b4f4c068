"""Worlds: calls of any kernels on simulated ranks, under many schedules; ``docs/check.md``."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from taxfree_check.checker.checked import Checked, CheckFailed, one_thread
from taxfree_check.checker.conventions import installed
from taxfree_check.checker.coverage import Coverage, Wanted
from taxfree_check.checker.ranks import Ranks, Symmetric, entered
from taxfree_check.checker.report import Reason, Violation
from taxfree_check.checker.simulate import ClockSlots, Schedule, ScheduleOutcome, run_schedule

_HEAP_BYTES = 1 << 24
_FEWEST_CALLS, _MOST_CALLS = 3, 16  # of a run that is not told how many
_WANTED = Wanted(ranks=1, programs=1, calls=1)


@dataclass
class Overrides:
    """The numbers of a command that replace those of the worlds that a function makes.

    Args:
        ranks, seeds, first_seed: in place of a world's own; None leaves them.
        replay: the command that repeats a schedule, but for its seed.
        worlds: those that were made.
    """

    ranks: int | None = None
    seeds: int | None = None
    first_seed: int | None = None
    replay: str = ""
    worlds: list[World] = field(default_factory=list)


overrides: ContextVar[Overrides | None] = ContextVar("taxfree_check", default=None)


class World(Ranks):
    """Ranks with symmetric memory on which kernels are checked.

    Each :meth:`run` repeats the same calls under many schedules, from the same memory. A kernel is
    launched as always, ``kernel[grid](...)``; it is interpreted, whether Triton was told to or not.

    Args:
        ranks: how many there are.
        seeds: schedules of a run. Seeds from `first_seed` on are taken.
        first_seed: the first one; with ``seeds=1``, the schedule that a report names.
        co_resident: all programs of a launch run at the same time, because no grid is larger than
            what the device runs at once. Otherwise schedules also start programs one by one, in
            the order of their ids, as a busy or small device would.
        heap_bytes: of each rank's symmetric heap.
        covered: that each synchronising line has run is part of the check.

    Raises:
        CheckFailed: from :meth:`run`, a schedule has shown a violation; from the end of the
            ``with`` block, a synchronising line never ran.
    """

    def __init__(
        self,
        ranks: int,
        seeds: int = 100,
        *,
        first_seed: int = 0,
        co_resident: bool = False,
        heap_bytes: int = _HEAP_BYTES,
        covered: bool = True,
    ) -> None:
        steering = overrides.get() or Overrides()
        super().__init__(steering.ranks or ranks, heap_bytes)
        steering.worlds.append(self)
        first = first_seed if steering.first_seed is None else steering.first_seed
        self.seeds = range(first, first + (steering.seeds or seeds))
        self._replay_command = steering.replay
        self.co_resident, self._covered = co_resident, covered
        self._sizes = ClockSlots()
        self.checks: list[Checked] = []

    # -- calls ------------------------------------------------------------------------------------

    def run(
        self,
        call: Callable[..., object],
        calls: int | None = None,
        *,
        barrier: bool = False,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Run calls on all ranks under each schedule, until one shows a violation.

        Memory is as it was before each schedule; after the run, it is as the last one left it.

        Args:
            call: what a rank's host does in a call: it launches kernels. It takes the rank, or the
                rank and the number of the call, from 0.
            calls: of each rank, back to back. When None, one more than it takes until calls store
                in symmetric memory only where an earlier one has stored: 3 to 16.
            barrier: a barrier of all hosts, with idle devices, follows each call.
            check: runs after each schedule, and raises AssertionError if memory holds a wrong
                result.

        Raises:
            CheckFailed: a schedule has shown a violation; its text is the report.
        """
        __tracebackhide__ = True  # pytest: the report says more than these lines
        self._name_after(call)
        begin = time.process_time()
        self._save()
        coverage, schedules, accesses = Coverage(), 0, 0
        violation: Violation | None = None
        with one_thread():
            number = calls or self._calls_for(call, barrier)
            for seed in self.seeds:
                outcome = self._run_schedule(seed, call, number, barrier)
                never_reuses = outcome.calls_to_reuse == number
                schedules, accesses = schedules + 1, accesses + outcome.accesses
                coverage.add(outcome.coverage)
                failure = outcome.violation or (None if outcome.has_timed_out else _failure(check))
                if failure is not None:
                    violation = replace(failure, replay=self._replay(seed))
                    if failure.reason is not Reason.ASSUMPTION:  # others may show more
                        break
        self._outside = []
        seconds = time.process_time() - begin
        name = getattr(call, "__name__", "call")
        name = name if name != "<lambda>" else f"run {len(self.checks) + 1}"
        note = ""
        if never_reuses and violation is None:
            note = (
                f"each of {number} calls stored to symmetric memory where none had stored before: "
                "what overwrites data of earlier calls is checked by more calls only"
            )
        checked = Checked(name, schedules, seconds, violation, coverage, _WANTED, accesses, note)
        self.checks.append(checked)
        if violation is not None:
            raise CheckFailed(checked)

    def _calls_for(self, call: Callable[..., object], barrier: bool) -> int:
        """How many calls it takes until memory is stored to again: a ring of slots has wrapped."""
        calls = _FEWEST_CALLS
        while calls < _MOST_CALLS:
            outcome = self._run_schedule(self.seeds[0], call, calls, barrier)
            if outcome.violation is not None:
                return calls
            if outcome.calls_to_reuse < calls:
                return max(_FEWEST_CALLS, outcome.calls_to_reuse + 1)
            calls = min(2 * calls, _MOST_CALLS)
        return calls

    def _run_schedule(
        self, seed: int, call: Callable[..., object], calls: int, barrier: bool
    ) -> ScheduleOutcome:
        of_rank = self.of_rank(call, barrier)

        def setup(schedule: Schedule) -> list[list[Callable[[], object]]]:
            self._restore()
            self._schedule = schedule
            schedule.on_argument = self._keep
            for block in self._blocks:
                schedule.declare(*block)
            return [
                [partial(of_rank, rank, number) for number in range(calls)]
                for rank in range(self.ranks)
            ]

        try:
            return run_schedule(
                setup,
                self.ranks,
                seed,
                self._sizes,
                co_resident=self.co_resident,
                launches_fence=True,
                first_call=0,
            )
        finally:
            self._schedule = None

    def _name_after(self, call: Callable[..., object]) -> None:
        """Name tensors after the variables that a function knows them by."""
        variables = inspect.getclosurevars(inspect.unwrap(call))
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            if isinstance(value, Symmetric) and value.name.startswith("symmetric tensor"):
                value.name = name

    def _replay(self, seed: int) -> str:
        if self._replay_command:
            return f"{self._replay_command} --first-seed {seed} --seeds 1"
        return f"World(ranks={self.ranks}, seeds=1, first_seed={seed})"

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> World:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(entered(self))
        self._stack.enter_context(installed(self))
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        __tracebackhide__ = True
        self._stack.close()
        if kind is None and self._covered and not any(check.violation for check in self.checks):
            together = Coverage()
            for check in self.checks:
                together.add(check.coverage)
            if together.missing(_WANTED):
                first = self.checks[0]
                raise CheckFailed(replace(first, name="all runs", coverage=together))


def _failure(check: Callable[[], object] | None) -> Violation | None:
    """The wrong result that a check finds."""
    if check is None:
        return None
    try:
        check()
    except AssertionError as error:
        lines = str(error).strip().splitlines() or ["the check after the schedule failed"]
        return Violation(Reason.WRONG_RESULT, tuple(lines[:8]))
    return None
