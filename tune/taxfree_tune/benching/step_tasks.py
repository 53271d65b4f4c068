"""The ranks' side of tuning a decode step: its ways, beside the library's code in a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from taxfree.models.step_records import StepChoice, choose, problem_of
from taxfree_kernels.decode_step.tape import EVENTS
from taxfree_kernels.fabric.base import Fabric
from taxfree_tune.benching.model_tasks import Bench, Phase
from taxfree_tune.measuring import disturbance
from taxfree_tune.measuring.bounds import peaks
from taxfree_tune.measuring.timer import time_together
from taxfree_tune.measuring.trial import ERROR_ALLOWANCE, Candidate, Outcome
from taxfree_tune.shapes.models import Model
from taxfree_tune.taxes.step import StepAccount, account
from taxfree_tuning_db import Record

_CHAIN = 10  # calls of a repetition on GPUs
_CALLS_OF_CLOCK = 50  # between two readings that tell how fast it runs
_KERNEL = "one kernel"
_LIBRARY = StepChoice("library", why="the library")

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
            one, in fp8 that of the step's operations; the others are those of
            ``taxfree_kernels.decode_step.tuned``.
        records: by which the operations are chosen.
    """
    watch = disturbance.DisturbanceWatch(fabric)
    bench, exact = _opened(fabric, model, dtype, phase, records)
    mode = "graph" if fabric.has_graphs else "eager"
    with torch.no_grad():
        library = bench.call("torch", "eager")
        if model.scales != "none":
            _, library, _ = bench.step(_LIBRARY)
        allowed = ERROR_ALLOWANCE * bench.error(library(), exact)
        outcomes, calls = [], []
        for candidate in candidates:
            run, logits, ran = _call(bench, candidate, mode, model.scales != "none")
            if candidate.variant == "kernel" and not ran.startswith(_KERNEL):
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
    bench: Bench, candidate: Candidate, mode: str, is_fp8: bool
) -> tuple[Callable[[], Any], Callable[[], torch.Tensor], str]:
    """What is timed of a candidate, its logits, and what ran."""
    if candidate.variant == "baseline" and not is_fp8:
        call = bench.call("torch", mode)
        return call, call, "torch"
    choice = _LIBRARY
    if candidate.variant != "baseline":
        choice = StepChoice(candidate.variant, candidate.config, candidate.variant)
    run, logits, step = bench.step(choice)
    return run, logits, step.ran


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
            bench = Bench(fabric, model, getattr(torch, dtype), phase, records, model.scales)
            _kept.update(key=key, bench=bench, exact=bench.exact_logits())
    return _kept["bench"], _kept["exact"]


def explain_step(
    fabric: Fabric,
    model: Model,
    dtype: str,
    phase: Phase,
    records: Sequence[Record],
    repetitions: int,
) -> StepAccount | str:
    """The account of the kernel that records choose, by its own clocks; a task of the workers.

    Returns:
        The account of this rank, or why the step runs no kernel with clocks.
    """
    bench, _ = _opened(fabric, model, dtype, phase, records)
    run, _, step = bench.step()
    if not step.ran.startswith(_KERNEL):
        return step.ran
    from taxfree_kernels.decode_step.step import DecodeStep  # needs a Triton with Gluon

    problem = problem_of(step.decoder, step.batch, step.capacity, fabric.world_size)
    config = choose(problem, bench.runtime._dispatcher, fabric.hardware).config
    traced = DecodeStep(step.decoder, step.cache, step.batch, fabric, config, trace=True)
    tokens = torch.zeros(phase.batch, dtype=torch.int64, device=fabric.device)
    call = partial(traced, tokens, torch.full_like(tokens, phase.length, dtype=torch.int32))
    times = traced.buffers.times
    (timing,) = time_together(fabric, [(lambda _: run(), "eager")], repetitions, chain=_CHAIN)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    first = times[:, 0, 0].clone()
    for _ in range(_CALLS_OF_CLOCK):
        call()
    end.record()
    call()
    fabric.synchronize()
    cycles = float((times[:, 0, 0] - first).median())
    rate = peaks(fabric, dtype).memory_bytes_per_s
    return account(
        times.cpu(), EVENTS, timing.median_us, problem.cost.memory_bytes / rate * 1e6,
        cycles / (1e6 * begin.elapsed_time(end)),
    )  # fmt: skip
