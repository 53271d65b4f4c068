"""Measures every variant of a problem against the library baseline and the dispatcher's pick.

All measurements of a problem run interleaved in one task of the rank workers: the baseline, each
variant at its best known config, the dispatcher's call, and the vendor's kernel alone for the
bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taxfree import devices, fingerprints
from taxfree._runtime.dispatch import Choice, Dispatcher
from taxfree._runtime.runtime import Runtime
from taxfree.errors import UsageError
from taxfree.measuring import environment, timer
from taxfree.measuring.bounds import Bounds, Peaks, bounds, peaks, slot_bytes, vendor_kernel
from taxfree.measuring.results import DISPATCH, Results, Row, Skipped
from taxfree.measuring.trial import SEED, Bench, Candidate, Outcome, key, open_bench, try_candidates
from taxfree.settings import Settings
from taxfree.tuning.candidates import serves
from taxfree.workers.group import WorkerGroup
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.layout import arena_bytes
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Plan, Variant, variants
from taxfree_tuning_db import (
    Database,
    DatabaseMissing,
    LookupStep,
    Record,
    Table,
    TrialRecord,
    record_key,
    shipped_records,
)

_GPU_REPETITIONS, _HOST_REPETITIONS = 25, 5
_GPU_DEADLINE_S, _HOST_DEADLINE_S = 600.0, 3600.0  # of a problem


# -- what is known before --


@dataclass(frozen=True)
class TuningHistory:
    """What was tuned before.

    Args:
        records: the user's, then the shipped ones.
        path: the user's database; None where there is none.
    """

    records: tuple[Record, ...]
    path: Path | None

    @classmethod
    def read(cls, path: Path, required: bool) -> TuningHistory:
        """Read a database and what comes with taxfree.

        Args:
            required: whether a database that is not there is an error.

        Raises:
            DatabaseError: it cannot be read.
        """
        try:
            with Database(path, read_only=True) as database:
                return cls((*database.records(), *shipped_records()), path)
        except DatabaseMissing:
            if required:
                raise
            return cls(shipped_records(), None)

    def problems(self, op: str, gpu: str | None) -> list[dict[str, Any]]:
        """Problems of an operation that were tuned on a kind of device; None for any."""
        return [
            record.problem
            for record in self.records
            if record.op == op and gpu in (None, record.hardware.gpu)
        ]

    def candidates(self, op: str, problem: dict[str, Any], hardware: Hardware) -> list[Candidate]:
        """What was measured of a problem: winner and runners-up, then trials, the fastest first.

        What failed when it was last tried is left out.
        """
        place = record_key(op, problem, fingerprints.hardware_fingerprint(hardware))
        last = self._last_trials(op, place)
        records = [record for record in self.records if record.key == place]
        measured = [each for r in records for each in (r.winner, *r.runners_up)]
        trials = [trial for trial in last.values() if trial.state == "measured"]
        trials.sort(key=lambda trial: min(trial.median_us.values()))
        found = [Candidate(each.variant, each.config) for each in measured]
        found += [Candidate(each.variant, each.config) for each in trials]
        failed = {text for text, trial in last.items() if trial.state != "measured"}
        return [candidate for candidate in found if key(candidate) not in failed]

    def _last_trials(self, op: str, place: str) -> dict[str, TrialRecord]:
        """The last trial of each candidate with today's kernels."""
        if self.path is None:
            return {}
        hashes = fingerprints.kernel_hashes(op)
        with Database(self.path, read_only=True) as database:
            return {
                key(Candidate(trial.variant, trial.config)): trial
                for trial in database.trials(place)
                if trial.kernel_hash == hashes.get(trial.variant)
            }


