"""Measures variants of problems against the library baseline and the dispatcher's pick.

The baseline, each variant at its best known config, the dispatcher's call, and the vendor's kernel
alone for the bounds run interleaved, in one task of the rank workers for each problem.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taxfree import fingerprints
from taxfree._runtime.dispatch import Choice, Dispatcher
from taxfree.errors import UsageError
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, Variant, op_of, variants
from taxfree_tune.benching.tasks import ProblemTimes, measure_problem
from taxfree_tune.measuring import environment, timer
from taxfree_tune.measuring.bounds import Bounds, Peaks
from taxfree_tune.measuring.groups import deadline_s, on_groups
from taxfree_tune.measuring.results import DISPATCH, Results, Row, Skipped
from taxfree_tune.measuring.trial import Candidate
from taxfree_tune.tuning.candidates import is_legal
from taxfree_tune.tuning.history import TuningHistory
from taxfree_tune.workers.group import WorkerGroup
from taxfree_tuning_db import LookupStep, Table

_GPU_REPETITIONS, _HOST_REPETITIONS = 25, 5


def candidates(
    op: str,
    problem: Problem,
    hardware: Hardware,
    history: TuningHistory,
    only: Sequence[str] | None,
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
    measured = history.candidates(op, fields, hardware)
    taken, skipped = [], []
    for name, variant in known.items():
        if only is not None and name not in ("baseline", *only):
            continue
        config = best_config(variant, problem, hardware, measured)
        if isinstance(config, str):
            skipped.append(Skipped(op, fields, name, {}, "refused", config))
        else:
            taken.append(Candidate(name, config))
    return taken, skipped


def best_config(
    variant: Variant, problem: Problem, hardware: Hardware, measured: Sequence[Candidate] = ()
) -> Mapping[str, Any] | str:
    """The first measured config that is still valid, else the default; or the reason for none."""
    reason = variant.unsupported_reason(problem, hardware)
    if reason is not None:
        return reason
    for candidate in measured:
        config = candidate.config
        if candidate.variant == variant.name and is_legal(variant, problem, hardware, config):
            return config
    first = variant.seed_configs(problem, hardware)
    return first[0] if first else "none of its first configs serves"


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
    problem: Problem
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    choice: Choice
    lookup_trace: tuple[LookupStep, ...]
    bounds: Bounds
    peaks: Peaks
    hardware: Hardware


def run(
    problems: Sequence[Any],
    fabric: str,
    history: TuningHistory,
    only: Sequence[str] | None = None,
) -> Iterator[ProblemResult]:
    """Measure problems, with one group of workers per world size.

    Args:
        problems: of any operations and world sizes.
        fabric: "host", "cuda" or "rocm".
        history: gives the configs, and the records that the dispatcher uses.
        only: variants besides the baseline and the dispatcher's pick; None for all.

    Yields:
        Each result as soon as it is available; closing the iterator ends the workers.

    Raises:
        UsageError: there is no such variant.
        TaskFailed: the fabric cannot be opened, or measuring failed.
        WorkerLost: a worker died or hung.
    """
    for group, problem in on_groups(problems, fabric):
        yield run_one(group, problem, history, only)


def run_one(
    group: WorkerGroup,
    problem: Problem,
    history: TuningHistory,
    only: Sequence[str] | None,
    repetitions: int | None = None,
) -> ProblemResult:
    """Measure one problem on an open group; arguments and errors as of `run`.

    Args:
        repetitions: of each variant and mode, where it should not be the usual number.
    """
    op, hardware = op_of(problem), group.hardware
    taken, skipped = candidates(op, problem, hardware, history, only)
    on_host = hardware.backend == "interpreter"
    if repetitions is None:
        repetitions = _HOST_REPETITIONS if on_host else _GPU_REPETITIONS
    records = [record for record in history.records if record.op == op]
    (measured, *_) = group.call(
        measure_problem,
        deadline_s(hardware),
        op=op,
        problem=dataclasses.asdict(problem),
        candidates=taken,
        records=records,
        repetitions=repetitions,
    )
    configs = {candidate.variant: dict(candidate.config) for candidate in taken}
    rows, failed = _rows(op, problem, measured, configs)
    dispatcher = Dispatcher(Table(user=records), hardware)
    return ProblemResult(
        op,
        problem,
        tuple(rows),
        (*skipped, *failed),
        measured.choice,
        dispatcher.answer(op, problem).lookup_trace,
        measured.bounds,
        measured.peaks,
        hardware,
    )


def _rows(
    op: str, problem: Problem, measured: ProblemTimes, configs: Mapping[str, dict[str, Any]]
) -> tuple[list[Row], list[Skipped]]:
    fields = dataclasses.asdict(problem)
    baseline = measured.outcomes["baseline"].timings
    clocks = [gpu["sm_mhz"] for gpu in measured.gpus if gpu["sm_mhz"] is not None]
    throttled = sorted({reason for gpu in measured.gpus for reason in gpu["throttled"]})
    rows, skipped = [], []
    for name, outcome in measured.outcomes.items():
        if outcome.state != "measured":
            _, config = _ran(name, "graph", measured, configs)
            said = outcome.state, outcome.reason, outcome.wrong
            skipped.append(Skipped(op, fields, name, config, *said))
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
                version=fingerprints.versions(op)[source],
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
    name: str, mode: str, measured: ProblemTimes, configs: Mapping[str, dict[str, Any]]
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
    rates = {_multiplied(result.problem): result.peaks for result in results}
    machine = environment.record(fabric, results[0].hardware)
    machine["peaks"] = [
        dict(multiplied) | _finite(dataclasses.asdict(peak)) for multiplied, peak in rates.items()
    ]
    return Results(
        machine,
        tuple(row for result in results for row in result.rows),
        tuple(skipped for result in results for skipped in result.skipped),
    )


def _multiplied(problem: Problem) -> tuple[tuple[str, Any], ...]:
    """What rates depend on; `x_dtype` where factors have another than the result."""
    x_dtype = getattr(problem, "x_dtype", "same")
    other = () if x_dtype == "same" else (("x_dtype", x_dtype),)
    return ("world_size", problem.world_size), ("dtype", problem.dtype), *other


def _finite(rates: dict[str, float]) -> dict[str, float | None]:
    return {name: rate if math.isfinite(rate) else None for name, rate in rates.items()}
