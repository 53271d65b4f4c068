"""A lent winner beside the library, on the ranks that borrow it: whether it is right, and faster.

The library's result stands in for the reference: of small integers it is exact, in any order of
summation, and a reference in float64 would take longer than all the rest. A few short repetitions
suffice, since a lender's winner is kept unless the library is faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch

from taxfree._runtime.collectives import Failure, attempt, vote
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune.measuring import timer
from taxfree_tune.measuring.trial import SEED, Calls, Outcome

_REPETITIONS = 5
_REPETITION_US = 500.0  # of expected calls


def try_beside_library(
    fabric: Fabric,
    problem: Problem,
    plans: Sequence[Callable[..., torch.Tensor]],
    expected_us: float,
) -> list[Outcome] | str:
    """Compare plans with the library's, and time those that are right; collective.

    Args:
        plans: that can be called; the library's first.
        expected_us: time of a call, from which the number of calls follows; the same on all ranks.

    Returns:
        One outcome per plan, the same on every rank; or why nothing could be tried.
    """
    fields = dataclasses.asdict(problem)
    made = attempt(fabric.group, [partial(Calls, fabric, op_of(problem), fields)])[0]
    if isinstance(made, Failure):
        return made.why
    outcomes = _checked(made, plans)
    modes = ("eager", "graph") if fabric.has_graphs else ("eager",)
    timed = [
        (outcome, mode, (made.call(plan), mode))
        for outcome, plan in zip(outcomes, plans, strict=True)
        if outcome.state == "measured"
        for mode in modes
    ]
    chain = timer.chain_for(fabric, expected_us, _REPETITION_US)
    times = timer.time_together(fabric, [call for *_, call in timed], _REPETITIONS, chain=chain)
    for (outcome, mode, _), timing in zip(timed, times, strict=True):
        outcome.timings[mode] = timing
    hang = made.hang()
    return outcomes if hang is None else hang


def _checked(calls: Calls, plans: Sequence[Callable[..., torch.Tensor]]) -> list[Outcome]:
    fabric, out = calls.fabric, calls.outputs[0]
    integers = calls.operation.make_inputs(
        calls.problem, fabric.rank, SEED, fabric.device, integers=True
    )
    library, *others = plans
    expected = library(*integers, out).clone()
    outcomes = [Outcome("measured")]
    for plan in others:
        wrong = int((plan(*integers, out.fill_(float("nan"))) != expected).sum())
        hang = calls.hang()
        if hang is not None:
            outcomes.append(Outcome("hung", hang))
        elif any(vote(fabric.group, wrong)):
            outcomes.append(Outcome("wrong", "its result is not the library's"))
        else:
            outcomes.append(Outcome("measured"))
    return outcomes
