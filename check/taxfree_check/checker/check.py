"""Checks the variants of an operation on many schedules, as their plans run them.

In a test::

    from taxfree_check.checker import assert_protocol_holds
    assert_protocol_holds("all_gather_matmul", "push")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

from taxfree_check.checker.checked import Checked, CheckFailed, one_thread
from taxfree_check.checker.coverage import Coverage, Wanted
from taxfree_check.checker.simulate import ScheduleOutcome
from taxfree_check.checker.trial import Trial
from taxfree_check.groupless import NoGroup
from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.interpreter import is_interpreting
from taxfree_kernels.variant import Problem, Variant, operation_shapes, variants

MIXED = "mixed"  # in place of a variant's name: each call draws one, as they share a pool
#: no operation, but a kernel of a whole step, which is checked by its twin in plain Triton
STEP, TWIN = "decode_step", "twin"
SEEDS = 100
WORLD_SIZES = (2, 3)

# each of those that are drawn has a check of its own
_WANTED = {MIXED: Wanted(programs=1, calls=2)}
_HARDWARE = KNOWN["cpu"]


class _Schedule(Protocol):
    """A schedule with all that is drawn for it."""

    def run(self) -> ScheduleOutcome: ...


#: a problem, and the schedule of a seed
_Schedules = Sequence[tuple[Any, Callable[[int], _Schedule]]]


def assert_protocol_holds(
    op: str,
    variant: str,
    problems: Sequence[Problem] | None = None,
    seeds: Iterable[int] = range(SEEDS),
    wanted: Wanted | None = None,
) -> None:
    """Check a variant; for tests.

    Raises:
        CheckFailed: there is a violation, or too little was covered.
    """
    checked = check_variant(op, variant, problems, seeds, wanted)
    if checked.verdict != "pass":
        raise CheckFailed(checked)


def checkable_variants(op: str) -> list[str]:
    """Names of the variants of `op`, and :data:`MIXED`; :data:`TWIN` of :data:`STEP`."""
    return [TWIN] if op == STEP else [*variants(op), MIXED]


def tiny_problems(op: str, world_size: int) -> Sequence[Any]:
    """Problems that together execute every synchronising line of `op`, or of :data:`STEP`."""
    if op == STEP:
        from taxfree_check.checker import steps  # it loads the models of taxfree

        return [*steps.tiny(world_size), *steps.scaled(world_size)]
    return operation_shapes(op).tiny(world_size)


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
    begin = time.process_time()
    if problems is None:
        problems = [problem for world in WORLD_SIZES for problem in tiny_problems(op, world)]
    served = _schedules(op, variant, problems)
    coverage, violation, schedules, accesses = Coverage(), None, 0, 0
    with one_thread():
        for seed in seeds if served else ():
            problem, schedule_of = served[seed % len(served)]
            try:
                outcome = schedule_of(seed).run()
            except NoGroup:
                break
            schedules, accesses = schedules + 1, accesses + outcome.accesses
            coverage.add(outcome.coverage)
            if outcome.violation is not None:
                selected = selection(op, variant, problem)
                replay = f"taxfree check {selected} --first-seed {seed} --seeds 1"
                violation = replace(outcome.violation, replay=replay)
                break
    seconds = time.process_time() - begin
    wanted = wanted or _WANTED.get(variant, Wanted())
    name = f"{op} {variant}"
    return Checked(name, schedules, seconds, violation, coverage, wanted, accesses)


def selection(op: str, variant: str, problem: Problem) -> str:
    """The options of `taxfree check` that select a variant and a problem."""
    fields = asdict(problem)
    world_size = fields.pop("world_size")
    if op == STEP:  # whose seeds take the problems of a number of ranks in turns
        return f"--op {op} --gpus {world_size}"
    shape = " ".join(
        f"{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in fields.items()
    )
    return f'--op {op} --variant {variant} --shapes "{shape}" --gpus {world_size}'


def _schedules(op: str, variant: str, problems: Sequence[Any]) -> _Schedules:
    if op == STEP:
        from taxfree_check.checker import steps

        _require(op, variant)
        return [(problem, partial(steps.StepTrial, problem)) for problem in problems]
    return [
        (problem, partial(Trial, op, problem, candidates))
        for problem, candidates in _served(_drawn_from(op, variant, problems), problems)
    ]


def _require(op: str, variant: str) -> None:
    names = checkable_variants(op)
    if variant not in names:
        raise PlanError(f"no variant {variant!r} of {op}", f"one of: {', '.join(names)}")


def _drawn_from(op: str, variant: str, problems: Sequence[Problem]) -> list[Variant]:
    by_name = variants(op)
    if variant == MIXED:
        return [variant for variant in by_name.values() if _launches_kernels(op, variant, problems)]
    _require(op, variant)
    return [by_name[variant]]


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
        (
            problem,
            [
                candidate
                for candidate in candidates
                if not candidate.unsupported_reason(problem, _HARDWARE)
            ],
        )
        for problem in problems
    ]
    return [(problem, candidates) for problem, candidates in serving if candidates]
