"""Checks the variants of an operation, as their plans run them, on many schedules.

In a test::

    from taxfree_kernels.checker import assert_protocol_holds
    assert_protocol_holds("all_gather_matmul", "push")
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import Any, Literal

import torch

from taxfree_kernels.checker import coverage as covered
from taxfree_kernels.checker.coverage import Coverage, Wanted
from taxfree_kernels.checker.report import Reason, Violation
from taxfree_kernels.checker.simulate import (
    Call,
    Outcome,
    Setup,
    SimulatedFabric,
    Simulation,
    UsesCollectives,
)
from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.interpreter import is_interpreting
from taxfree_kernels.variant import (
    Plan,
    Problem,
    Variant,
    operation,
    operation_shapes,
    variants,
)

MIXED = "mixed"  # in place of a variant's name: each call draws one, as they share a pool
SEEDS = 100
WORLD_SIZES = (2, 3)

#: Of variants drawn by chance, each of which has a check of its own.
_DRAWN = Wanted(programs=1, calls=2)
_TOLERANCE = 0.02  # of the largest value; a wrong payload is off by more, or NaN
# Generations go on beyond 32 bits; both sides of each edge are crossed within a few calls.
_FIRST_GENERATIONS = (1, 2, 2**31 - 2, 2**32 - 2)
_BACKENDS = ("cuda", "hip")  # waits differ
_HARDWARE = KNOWN["cpu"]
_TAKING_TURNS = 3  # of all variants that a check draws from, so that each has several calls
_CHIPLETS = (1, 2, 3)  # a meta-parameter of AMD's devices, which decides who waits for which tile

Verdict = Literal["pass", "violation", "not covered", "nothing to check"]


@dataclass(frozen=True)
class Checked:
    """What the check of one variant showed.

    Args:
        verdict: "pass" only if nothing was found and everything was covered.
        schedules: how many were run.
        seconds: that it took.
        violation: the first one, or None.
        coverage: of synchronising lines.
        wanted: what counts as covered.
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
        if not self.coverage.lines:
            return "nothing to check"
        return "not covered" if self.coverage.missing(self.wanted) else "pass"

    def __str__(self) -> str:
        head = f"{self.op} {self.variant}: {self.verdict}, {self.schedules} schedules"
        lines = [f"{head}, {self.seconds:.1f} s"]
        if self.violation is not None:
            return "\n".join([*lines, str(self.violation)])
        for line, executed in self.coverage.missing(self.wanted):
            lines.append(
                f"  {line.where}  {line.text}: {len(executed.ranks)} ranks, "
                f"{len(executed.programs)} programs, {len(executed.calls)} generations"
            )
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
    """Names of the variants of `op`, and of what draws among them."""
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
        seeds: each one schedule, one draw of configs, and nothing else that is random.

    Raises:
        PlanError: there is no such variant, or kernels are not interpreted.
    """
    if not is_interpreting():
        hint = "set TRITON_INTERPRET=1 before Triton is imported"
        raise PlanError("the checker needs kernels that are interpreted", hint)
    begin = time.monotonic()
    if problems is None:
        problems = [each for world in WORLD_SIZES for each in operation_shapes(op).tiny(world)]
    served = _served(_drawn_from(op, variant, problems), problems)
    coverage, violation, schedules = Coverage(), None, 0
    with _one_thread():
        for seed in seeds if served else ():
            problem, candidates = served[seed % len(served)]
            try:
                outcome = _Trial(op, problem, candidates, seed).run()
            except UsesCollectives:
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
    return covered.table(together)


def _drawn_from(op: str, variant: str, problems: Sequence[Problem]) -> list[Variant]:
    known = variants(op)
    if variant == MIXED:
        return [each for each in known.values() if _launches_kernels(op, each, problems)]
    if variant not in known:
        names = ", ".join(checkable_variants(op))
        raise PlanError(f"no variant {variant!r} of {op}", f"one of: {names}")
    return [known[variant]]


def _launches_kernels(op: str, variant: Variant, problems: Sequence[Problem]) -> bool:
    """Whether a variant can be simulated: one that needs the collective library cannot."""
    served = _served([variant], problems)
    if not served:
        return False
    try:
        _Trial(op, served[0][0], [variant], seed=0).plan()
    except UsesCollectives:
        return False
    return True


def _served(
    candidates: Sequence[Variant], problems: Sequence[Problem]
) -> list[tuple[Any, list[Variant]]]:
    """Problems that a candidate serves, with those that do."""
    serving = [
        (problem, [each for each in candidates if not each.unsupported_reason(problem, _HARDWARE)])
        for problem in problems
    ]
    return [(problem, found) for problem, found in serving if found]


def _draw_config(variant: Variant, problem: Problem, rng: Random) -> dict[str, Any]:
    """A config that the variant does not refuse; its default when few are accepted."""
    space = variant.space(problem, _HARDWARE)
    for _ in range(100):
        config = {knob: rng.choice(values) for knob, values in space.items()}
        if variant.prune_reason(problem, _HARDWARE, config) is None:
            return config
    return variant.seed_configs(problem, _HARDWARE)[0]


class _Trial:
    """One schedule of one problem: plans, calls with changing inputs, outputs compared."""

    def __init__(self, op: str, problem: Problem, candidates: Sequence[Variant], seed: int) -> None:
        self._op, self._problem, self._seed = operation(op), problem, seed
        rng = Random(seed)
        self._first_generation = rng.choice(_FIRST_GENERATIONS)
        self._backend = rng.choice(_BACKENDS)
        others = Random(f"calls {seed}")
        few = others.sample(candidates, min(len(candidates), _TAKING_TURNS))
        # of several, each has as many calls as it has slots, and calls of others between
        calls = 1 + max(variant.slots for variant in few) * min(len(few), 2)
        self._variants = [others.choice(few) for _ in range(calls)]
        self._configs = {
            each: _draw_config(each, problem, rng) | {"XCDS": others.choice(_CHIPLETS)}
            for each in dict.fromkeys(self._variants)
        }
        self._outputs: list[tuple[int, int, torch.Tensor]] = []

    def plan(self) -> None:
        """Make the plans, and no calls."""
        self._simulate(lambda fabric: self._setup(fabric)[:0])

    def run(self) -> Outcome:
        """Run the schedule and compare all outputs."""
        outcome = self._simulate(self._setup)
        if outcome.violation is not None:
            return outcome
        return replace(outcome, violation=self._wrong_result())

    def _simulate(self, setup: Setup) -> Outcome:
        simulation = Simulation(self._problem.world_size, self._problem.slot_bytes)
        return simulation.run(
            setup,
            self._seed,
            first_generation=self._first_generation,
            backend=self._backend,
        )

    def _setup(self, fabric: SimulatedFabric) -> list[Call]:
        if fabric.rank == 0:
            self._outputs = []
        plans = {
            variant: variant.plan(self._problem, fabric, config)
            for variant, config in self._configs.items()
        }
        return [
            partial(self._call, fabric, plans[variant], number)
            for number, variant in enumerate(self._variants)
        ]

    def _call(self, fabric: SimulatedFabric, plan: Plan, number: int) -> None:
        output = self._op.empty_output(self._problem, fabric.device)
        self._outputs.append((fabric.rank, number, output))
        plan(*_inputs(self._op.name, self._problem, fabric.rank, number), output)

    def _wrong_result(self) -> Violation | None:
        for rank, number, output in self._outputs:
            wanted = _reference(self._op.name, self._problem, rank, number)
            error = (output.double() - wanted).abs().max()
            if not error <= _TOLERANCE * wanted.abs().max().clamp(min=1.0):
                generation = self._first_generation + number
                place = f"rank {rank}, generation {generation}: off by {error:.3g} at most"
                return Violation(Reason.WRONG_RESULT, (place, str(self._problem)))
        return None


@cache
def _inputs(op: str, problem: Problem, rank: int, number: int) -> tuple[torch.Tensor | None, ...]:
    return operation(op).make_inputs(problem, rank, number, torch.device("cpu"), integers=True)


@cache
def _reference(op: str, problem: Problem, rank: int, number: int) -> torch.Tensor:
    return operation(op).reference(problem, rank, number, torch.device("cpu"), integers=True)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices here are tiny: more threads only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
