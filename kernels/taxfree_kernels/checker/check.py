"""Checks the variants of an operation on many schedules, as their plans run them.

In a test::

    from taxfree_kernels.checker import assert_protocol_holds
    assert_protocol_holds("all_gather_matmul", "push")
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from taxfree_kernels.checker.coverage import Coverage, Wanted
from taxfree_kernels.checker.report import Violation
from taxfree_kernels.checker.trial import Trial
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.base import NoGroup
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.interpreter import is_interpreting
from taxfree_kernels.variant import Problem, Variant, operation_shapes, variants

MIXED = "mixed"  # in place of a variant's name: each call draws one, as they share a pool
SEEDS = 100
WORLD_SIZES = (2, 3)

#: For variants drawn at random, each of which has a check of its own.
_DRAWN = Wanted(programs=1, calls=2)
_HARDWARE = KNOWN["cpu"]

Verdict = Literal["pass", "violation", "not covered", "nothing to check"]


@dataclass(frozen=True)
class Checked:
    """The result of the check of one variant.

    Args:
        verdict: "pass" only if nothing was found and everything was covered.
        schedules: number of schedules that were run.
        seconds: time that it took.
        violation: the first one, or None.
        coverage: of synchronising lines.
        wanted: how much counts as covered.
    """

    op: str
    variant: str
    schedules: int
    seconds: float
    violation: Violation | None
    coverage: Coverage = field(repr=False)
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def verdict(self) -> Verdict:
        if self.violation is not None:
            return "violation"
        if not self.coverage.has_launches:
            return "nothing to check"
        return "not covered" if self.coverage.missing(self.wanted) else "pass"

    def __str__(self) -> str:
        head = f"{self.op} {self.variant}: {self.verdict}, {self.schedules} schedules"
        lines = [f"{head}, {self.seconds:.1f} s"]
        if self.violation is not None:
            return "\n".join([*lines, str(self.violation)])
        lines += [
            f"  {line.where}  {line.text}: {len(each.ranks)} ranks, {len(each.programs)} programs, "
            f"{len(each.calls)} generations"
            for line, each in self.coverage.missing(self.wanted)
        ]
        return "\n".join(lines)


class ProtocolError(AssertionError):
    """A check did not pass; the text is the report."""


def assert_protocol_holds(
    op: str,
    variant: str,
    problems: Sequence[Problem] | None = None,
    seeds: Iterable[int] = range(SEEDS),
    wanted: Wanted | None = None,
) -> None:
    """Check a variant; for tests.

    Raises:
        ProtocolError: there is a violation, or too little was covered.
    """
    checked = check_variant(op, variant, problems, seeds, wanted)
    if checked.verdict != "pass":
        raise ProtocolError(str(checked))


def checkable_variants(op: str) -> list[str]:
    """Names of the variants of `op`, and :data:`MIXED`."""
    return [*variants(op), MIXED]


def check_variant(
    op: str,
    variant: str,
    problems: Sequence[Problem] | None = None,
    seeds: Iterable[int] = range(SEEDS),
    wanted: Wanted | None = None,
) -> Checked:
    """Run schedules of a variant until one shows a violation.

    Args:
        variant: a name, or :data:`MIXED`.
        problems: taken in turns, by seed; the operation's tiny ones when None.
        seeds: one schedule and one draw of configs each; nothing else is random.

    Raises:
        PlanError: there is no such variant, or kernels are not interpreted.
    """
    if not is_interpreting():
        hint = "set TRITON_INTERPRET=1 before Triton is imported"
        raise PlanError("the checker needs interpreted kernels", hint)
    begin = time.monotonic()
    if problems is None:
        problems = [each for world in WORLD_SIZES for each in operation_shapes(op).tiny(world)]
    served = _served(_drawn_from(op, variant, problems), problems)
    coverage, violation, schedules = Coverage(), None, 0
    with _one_thread():
        for seed in seeds if served else ():
            problem, candidates = served[seed % len(served)]
            try:
                outcome = Trial(op, problem, candidates, seed).run()
            except NoGroup:
                break
            schedules += 1
            coverage.add(outcome.coverage)
            if outcome.violation is not None:
                replay = replay_command(op, variant, problem, seed)
                violation = replace(outcome.violation, replay=replay)
                break
    seconds = time.monotonic() - begin
    wanted = wanted or (_DRAWN if variant == MIXED else Wanted())
    return Checked(op, variant, schedules, seconds, violation, coverage, wanted)


def replay_command(op: str, variant: str, problem: Problem, seed: int) -> str:
    """The command that runs one schedule again."""
    fields = asdict(problem)
    world_size = fields.pop("world_size")
    shape = " ".join(
        f"{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in fields.items()
    )
    return (
        f'taxfree check --op {op} --variant {variant} --shapes "{shape}" --gpus {world_size} '
        f"--first-seed {seed} --seeds 1"
    )


def coverage_rows(checks: Iterable[Checked]) -> list[tuple[str, str, int, int, int]]:
    """Synchronising lines of checks: where, text, ranks, programs, generations."""
    together = Coverage()
    for each in checks:
        together.add(each.coverage)
    return [
        (line.where, line.text, len(each.ranks), len(each.programs), len(each.calls))
        for line, each in together.by_place()
    ]


def _drawn_from(op: str, variant: str, problems: Sequence[Problem]) -> list[Variant]:
    known = variants(op)
    if variant == MIXED:
        return [each for each in known.values() if _launches_kernels(op, each, problems)]
    if variant not in known:
        names = ", ".join(checkable_variants(op))
        raise PlanError(f"no variant {variant!r} of {op}", f"one of: {names}")
    return [known[variant]]


def _launches_kernels(op: str, variant: Variant, problems: Sequence[Problem]) -> bool:
    """Whether a variant can be simulated, which the collective library cannot."""
    served = _served([variant], problems)
    if not served:
        return False
    try:
        Trial(op, served[0][0], [variant], seed=0).plan()
    except NoGroup:
        return False
    return True


def _served(
    candidates: Sequence[Variant], problems: Sequence[Problem]
) -> list[tuple[Any, list[Variant]]]:
    """Problems that any candidate serves, with those candidates."""
    serving = [
        (problem, [each for each in candidates if not each.unsupported_reason(problem, _HARDWARE)])
        for problem in problems
    ]
    return [(problem, found) for problem, found in serving if found]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: the matrices are tiny, more threads only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
