"""Results of checks, of variants or of any kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from taxfree_check.checker.coverage import Coverage, Wanted
from taxfree_check.checker.report import Reason, Violation

Verdict = Literal["pass", "violation", "not simulated", "not covered", "nothing to check"]


@dataclass(frozen=True)
class Checked:
    """The result of many schedules of the same calls.

    Args:
        name: of what was checked.
        verdict: "pass" only if nothing was found and everything was covered.
        schedules: number of schedules that were run.
        seconds: processor time that it took.
        violation: the first one, or None.
        coverage: of synchronising lines.
        wanted: how much counts as covered.
        accesses: to memory, of all schedules.
        note: what these calls could not show, or "".
    """

    name: str
    schedules: int
    seconds: float
    violation: Violation | None
    coverage: Coverage = field(repr=False)
    wanted: Wanted = field(default_factory=Wanted)
    accesses: int = 0
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.violation is not None:
            is_refused = self.violation.reason is Reason.UNKNOWN
            return "not simulated" if is_refused else "violation"
        if not self.coverage.has_launches:
            return "nothing to check"
        return "not covered" if self.coverage.missing(self.wanted) else "pass"

    @property
    def speed(self) -> float:
        """Schedules a second of processor time."""
        return self.schedules / max(self.seconds, 1e-9)

    @property
    def rate(self) -> str:
        """How much ran in how much processor time."""
        return (
            f"{self.schedules} schedules with {self.accesses} accesses in {self.seconds:.1f} s of "
            f"processor time, {self.speed:.1f} schedules a second"
        )

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}, {self.rate}"]
        lines += [f"  {self.note}"] if self.note else []
        if self.violation is not None:
            return "\n".join([*lines, str(self.violation)])
        lines += [
            f"  {line.where}  {line.text}: {len(tally.ranks)} ranks, "
            f"{len(tally.programs)} programs, {len(tally.calls)} calls"
            for line, tally in self.coverage.missing(self.wanted)
        ]
        return "\n".join(lines)


class CheckFailed(AssertionError):
    """A check did not pass; the text is the report.

    Attributes:
        checked: the result.
    """

    def __init__(self, checked: Checked) -> None:
        super().__init__(str(checked))
        self.checked = checked


def coverage_rows(checks: Iterable[Checked]) -> list[tuple[str, str, int, int, int]]:
    """Synchronising lines of checks: where, text, ranks, programs, calls."""
    together = Coverage()
    for check in checks:
        together.add(check.coverage)
    return [
        (line.where, line.text, len(tally.ranks), len(tally.programs), len(tally.calls))
        for line, tally in together.by_place()
    ]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the matrices are tiny, more threads only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
