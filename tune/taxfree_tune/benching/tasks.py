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
        choice: the dispatcher's.
        bounds, peaks: of the problem, and of the machine.
        gpus: clocks of each rank's GPU right after the measurement; empty without one.
    """

    outcomes: dict[str, Outcome]
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
        if outcomes[candidate.variant].state == "measured"
    }
    runtime = Runtime.on_fabric(fabric, records)
    runtime.prepare([bench.problem])
    choice = runtime.choice(bench.problem)
    dispatched = _dispatched(runtime, bench.problem)
    outcomes[DISPATCH] = _dispatch_outcome(bench, dispatched, choice)
    if outcomes[DISPATCH].state == "measured":
        plans[DISPATCH] = dispatched
    rates = peaks(fabric, bench.problem.dtype, getattr(bench.problem, "x_dtype", "same"))
    gemm_us = _time(bench, plans, outcomes, repetitions)
    return ProblemTimes(
        outcomes,
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
    outcomes = [bench.check(plan) for plan in checked]
    _raise_if_a_peer_was_lost(bench.fabric)
    worst = max(outcomes, key=lambda one: (one.state == "wrong", one.relative_error or 0.0))
    worst.launches = picked.launches
    return worst


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
    return [gpu for gpus in vote(bench.fabric.group, environment.gpus(uuid)) for gpu in gpus]