def candidates(
    op: str, problem: Any, hardware: Hardware, knowledge: TuningHistory, only: Sequence[str] | None
) -> tuple[list[Candidate], list[Skipped]]:
    """The baseline and each variant at its best known config; and the variants that refuse.

    Args:
        only: variants to take besides the baseline; None for all.

    Raises:
        UsageError: there is no such variant.
    """
    known = variants(op)
    for name in only or ():
        if name not in known:
            raise UsageError(f"{op} has no variant {name!r}", f"one of: {', '.join(known)}")
    fields = dataclasses.asdict(problem)
    measured = knowledge.candidates(op, fields, hardware)
    taken, skipped = [], []
    for name, variant in known.items():
        if only is not None and name not in ("baseline", *only):
            continue
        config = _best_config(variant, problem, hardware, measured)
        if isinstance(config, str):
            skipped.append(Skipped(op, fields, name, {}, "refused", config))
        else:
            taken.append(Candidate(name, config))
    return taken, skipped


def _best_config(
    variant: Variant, problem: Any, hardware: Hardware, measured: Sequence[Candidate]
) -> Mapping[str, Any] | str:
    """The first measured config that is still valid, else the default; or why there is none."""
    reason = variant.unsupported_reason(problem, hardware)
    if reason is not None:
        return reason
    for candidate in measured:
        config = candidate.config
        if candidate.variant == variant.name and serves(variant, problem, hardware, config):
            return config
    first = variant.seed_configs(problem, hardware)
    return first[0] if first else "none of its first configs serves"


# -- in the workers --


@dataclass(frozen=True)
class Measured:
    """What the workers measured for a problem; the same on every rank.

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


class _DispatchPlan(Plan):
    """The dispatcher's hot path, as a plan."""

    def __init__(self, runtime: Runtime, problem: Any) -> None:
        self._runtime, self._problem = runtime, problem

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        *inputs, out = tensors
        assert out is not None
        return self._runtime.call(self._problem, inputs, out)


def measure_problem(
    fabric: Fabric,
    op: str,
    problem: dict[str, Any],
    candidates: Sequence[Candidate],
    records: Sequence[Record],
    repetitions: int,
) -> Measured:
    """Check, then time, all variants of a problem together; a task of the workers.

    Raises:
        PeerTimeout: a wait exceeded its bound while dispatch was checked, or in the timing.
    """
    checked = try_candidates(fabric, op, problem, candidates, modes=(), repetitions=0)
    outcomes = {c.variant: outcome for c, outcome in zip(candidates, checked, strict=True)}
    bench = open_bench(fabric, op, problem)
    plans = {
        candidate.variant: bench.plan(candidate)
        for candidate in candidates
        if outcomes[candidate.variant].state in ("measured", "wrong")
    }
    runtime = Runtime.on_fabric(fabric, records)
    runtime.prepare([bench.problem])
    choice = runtime.choice(bench.problem)
    plans[DISPATCH] = _DispatchPlan(runtime, bench.problem)
    outcomes[DISPATCH] = _dispatch_outcome(bench, plans, choice)
    wrong = {
        name: _wrong_values(bench, plan)
        for name, plan in plans.items()
        if outcomes[name].state == "wrong"
    }
    rates = peaks(fabric, bench.problem.dtype)
    right = {name: plan for name, plan in plans.items() if name not in wrong}
    gemm_us = _time(bench, right, outcomes, repetitions)
    return Measured(
        outcomes,
        wrong,
        choice,
        bounds(bench.problem.cost, rates, gemm_us),
        rates,
        _clocks(bench),
    )


def _dispatch_outcome(bench: Bench, plans: Mapping[str, Plan], choice: Choice) -> Outcome:
    picked, checked = plans.get(choice.variant), [plans[DISPATCH]]
    if picked is None or choice.eager is not None:
        picked = bench.plan(Candidate(choice.variant, choice.config))
    if choice.eager is not None:  # dispatch is checked eagerly, where it runs another
        checked.append(picked)
    found = [bench.check(plan) for plan in checked]
    _raise_if_a_peer_was_lost(bench.fabric)
    for why_wrong, error in found:
        if why_wrong is not None:
            return Outcome("wrong", why_wrong, relative_error=error)
    worst = max(error for _, error in found)
    return Outcome("measured", relative_error=worst, launches=picked.launches)


