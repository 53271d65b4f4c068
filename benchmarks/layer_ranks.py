"""The task of the rank that times a layer; see :mod:`benchmarks.layer`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.emulate_ranks import (
    VENDOR,
    PeersAre,
    act_alone_for,
    plan_or_reason,
    vendor_of,
)
from benchmarks.promises import promises
from taxfree.measuring import timer
from taxfree.measuring.trial import Calls, Candidate
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Ready, variants

_LAYERS = 5  # of a repetition on a GPU


@dataclass(frozen=True)
class _Timed:
    """A way to compute an operation, and its time, repeated."""

    op: str
    candidate: Candidate
    promised: bool
    call: timer.Call
    median_us: float

    @property
    def is_searched(self) -> bool:
        return variants(self.op)[self.candidate.variant].searched and not self.promised


def time_layer(
    fabric: Fabric,
    problems: Sequence[tuple[str, dict[str, Any]]],
    candidates: Sequence[Sequence[Candidate]],
    arena_bytes: int,
    repetitions: int,
    peers: PeersAre,
) -> list[dict[str, Any]]:
    """Time a layer with each choice of candidates.

    Args:
        problems: operation and fields of each.
        candidates: of each problem.
        arena_bytes: of each of the ranks that this one acts for.

    Returns:
        For each choice its time, and what it runs, with the time of each operation repeated.
    """
    fabric = copy.copy(fabric)
    act_alone_for(fabric, problems[0][1]["world_size"], arena_bytes, peers)
    operations = [
        _timed(fabric, op, problem, tried, repetitions)
        for (op, problem), tried in zip(problems, candidates, strict=True)
    ]
    choices = {
        "vendor": [ours_and_vendor[-1] for ours_and_vendor in operations],
        "searched": [_fastest([e for e in ours if e.is_searched]) for *ours, _ in operations],
        "all": [_fastest([e for e in ours if not e.promised]) for *ours, _ in operations],
        "promised": [_fastest(ours) for *ours, _ in operations],
    }
    mode = "graph" if fabric.has_graphs else "eager"
    layers = [(_layer(chosen), mode) for chosen in choices.values()]
    chain = _LAYERS if fabric.has_graphs else 1
    timings = timer.time_together(fabric, layers, repetitions, chain=chain)
    fabric.synchronize()
    fabric.pool.check()
    return [
        {
            "choice": name,
            "median_us": timing.median_us,
            "iqr_us": timing.iqr_us,
            "operations": [
                {
                    "op": each.op,
                    "problem": problem,
                    "variant": each.candidate.variant,
                    "config": dict(each.candidate.config),
                    "promised": each.promised,
                    "median_us": each.median_us,
                }
                for each, (_, problem) in zip(chosen, problems, strict=True)
            ],
        }
        for (name, chosen), timing in zip(choices.items(), timings, strict=True)
    ]


def _timed(
    fabric: Fabric,
    op: str,
    problem: dict[str, Any],
    candidates: Sequence[Candidate],
    repetitions: int,
) -> list[_Timed]:
    """Candidates that can be timed; the vendor's matmul comes last."""
    calls = Calls(fabric, op, problem)
    calls.share_compilation(candidates)
    tried = [(each, promised) for each in candidates for promised in promises(each.config)]
    plans = [(each, promised, plan_or_reason(calls, each, promised)) for each, promised in tried]
    ready = [
        (each, promised, calls.call(plan))
        for each, promised, plan in plans
        if isinstance(plan, Ready)
    ]
    vendor = vendor_of(calls)
    assert vendor is not None
    ready.append((Candidate(VENDOR, {}), False, vendor))
    mode = "graph" if fabric.has_graphs else "eager"
    timings = timer.time_together(fabric, [(call, mode) for *_, call in ready], repetitions)
    return [
        _Timed(op, *each, timing.median_us) for each, timing in zip(ready, timings, strict=True)
    ]


def _fastest(tried: Sequence[_Timed]) -> _Timed:
    return min(tried, key=lambda each: each.median_us)


def _layer(chosen: Sequence[_Timed]) -> timer.Call:
    def call(step: int) -> None:
        for each in chosen:
            each.call(step)

    return call
