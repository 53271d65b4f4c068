"""Where the time of a problem goes, in the library's pipeline and in our variants.

Times are measured by the usual protocol and by clock readings in place: between the kernels of the
library (`step_timer`), and inside fused ones (`program_trace`). For hardware that is not available
they are modelled (`cost_model`). Either way they are broken down into accounts of the three taxes
(`taxfree_tune.taxes`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from taxfree._runtime.dispatch import Choice
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, Problem, Variant, variants
from taxfree_tune.benching.bench import ProblemResult, best_config, run_one
from taxfree_tune.cost.machines import Machine
from taxfree_tune.cost_model import bounds_of, modelled, times
from taxfree_tune.measuring.bounds import Bounds
from taxfree_tune.measuring.groups import deadline_s, group_for, on_groups
from taxfree_tune.measuring.results import DISPATCH, Skipped
from taxfree_tune.measuring.trial import Candidate
from taxfree_tune.profiling.program_trace import trace_programs, variables
from taxfree_tune.profiling.step_timer import TimedPipeline, measure_pipelines
from taxfree_tune.taxes import Account, ProgramTrace, accounts, slowest
from taxfree_tune.tuning.history import TuningHistory
from taxfree_tune.workers.group import WorkerGroup
from taxfree_tuning_db import LookupStep

SCHEMA = 1
_BENCH_REPETITIONS = 3  # of what is timed before, for its bounds and the dispatcher's choice
_GPU_REPETITIONS, _HOST_REPETITIONS = 15, 5
_TRACED_REPETITIONS = 5  # of calls whose programs are traced


@dataclass(frozen=True)
class Pipeline:
    """One way to compute a problem, and where its time goes.

    Args:
        variant, config: what runs.
        is_dispatched: whether the dispatcher picks it.
        kernels: of one call, counted in its graph; without graphs, the plan's own number.
        accounts: by rank.
        timed: the measurements behind them; None if they are modelled.
        signals: of a call on one rank: `programs` that signal, and `releases` at system scope; on
            devices of several chiplets also `by_chiplet`, releases with one for each chiplet. None
            for a variant whose programs cannot share signals.
    """

    variant: str
    config: dict[str, Any]
    is_dispatched: bool
    kernels: int
    accounts: tuple[Account, ...]
    timed: TimedPipeline | None
    signals: dict[str, int] | None = None

    @property
    def slowest(self) -> Account:
        """The account of the rank whose eager calls take longest."""
        return slowest(self.accounts)


@dataclass(frozen=True)
class Explanation:
    """The pipelines of one problem.

    Args:
        op, problem: what is explained.
        hardware: the device's name.
        bounds: of the problem.
        pipelines: the baseline first.
        skipped: variants that were asked for and not timed.
        choice, lookup_trace: what the dispatcher picks, and the steps of its look-up; None and
            empty where times are modelled.
    """

    op: str
    problem: dict[str, Any]
    hardware: str
    bounds: Bounds
    pipelines: tuple[Pipeline, ...]
    skipped: tuple[Skipped, ...]
    choice: Choice | None
    lookup_trace: tuple[LookupStep, ...]

    @property
    def is_modelled(self) -> bool:
        return self.choice is None

    def rows(self) -> list[dict[str, Any]]:
        """A row per pipeline, as JSON: the slowest rank's account, and those of all ranks."""
        return [self._row(pipeline) for pipeline in self.pipelines]

    def _row(self, pipeline: Pipeline) -> dict[str, Any]:
        account = pipeline.slowest
        row: dict[str, Any] = {
            "op": self.op,
            "problem": self.problem,
            "hardware": self.hardware,
            "variant": pipeline.variant,
            "config": pipeline.config,
            "is_dispatched": pipeline.is_dispatched,
            "is_modelled": self.is_modelled,
            "kernels": pipeline.kernels,
            "signals": pipeline.signals,
            **account.to_json(),
            **dataclasses.asdict(self.bounds),
            "unsplit": account.unsplit,
            "open": [] if self.is_modelled else account.problems(),
        }
        if pipeline.timed is not None:
            row["ranks"] = [_of_rank(account) for account in pipeline.accounts]
            row |= _instrument(pipeline.timed)
        return row

    def dispatch_json(self) -> dict[str, Any] | None:
        """The dispatcher's pick and its reason, as JSON."""
        if self.choice is None:
            return None
        lookup_trace = [dataclasses.asdict(step) for step in self.lookup_trace]
        common = {"op": self.op, "problem": self.problem}
        return common | dataclasses.asdict(self.choice) | {"lookup_trace": lookup_trace}


def _of_rank(account: Account) -> dict[str, Any]:
    """An account without what is the same on all ranks."""
    row = account.to_json()
    row["parts"] = {part.name: part.us for part in account.parts}
    return row


def _instrument(timed: TimedPipeline) -> dict[str, Any]:
    """How the parts were measured, and what each step takes in place."""
    measured = timed.measurement
    traced = {} if measured.trace is None else {"program_trace_us": measured.program_trace_us()}
    return traced | {
        "clock_reading_us": float(measured.clock_reading_us().max()),
        "gap_us": measured.gap_us,
        "clock_step_us": measured.alignment.step_ns * 1e-3,
        "clock_error_us": float(measured.alignment.error_ns.max()) * 1e-3,
        "steps": [
            dataclasses.asdict(step) | {"in_place_us": us}
            for step, us in zip(measured.steps, measured.step_us(), strict=True)
        ],
    }


