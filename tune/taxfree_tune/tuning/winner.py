"""Turns measurements of a problem, by the tuner or by `bench`, into a record.

The fastest wins if it clearly beats the library.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from taxfree import fingerprints
from taxfree.errors import UsageError
from taxfree.problems import format_problem, recorded_problem
from taxfree_kernels.variant import operation_names
from taxfree_tune.measuring.disturbance import SPOILING
from taxfree_tune.measuring.results import DISPATCH, Mode, Results, Row, by_problem
from taxfree_tune.measuring.trial import Candidate, Outcome
from taxfree_tuning_db import (
    OF_A_BENCH,
    HardwareFingerprint,
    InvalidRecord,
    Measurement,
    Record,
    SoftwareFingerprint,
    TrialRecord,
)

LEAST_GAIN = 0.03  # by which a winner must beat the baseline to be adopted
_LEAST_CHANGE = 0.02  # by which it must beat the recorded winner
_STANDARD_ERRORS = 3  # of a difference of medians, by which that must differ from 0


def record_of(
    op: str,
    problem: dict[str, Any],
    hardware: HardwareFingerprint,
    software: SoftwareFingerprint,
    measured: Sequence[Measurement],
    trials: int,
    seconds: float,
    created: str,
    incumbent: Candidate | None = None,
    **provenance: str,
) -> Record:
    """The record of a problem's measurements, with the winner.

    Args:
        measured: measurements taken together, the baseline's first.
        trials: candidates tried.
        seconds: time spent on trying them.
        created: when, as ISO time.
        incumbent: the recorded winner, which stays unless another is clearly faster.
        provenance: more fields of the record's provenance.
    """
    baseline, *others = measured
    mode = _deciding_mode(baseline.median_us)
    ranked = sorted(others, key=lambda measurement: measurement.median_us[mode])
    winner = _winner(baseline, ranked, mode, incumbent)
    origin = {"source": "user", "created": created, "taxfree": software.taxfree}
    return Record(
        op=op,
        problem=problem,
        hardware=hardware,
        software=software,
        winner=winner,
        baseline=baseline,
        runners_up=tuple(measurement for measurement in ranked if measurement is not winner),
        trials=trials,
        seconds_spent=seconds,
        provenance=origin | provenance,
    )


def measurement_of(op: str, candidate: Candidate, outcome: Outcome, mode: Mode) -> Measurement:
    """The measurement of a candidate that was timed.

    Args:
        mode: that whose samples count.
    """
    return Measurement(
        variant=candidate.variant,
        config=dict(candidate.config),
        version=fingerprints.versions(op)[candidate.variant],
        median_us={name: timing.median_us for name, timing in outcome.timings.items()},
        iqr_us={name: timing.iqr_us for name, timing in outcome.timings.items()},
        samples=len(outcome.timings[mode].samples_us),
        relative_error=outcome.relative_error,
    )


def trial_of(op: str, candidate: Candidate, outcome: Outcome) -> TrialRecord:
    """What a database keeps of a candidate that was tried."""
    return TrialRecord(
        variant=candidate.variant,
        config=dict(candidate.config),
        state=outcome.state,  # type: ignore[arg-type]
        reason=f"disturbed: {outcome.disturbed}" if outcome.disturbed else outcome.reason,
        median_us={mode: timing.median_us for mode, timing in outcome.timings.items()},
        seconds=outcome.seconds,
        version=fingerprints.versions(op)[candidate.variant],
    )


@dataclass(frozen=True)
class Adopted:
    """The records made from a bench's results.

    Args:
        records: one for each problem with sufficient measurements.
        left_out: (problem, why) for the others.
    """

    records: tuple[Record, ...]
    left_out: tuple[tuple[str, str], ...]


def adopted(results: Results) -> Adopted:
    """The results of `bench` as records, marked as such.

    Raises:
        UsageError: the file does not say where and when it was measured, or is invalid.
    """
    records, left_out = [], []
    try:
        machine = results.environment
        hardware = HardwareFingerprint(**machine["hardware"])
        software = SoftwareFingerprint(**machine["software"])
        for rows in by_problem(results.rows):
            op, problem = rows[0].op, rows[0].problem
            measured = _measured(rows) if op in operation_names() else []
            reason = _too_little(rows, measured)
            if reason is None:
                record = record_of(
                    op, problem, hardware, software, measured, len(measured) - 1, 0.0,
                    machine["created"], method=OF_A_BENCH,
                )  # fmt: skip
                reason = _is_better_off_without(record, rows)
            if reason is None:
                records.append(record)
            else:
                left_out.append((f"{op} {format_problem(op, problem)}", reason))
    except (KeyError, TypeError) as error:
        raise UsageError(f"the environment is incomplete: {error}", "see bench --out") from error
    except InvalidRecord as error:
        raise UsageError(error.message, "see bench --out") from error
    return Adopted(tuple(records), tuple(left_out))


def _too_little(rows: Sequence[Row], measured: Sequence[Measurement]) -> str | None:
    """Reason that these rows are not sufficient for a record, or None."""
    op = rows[0].op
    if op not in operation_names() or recorded_problem(op, rows[0].problem) is None:
        return "not a problem of this version"
    if not measured or measured[0].variant != "baseline":
        return "this version's baseline was not measured"
    if not measured[1:]:
        return "no other variant is of this version's kernels"
    if spoiled := {cause for row in rows for cause in row.throttled if cause in SPOILING}:
        return f"measured on a GPU slowed by {', '.join(sorted(spoiled))}"
    mode = _deciding_mode(measured[0].median_us)
    best, known = (
        min(measurement.median_us[mode] for measurement in measured),
        {m.variant for m in measured},
    )
    for row in rows:
        if row.variant not in known | {DISPATCH} and row.mode == mode and row.median_us < best:
            return f"{row.variant} was faster, and has changed since"
    return None


def _is_better_off_without(record: Record, rows: Sequence[Row]) -> str | None:
    """Reason to keep a transferred config rather than record the baseline as winner, or None."""
    if record.winner != record.baseline:
        return None
    mode, best = _deciding_mode(record.baseline.median_us), min(record.baseline.median_us.values())
    for row in rows:
        if (row.variant, row.mode) == (DISPATCH, mode) and row.median_us < best:
            picked = row.config["variant"]
            if picked != "baseline":
                return f"the transferred config that dispatch runs, of {picked}, is already faster"
    return None


def _measured(rows: Sequence[Row]) -> list[Measurement]:
    """Unchanged variants that were timed in all modes; the baseline first, if it is among them."""
    modes = {row.mode for row in rows}
    measurements = []
    for variant, version in fingerprints.versions(rows[0].op).items():
        by_mode = {row.mode: row for row in rows if row.variant == variant}
        if by_mode.keys() != modes:
            continue
        row = by_mode[_deciding_mode(modes)]
        if row.version != version:
            continue
        measurements.append(
            Measurement(
                variant=variant,
                config=row.config,
                version=version,
                median_us={mode: times.median_us for mode, times in by_mode.items()},
                iqr_us={mode: times.iqr_us for mode, times in by_mode.items()},
                samples=len(row.samples_us),
                relative_error=row.relative_error,
            )
        )
    return measurements


def _deciding_mode(modes: Collection[str]) -> Mode:
    """The mode whose times decide: graphs, which engines use, if there are any."""
    return "graph" if "graph" in modes else "eager"


def _winner(
    baseline: Measurement, ranked: Sequence[Measurement], mode: Mode, incumbent: Candidate | None
) -> Measurement:
    """The measurement to adopt.

    Without the incumbent's advantage, noise would choose another one of equally fast candidates
    each time.
    """
    # an engine would run the baseline in the faster mode
    fastest = min(baseline.median_us, key=lambda mode: baseline.median_us[mode])
    for measurement in ranked:
        if incumbent is not None and is_of(measurement, incumbent):
            is_kept = not is_faster(ranked[0], mode, measurement, mode, _LEAST_CHANGE)
            if is_kept and measurement.median_us[mode] <= baseline.median_us[fastest]:
                return measurement
    if ranked and is_faster(ranked[0], mode, baseline, fastest, LEAST_GAIN):
        return ranked[0]
    return baseline


def is_of(measured: Measurement, candidate: Candidate) -> bool:
    """Whether a measurement is of a candidate."""
    return (measured.variant, measured.config) == (candidate.variant, dict(candidate.config))


def is_faster(
    one: Measurement, mode: str, other: Measurement, other_mode: str, least_gain: float
) -> bool:
    """Whether a measurement is faster than another one by a share of its time and the noise.

    Under a power cap samples are 10 % apart, their medians are not.
    """
    best = other.median_us[other_mode]
    medians = ((each.iqr_us[of], each.samples) for each, of in ((one, mode), (other, other_mode)))
    return best - one.median_us[mode] > max(least_gain * best, noise(*medians))


def noise(*medians: tuple[float, int]) -> float:
    """By how much medians must differ to be different, each with its quartiles' distance and count.

    A normal distribution's median has a standard error of about the former by the latter's root.
    """
    errors = (iqr / math.sqrt(samples) for iqr, samples in medians)
    return _STANDARD_ERRORS * math.hypot(*errors)
