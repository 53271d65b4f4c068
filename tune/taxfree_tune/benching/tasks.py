"""The ranks' side of a bench: checks and times all variants of a problem, interleaved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from taxfree._runtime.collectives import vote
from taxfree._runtime.dispatch import Choice
from taxfree._runtime.runtime import Runtime
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Problem
from taxfree_tune.measuring import environment, timer
from taxfree_tune.measuring.bounds import Bounds, Peaks, bounds, peaks, vendor_kernel
from taxfree_tune.measuring.results import DISPATCH
from taxfree_tune.measuring.trial import (
    SEED,
    Bench,
    Candidate,
    Compute,
    Outcome,
    open_bench,
    try_candidates,
)
from taxfree_tuning_db import Record


@dataclass(frozen=True)
class ProblemTimes:
    """Outcomes, times and rates of one problem; the same on every rank.

    Args:
        outcomes: by variant, including "dispatch".
        wrong: number of wrong values, by variant, for those that are wrong.
        choice: the dispatcher's.
        bounds, peaks: of the problem, and of the machine.
        gpus: clocks of each rank's GPU right after the measurement; empty without one.
    """

    outcomes: dict[str, Outcome]
    wrong: dict[str, int]
    choice: Choice
    bounds: Bounds
    peaks: Peaks
    gpus: list[dict[str, Any]]


def measure_problem(
    fabric: Fabric,
    op: str,
    problem: dict[str, Any],
    candidates: Sequence[Candidate],
    records: Sequence[Record],
    repetitions: int,
) -> ProblemTimes:
    """Check, then time, all variants of a problem together; a task of the workers.

    Raises:
        PeerTimeout: a wait exceeded its bound while dispatch was checked, or in the timing.
    """
    checked = try_candidates(fabric, op, problem, candidates, modes=(), repetitions=0)
    outcomes = {c.variant: outcome for c, outcome in zip(candidates, checked, strict=True)}
    bench = open_bench(fabric, op, problem)
    plans: dict[str, Compute] = {
        candidate.variant: bench.plan(candidate)
        for candidate in candidates
        if outcomes[candidate.variant].state in ("measured", "wrong")
    }
    runtime = Runtime.on_fabric(fabric, records)
    runtime.prepare([bench.problem])
    choice = runtime.choice(bench.problem)
    plans[DISPATCH] = _dispatched(runtime, bench.problem)
    outcomes[DISPATCH] = _dispatch_outcome(bench, plans[DISPATCH], choice)
    wrong = {
        name: _wrong_values(bench, plan)
        for name, plan in plans.items()
        if outcomes[name].state == "wrong"
    }
    rates = peaks(fabric, bench.problem.dtype, getattr(bench.problem, "x_dtype", "same"))
    right = {name: plan for name, plan in plans.items() if name not in wrong}
    gemm_us = _time(bench, right, outcomes, repetitions)
    return ProblemTimes(
        outcomes,
        wrong,
        choice,
        bounds(bench.problem.cost, rates, gemm_us),
        rates,
        _clocks(bench),
    )


def _dispatched(runtime: Runtime, problem: Problem) -> Compute:
    """The dispatcher's hot path, as a plan."""

    def run(*tensors: torch.Tensor | None) -> torch.Tensor:
        *inputs, out = tensors
        assert out is not None
        return runtime.call(problem, inputs, out)

    return run


def _dispatch_outcome(bench: Bench, dispatched: Compute, choice: Choice) -> Outcome:
    picked, checked = bench.plan(Candidate(choice.variant, choice.config)), [dispatched]
    if choice.eager is not None:  # dispatch is checked eagerly, where it runs another
        checked.append(picked)
    reasons = [bench.check(plan) for plan in checked]
    _raise_if_a_peer_was_lost(bench.fabric)
    for why_wrong, error in reasons:
        if why_wrong is not None:
            return Outcome("wrong", why_wrong, relative_error=error)
    worst = max(error for _, error in reasons)
    return Outcome("measured", relative_error=worst, launches=picked.launches)


def _wrong_values(bench: Bench, plan: Compute) -> int:
    """Number of wrong values on small-integer inputs, over all ranks; collective."""
    operation, problem, fabric = bench.operation, bench.problem, bench.fabric
    where = (problem, fabric.rank, SEED, fabric.device)
    out = operation.empty_output(problem, fabric.device).fill_(float("nan"))
    found = operation.result(problem, plan(*operation.make_inputs(*where, integers=True), out))
    exact = operation.reference(*where, integers=True).to(found.dtype)
    return sum(vote(bench.fabric.group, int((found != exact).sum())))


def _time(
    bench: Bench, plans: Mapping[str, Compute], outcomes: Mapping[str, Outcome], repetitions: int
) -> float | None:
    """Fill in the timings of plans; returns the vendor's kernel alone, in microseconds."""
    fabric = bench.fabric
    modes = ("eager", "graph") if fabric.has_graphs else ("eager",)
    slots = [(name, mode) for name in plans for mode in modes]
    calls = [(bench.call(plans[name]), mode) for name, mode in slots]
    gemm = vendor_kernel(bench)
    if gemm is not None:
        calls.append((gemm, modes[-1]))
    timings = timer.time_together(fabric, calls, repetitions)
    _raise_if_a_peer_was_lost(fabric)
    for (name, mode), timing in zip(slots, timings, strict=False):
        outcomes[name].timings[mode] = timing
    return None if gemm is None else timings[-1].median_us


def _raise_if_a_peer_was_lost(fabric: Fabric) -> None:
    fabric.synchronize()
    for pool in (fabric.pool, fabric.device_barrier.pool):
        pool.check_at_rest()


def _clocks(bench: Bench) -> list[dict[str, Any]]:
    device = bench.fabric.device
    if device.type != "cuda":
        return []
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return [gpu for own in vote(bench.fabric.group, environment.gpus(uuid)) for gpu in own]
