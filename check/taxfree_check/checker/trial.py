"""One schedule of one problem, with all that is drawn for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import torch

from taxfree_check.checker.fabric import Setup, SimulatedFabric, Simulation
from taxfree_check.checker.report import Reason, Violation
from taxfree_check.checker.simulate import Call, ScheduleOutcome
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import Problem, Ready, Variant, operation

_TOLERANCE = 0.02  # of the largest value; a wrong payload is off by more, or NaN
# Generations go on beyond 32 bits; both sides of each edge are crossed within a few calls.
FIRST_GENERATIONS = (1, 2, 2**31 - 2, 2**32 - 2)
_BACKENDS = ("cuda", "hip")  # waits differ
_HARDWARE = KNOWN["cpu"]
_TAKING_TURNS = 3  # of all variants that a check draws from, so that each has several calls
_CHIPLETS = (1, 2, 3)  # a meta-parameter of AMD's devices, which decides who waits for which tile
_PROGRAMS = (1, 2, 3)  # of a cooperative launch, of which an interpreted rank has but one


class Trial:
    """One schedule of one problem: plans, calls with changing inputs, outputs compared."""

    def __init__(self, op: str, problem: Problem, candidates: Sequence[Variant], seed: int) -> None:
        self._op, self._problem, self._seed = operation(op), problem, seed
        rng = Random(seed)
        self._first_generation = rng.choice(FIRST_GENERATIONS)
        self._backend = rng.choice(_BACKENDS)
        others = Random(f"calls {seed}")
        few = others.sample(candidates, min(len(candidates), _TAKING_TURNS))
        # of several variants, each is called as often as it has slots, with others in between
        calls = 1 + max(variant.slots for variant in few) * min(len(few), 2)
        self._variants = [others.choice(few) for _ in range(calls)]
        self._configs = {
            variant: _draw_config(variant, problem, rng) | self._drawn(variant, others)
            for variant in dict.fromkeys(self._variants)
        }
        self._outputs: list[tuple[int, int, torch.Tensor]] = []

    @staticmethod
    def _drawn(variant: Variant, rng: Random) -> dict[str, Any]:
        """Meta-parameters whose values on this device would leave out what others do."""
        drawn = {"XCDS": rng.choice(_CHIPLETS)}
        return drawn | {"PROGRAMS": rng.choice(_PROGRAMS)} if variant.co_resident else drawn

    def plan(self) -> None:
        """Make the plans, and no calls."""
        self._simulate(lambda fabric: self._setup(fabric)[:0])

    def run(self) -> ScheduleOutcome:
        """Run the schedule and compare all outputs."""
        outcome = self._simulate(self._setup)
        if outcome.violation is not None:
            return outcome
        return replace(outcome, violation=self._wrong_result())

    def _simulate(self, setup: Setup) -> ScheduleOutcome:
        simulation = Simulation(self._problem.world_size, self._problem.slot_bytes)
        return simulation.run(
            setup,
            self._seed,
            first_generation=self._first_generation,
            backend=self._backend,
            co_resident=any(variant.co_resident for variant in self._variants),
        )

    def _setup(self, fabric: SimulatedFabric) -> list[Call]:
        if fabric.rank == 0:
            self._outputs = []
        plans = {
            variant: Ready(variant.plan(self._problem, fabric, config))
            for variant, config in self._configs.items()
        }
        return [
            partial(self._call, fabric, plans[variant], number)
            for number, variant in enumerate(self._variants)
        ]

    def _call(self, fabric: SimulatedFabric, plan: Ready, number: int) -> None:
        output = self._op.empty_output(self._problem, fabric.device)
        self._outputs.append((fabric.rank, number, output))
        plan(*_inputs(self._op.name, self._problem, fabric.rank, number), output)

    def _wrong_result(self) -> Violation | None:
        for rank, number, output in self._outputs:
            wanted = _reference(self._op.name, self._problem, rank, number)
            result = self._op.result(self._problem, output)
            error = (result.double() - wanted).abs().max()
            if not error <= _TOLERANCE * wanted.abs().max().clamp(min=1.0):
                generation = self._first_generation + number
                text = f"rank {rank}, generation {generation}: off by {error:.3g} at most"
                return Violation(Reason.WRONG_RESULT, (text, str(self._problem)))
        return None


@cache
def _inputs(op: str, problem: Problem, rank: int, number: int) -> tuple[torch.Tensor | None, ...]:
    return operation(op).make_inputs(problem, rank, number, torch.device("cpu"), integers=True)


@cache
def _reference(op: str, problem: Problem, rank: int, number: int) -> torch.Tensor:
    return operation(op).reference(problem, rank, number, torch.device("cpu"), integers=True)


def _draw_config(variant: Variant, problem: Problem, rng: Random) -> dict[str, Any]:
    """A config that the variant accepts; its default if none of a hundred draws is."""
    space = variant.space(problem, _HARDWARE)
    for _ in range(100):
        config = {name: rng.choice(values) for name, values in space.items()}
        if variant.illegal_reason(problem, _HARDWARE, config) is None:
            return config
    return variant.seed_configs(problem, _HARDWARE)[0]
