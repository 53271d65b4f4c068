"""The ranks' side of tuning a decode step: its ways, beside the library's code in a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from taxfree.models.step_records import StepChoice
from taxfree_kernels.fabric.base import Fabric
from taxfree_tune.benching.model_tasks import Bench, Phase
from taxfree_tune.measuring import disturbance
from taxfree_tune.measuring.timer import time_together
from taxfree_tune.measuring.trial import ERROR_ALLOWANCE, Candidate, Outcome
from taxfree_tune.shapes.models import Model
from taxfree_tuning_db import Record

_CHAIN = 10  # calls of a repetition on GPUs

_kept: dict[str, Any] = {}  # the model of the last task, whose weights are large


def try_steps(
    fabric: Fabric,
    model: Model,
    dtype: str,
    phase: Phase,
    candidates: Sequence[Candidate],
    records: Sequence[Record],
    repetitions: int,
) -> list[Outcome]:
    """Check ways to compute a step against float64, and time those that are right together.

    Args:
        candidates: "baseline" is the library's compiled code in a graph, without graphs its eager
            one; the others are those of ``taxfree_kernels.decode_step.tuned``.
        records: by which the operations are chosen.
    """
    watch = disturbance.Watch(fabric)
    bench, exact = _opened(fabric, model, dtype, phase, records)
    mode = "graph" if fabric.has_graphs else "eager"
    with torch.no_grad():
        allowed = ERROR_ALLOWANCE * bench.error(bench.call("torch", "eager")(), exact)
        outcomes, calls = [], []
        for candidate in candidates:
            run, logits, ran = _call(bench, candidate, mode)
            if candidate.variant == "kernel" and not ran.startswith("one kernel"):
                outcomes.append(Outcome("failed", ran))
                continue
            error = bench.error(logits(), exact)
            if not error <= allowed:
                reason = f"relative error {error:.3g}, {allowed:.3g} is allowed"
                outcomes.append(Outcome("wrong", reason, relative_error=error))
                continue
            outcomes.append(Outcome("measured", relative_error=error))
            calls.append((lambda _, run=run: run(), "eager"))
        chain = _CHAIN if fabric.has_graphs else None
        timings = iter(time_together(fabric, calls, repetitions, chain=chain))
    bench.runtime.check()
    disturbed = watch.reasons()
    for outcome in outcomes:
        if outcome.state == "measured":
            outcome.timings[mode], outcome.disturbed = next(timings), disturbed
    return outcomes


def _call(
    bench: Bench, candidate: Candidate, mode: str
) -> tuple[Callable[[], Any], Callable[[], torch.Tensor], str]:
    """What is timed of a candidate, its logits, and what ran."""
    if candidate.variant == "baseline":
        call = bench.call("torch", mode)
        return call, call, "torch"
    choice = StepChoice(candidate.variant, candidate.config, candidate.variant)
    return bench.step(choice)


def _opened(
    fabric: Fabric, model: Model, dtype: str, phase: Phase, records: Sequence[Record]
) -> tuple[Bench, torch.Tensor]:
    """A bench of the model, and its logits in float64; kept from task to task."""
    key = (model, dtype, phase)
    if _kept.get("key") != key:
        _kept.clear()
        torch.compiler.reset()
        gc.collect()
        with torch.no_grad():
            bench = Bench(fabric, model, getattr(torch, dtype), phase, records)
            _kept.update(key=key, bench=bench, exact=bench.exact_logits())
    return _kept["bench"], _kept["exact"]
