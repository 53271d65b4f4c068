"""Checks the variants of an operation on many schedules, as their plans run them.

In a test::

    from taxfree_check.checker import assert_protocol_holds
    assert_protocol_holds("all_gather_matmul", "push")
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from taxfree_check.checker.checked import Checked, CheckFailed, one_thread
from taxfree_check.checker.coverage import Coverage, Wanted
from taxfree_check.checker.trial import Trial
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
    begin = time.process_time()
    if problems is None:
        problems = [
            problem for world in WORLD_SIZES for problem in operation_shapes(op).tiny(world)
        ]
    served = _served(_drawn_from(op, variant, problems), problems)
    coverage, violation, schedules, accesses = Coverage(), None, 0, 0
    with one_thread():
        for seed in seeds if served else ():
            problem, candidates = served[seed % len(served)]
            try:
                outcome = Trial(op, problem, candidates, seed).run()
            except NoGroup:
                break
            schedules, accesses = schedules + 1, accesses + outcome.accesses
            coverage.add(outcome.coverage)
            if outcome.violation is not None:
                replay = replay_command(op, variant, problem, seed)
                violation = replace(outcome.violation, replay=replay)
                break
    seconds = time.process_time() - begin
    wanted = wanted or (_DRAWN if variant == MIXED else Wanted())
    name = f"{op} {variant}"
    return Checked(name, schedules, seconds, violation, coverage, wanted, accesses)


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


def _drawn_from(op: str, variant: str, problems: Sequence[Problem]) -> list[Variant]:
    known = variants(op)
    if variant == MIXED:
        return [variant for variant in known.values() if _launches_kernels(op, variant, problems)]
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
    return [(problem, found) for problem, found in serving if found]