def run(
    problems: Sequence[Any],
    fabric: str,
    history: TuningHistory,
    only: Sequence[str] = (),
) -> Iterator[tuple[ProblemResult, Explanation]]:
    """Measure where the time of problems goes.

    Args:
        problems, fabric, history: as of `taxfree_tune.benching.bench.run`.
        only: variants beside the baseline and what the dispatcher picks.

    Yields:
        What was benched, and what explains it.

    Raises:
        UsageError: there is no such variant.
        TaskFailed: the fabric cannot be opened, or measuring failed.
        WorkerLost: a worker died or hung.
    """
    one_build = fabric == "host"  # there, instrumented kernels cost little when not recording
    with contextlib.ExitStack() as opened:
        tracing: dict[int, WorkerGroup] = {}
        groups = on_groups(problems, fabric, variables(fabric) if one_build else None)
        for group, problem in groups:
            world_size = problem.world_size
            if one_build:
                tracing[world_size] = group
            elif world_size not in tracing:
                alike = [problem for problem in problems if problem.world_size == world_size]
                tracing[world_size] = opened.enter_context(
                    group_for(alike, fabric, variables(fabric))
                )
            result = run_one(group, problem, history, only, _BENCH_REPETITIONS)
            yield result, _explain(group, tracing[world_size], result)


def _explain(group: WorkerGroup, tracing: WorkerGroup, result: ProblemResult) -> Explanation:
    taken, fields = _timed_candidates(result), dataclasses.asdict(result.problem)
    on_host = result.hardware.backend == "interpreter"
    (outcome, *_) = group.call(
        measure_pipelines, deadline_s(result.hardware), op=result.op, problem=fields,
        candidates=taken, repetitions=_HOST_REPETITIONS if on_host else _GPU_REPETITIONS,
    )  # fmt: skip
    traces = _traces(tracing, result, taken)
    launches = {
        row.config["variant"] if row.variant == DISPATCH else row.variant: row.launches
        for row in result.rows
    }
    pipelines = []
    for candidate, timed in zip(taken, outcome, strict=True):
        name = candidate.variant
        measured = dataclasses.replace(timed.measurement, trace=traces.get(name))
        pipelines.append(
            Pipeline(
                name,
                dict(candidate.config),
                name == result.choice.variant,
                measured.kernels or launches[name],
                accounts(measured, result.bounds),
                dataclasses.replace(timed, measurement=measured),
                _signals(
                    variants(result.op)[name], result.problem, candidate.config, result.hardware
                ),
            )
        )
    return Explanation(
        result.op,
        fields,
        result.hardware.name,
        result.bounds,
        tuple(pipelines),
        result.skipped,
        result.choice,
        result.lookup_trace,
    )


def _timed_candidates(result: ProblemResult) -> list[Candidate]:
    """The candidates that the bench has timed; of the dispatched variant, the dispatched config."""
    candidates_of = {
        row.variant: Candidate(row.variant, row.config)
        for row in result.rows
        if row.variant != DISPATCH and row.mode == "eager"
    }
    if any(row.variant == DISPATCH for row in result.rows):  # else it is wrong, and not timed
        choice = result.choice
        candidates_of[choice.variant] = Candidate(choice.variant, choice.config)
    return list(candidates_of.values())


def _traces(
    group: WorkerGroup, result: ProblemResult, candidates: Sequence[Candidate]
) -> dict[str, ProgramTrace]:
    """What the programs of fused kernels did, by variant."""
    fused = [candidate for candidate in candidates if variants(result.op)[candidate.variant].fused]
    if not fused:
        return {}
    (traces, *_) = group.call(
        trace_programs, deadline_s(result.hardware), op=result.op,
        problem=dataclasses.asdict(result.problem), candidates=fused,
        repetitions=_TRACED_REPETITIONS,
    )  # fmt: skip
    return {candidate.variant: trace for candidate, trace in zip(fused, traces, strict=True)}


def _signals(
    variant: Variant, problem: Problem, config: Config, hardware: Hardware
) -> dict[str, int] | None:
    """The signals of a :class:`Pipeline`."""
    signals = variant.signals(problem, config)
    if signals is None or hardware.num_xcds == 1:
        return None if signals is None else signals._asdict()
    return signals._asdict() | {"by_chiplet": min(signals.programs, hardware.num_xcds)}


def model(op: str, problem: Problem, machine: Machine, only: Sequence[str] = ()) -> Explanation:
    """Where the time of a problem would go on hardware that is not there.

    Args:
        machine: its rates.
        only: variants beside the baseline, each at its first config.
    """
    pipelines, skipped = [], []
    for name, variant in variants(op).items():
        if name != "baseline" and name not in only:
            continue
        config = best_config(variant, problem, machine.hardware)
        if isinstance(config, str):
            fields = dataclasses.asdict(problem)
            skipped.append(Skipped(op, fields, name, {}, "refused", config))
            continue
        pipelines.append(
            Pipeline(
                name,
                dict(config),
                False,
                times(machine, problem, name).kernels,
                (modelled(machine, problem, name),),
                None,
                _signals(variant, problem, config, machine.hardware),
            )
        )
    return Explanation(
        op,
        dataclasses.asdict(problem),
        machine.hardware.name,
        bounds_of(machine, problem),
        tuple(pipelines),
        tuple(skipped),
        None,
        (),
    )