def _wrong_values(bench: Bench, plan: Plan) -> int:
    """Number of wrong values on small-integer inputs, over all ranks; collective."""
    operation, problem, fabric = bench.operation, bench.problem, bench.fabric
    where = (problem, fabric.rank, SEED, fabric.device)
    out = operation.empty_output(problem, fabric.device).fill_(float("nan"))
    plan(*operation.make_inputs(*where, integers=True), out)
    exact = operation.reference(*where, integers=True).to(out.dtype)
    return sum(bench.vote(int((out != exact).sum())))


def _time(
    bench: Bench, plans: Mapping[str, Plan], outcomes: Mapping[str, Outcome], repetitions: int
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
    return [gpu for own in bench.vote(environment.gpus(uuid)) for gpu in own]


# -- in the controller --


@dataclass(frozen=True)
class ProblemResult:
    """One problem, measured.

    Args:
        op, problem: what was measured.
        rows: of all variants, the baseline's first and the dispatcher's last.
        skipped: variants that were not timed.
        choice: the dispatcher's.
        lookup_trace: the steps of its look-up.
        bounds, peaks: of the problem, and of the machine.
        hardware: of a rank's device.
    """

    op: str
    problem: Any
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    choice: Choice
    lookup_trace: tuple[LookupStep, ...]
    bounds: Bounds
    peaks: Peaks
    hardware: Hardware


def run(
    op: str,
    problems: Sequence[Any],
    fabric: str,
    knowledge: TuningHistory,
    only: Sequence[str] | None = None,
) -> Iterator[ProblemResult]:
    """Measure problems, with one group of workers per world size.

    Args:
        op: the operation.
        problems: of any world sizes.
        fabric: "host", "cuda" or "rocm".
        knowledge: gives the configs, and the records that the dispatcher uses.
        only: variants besides the baseline and the dispatcher's pick; None for all.

    Yields:
        Each result as soon as it is available; closing the iterator ends the workers.

    Raises:
        UsageError: there is no such variant.
        TaskFailed: the fabric cannot be opened, or measuring failed.
        WorkerLost: a worker died or hung.
    """
    for group, problem in on_groups(problems, fabric):
        yield run_one(group, op, problem, knowledge, only)


def on_groups(
    problems: Sequence[Any], fabric: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[WorkerGroup, Any]]:
    """Each problem with an open group of workers of its world size.

    Args:
        variables: environment variables of the workers, added to this process's.

    Raises:
        TaskFailed: the fabric cannot be opened.
    """
    for world_size in dict.fromkeys(problem.world_size for problem in problems):
        alike = [problem for problem in problems if problem.world_size == world_size]
        with group_for(alike, fabric, variables) as group:
            for problem in alike:
                yield group, problem


def group_for(
    problems: Sequence[Any], fabric: str, variables: Mapping[str, str] | None = None
) -> WorkerGroup:
    """A group of workers for problems of one world size; arguments and errors as of `on_groups`."""
    timeout_s = Settings.from_environment().timeout_s
    return WorkerGroup(
        problems[0].world_size, fabric, heap_bytes(fabric, problems), timeout_s, variables
    )


def deadline_s(hardware: Hardware) -> float:
    """Seconds after which a task on one problem counts as hung."""
    return _HOST_DEADLINE_S if hardware.backend == "interpreter" else _GPU_DEADLINE_S


def heap_bytes(fabric: str, problems: Sequence[Any]) -> int:
    """Symmetric memory for problems, and for measuring the rates of the fabric."""
    return max(devices.heap_bytes(problems), arena_bytes(slot_bytes(fabric)))


def run_one(
    group: WorkerGroup,
    op: str,
    problem: Any,
    knowledge: TuningHistory,
    only: Sequence[str] | None,
    repetitions: int | None = None,
) -> ProblemResult:
    """Measure one problem on an open group; arguments and errors as of `run`.

    Args:
        repetitions: of each variant and mode, where it should not be the usual number.
    """
    hardware = group.hardware
    taken, skipped = candidates(op, problem, hardware, knowledge, only)
    on_host = hardware.backend == "interpreter"
    if repetitions is None:
        repetitions = _HOST_REPETITIONS if on_host else _GPU_REPETITIONS
    records = [record for record in knowledge.records if record.op == op]
    measured = group.call(
        measure_problem,
        deadline_s(hardware),
        op=op,
        problem=dataclasses.asdict(problem),
        candidates=taken,
        records=records,
        repetitions=repetitions,
    )[0]
    configs = {candidate.variant: dict(candidate.config) for candidate in taken}
    rows, failed = _rows(op, problem, measured, configs)
    dispatcher = Dispatcher(Table(user=records), hardware)
    return ProblemResult(
        op,
        problem,
        tuple(rows),
        (*skipped, *failed),
        measured.choice,
        dispatcher.look_up(op, problem).lookup_trace,
        measured.bounds,
        measured.peaks,
        hardware,
    )


def _rows(
    op: str, problem: Any, measured: Measured, configs: Mapping[str, dict[str, Any]]
) -> tuple[list[Row], list[Skipped]]:
    fields = dataclasses.asdict(problem)
    baseline = measured.outcomes["baseline"].timings
    clocks = [gpu["sm_mhz"] for gpu in measured.gpus if gpu["sm_mhz"] is not None]
    throttled = sorted({reason for gpu in measured.gpus for reason in gpu["throttled"]})
    rows, skipped = [], []
    for name, outcome in measured.outcomes.items():
        if outcome.state != "measured":
            wrong, (_, config) = measured.wrong.get(name, 0), _ran(name, "graph", measured, configs)
            skipped.append(Skipped(op, fields, name, config, outcome.state, outcome.reason, wrong))
        for mode, timing in outcome.timings.items():
            source, config = _ran(name, mode, measured, configs)
            row = Row(
                op=op,
                problem=fields,
                variant=name,
                config=config,
                mode=mode,  # type: ignore[arg-type]
                median_us=timing.median_us,
                iqr_us=timing.iqr_us,
                samples_us=timing.samples_us,
                t_floor_us=measured.bounds.t_floor_us,
                t_gemm_us=measured.bounds.t_gemm_us,
                t_link_us=measured.bounds.t_link_us,
                t_bound_us=measured.bounds.t_bound_us,
                relative_error=outcome.relative_error,
                kernel_hash=fingerprints.kernel_hashes(op)[source],
                fused=variants(op)[source].fused,
                launches=measured.outcomes.get(source, outcome).launches,
                skew_us=timing.skew_us,
                speedup_eager=_ratio(baseline.get("eager"), timing),
                speedup_graph=_ratio(baseline.get("graph"), timing),
                tflops=problem.cost.flops / timing.median_us * 1e-6,
                gbps=problem.cost.memory_bytes / timing.median_us * 1e-3,
                sm_mhz=min(clocks, default=None),
                throttled=tuple(throttled),
            )
            rows.append(row)
    return rows, skipped


def _ran(
    name: str, mode: str, measured: Measured, configs: Mapping[str, dict[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Which variant a row is of, and the row's config."""
    if name != DISPATCH:
        return name, configs[name]
    picked = measured.choice.of(mode)
    return picked.variant, {"variant": picked.variant, **picked.config}


def _ratio(baseline: timer.Timing | None, timing: timer.Timing) -> float | None:
    return None if baseline is None else baseline.median_us / timing.median_us


def collect(fabric: str, results: Sequence[ProblemResult]) -> Results:
    """The content of a result file.

    Args:
        fabric: that they were measured on.
        results: at least one.
    """
    rates = {(result.problem.world_size, result.problem.dtype): result.peaks for result in results}
    machine = environment.record(fabric, results[0].hardware)
    machine["peaks"] = [
        {"world_size": world_size, "dtype": dtype} | _finite(dataclasses.asdict(peak))
        for (world_size, dtype), peak in rates.items()
    ]
    return Results(
        machine,
        tuple(row for result in results for row in result.rows),
        tuple(each for result in results for each in result.skipped),
    )


def _finite(rates: dict[str, float]) -> dict[str, float | None]:
    return {name: rate if math.isfinite(rate) else None for name, rate in rates.items()}
