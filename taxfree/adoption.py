"""What becomes a record: what was measured of a problem, by the tuner or by `bench`.

The fastest wins if it clearly beats the library.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from taxfree import identity
from taxfree.errors import UsageError
from taxfree.results import Mode, Results, Row, by_problem
from taxfree_tuning_db import (
    HardwareFingerprint,
    InvalidRecord,
    Measurement,
    Record,
    SoftwareFingerprint,
)

LEAST_GAIN = 0.03  # by which a winner must beat the baseline to be adopted


def record_of(
    op: str,
    problem: dict[str, Any],
    hardware: HardwareFingerprint,
    software: SoftwareFingerprint,
    measured: Sequence[Measurement],
    trials: int,
    seconds: float,
    created: str,
) -> Record:
    """What was measured of a problem, with the winner.

    Args:
        measured: together; the baseline first.
        trials: candidates tried.
        seconds: that trying took.
        created: when, as ISO time.
    """
    baseline, *others = measured
    mode = _deciding_mode(baseline.median_us)
    ranked = sorted(others, key=lambda each: each.median_us[mode])
    winner = ranked[0] if ranked and _beats(ranked[0], baseline, mode) else baseline
    return Record(
        op=op,
        problem=problem,
        hardware=hardware,
        software=software,
        winner=winner,
        baseline=baseline,
        runners_up=tuple(each for each in ranked if each is not winner),
        trials=trials,
        seconds_spent=seconds,
        provenance={"source": "user", "created": created, "taxfree": software.taxfree},
    )


def records_of(results: Results) -> list[Record]:
    """What `bench` has measured, as records; rows of kernels that have changed since do not count.

    Raises:
        UsageError: it does not say where it was measured, or holds no record for another reason.
    """
    try:
        machine = results.environment
        hardware = HardwareFingerprint(**machine["hardware"])
        software = SoftwareFingerprint(**machine["software"])
        return [
            record_of(
                rows[0].op, rows[0].problem, hardware, software, measured,
                trials=len(measured), seconds=0.0, created=machine["created"],
            )
            for rows in by_problem(results.rows)
            if (measured := _measured(rows)) and measured[0].variant == "baseline"
        ]  # fmt: skip
    except (KeyError, TypeError) as error:
        raise UsageError(f"the environment is incomplete: {error}", "see bench --out") from error
    except InvalidRecord as error:
        raise UsageError(error.message, "see bench --out") from error


def _measured(rows: Sequence[Row]) -> list[Measurement]:
    """What of a problem was timed in all modes; the baseline first if it was."""
    modes = {row.mode for row in rows}
    found = []
    for variant, kernel_hash in identity.kernel_hashes(rows[0].op).items():
        by_mode = {row.mode: row for row in rows if row.variant == variant}
        if by_mode.keys() != modes:
            continue
        row = by_mode[_deciding_mode(modes)]
        if row.kernel_hash != kernel_hash:
            continue
        found.append(
            Measurement(
                variant=variant,
                config=row.config,
                kernel_hash=kernel_hash,
                median_us={mode: each.median_us for mode, each in by_mode.items()},
                iqr_us={mode: each.iqr_us for mode, each in by_mode.items()},
                samples=len(row.samples_us),
                relative_error=row.relative_error,
            )
        )
    return found


def _deciding_mode(modes: Collection[str]) -> Mode:
    """The mode whose times decide: that of engines, where there are graphs."""
    return "graph" if "graph" in modes else "eager"


def _beats(winner: Measurement, baseline: Measurement, mode: Mode) -> bool:
    best = min(baseline.median_us.values())  # an engine would pick the faster mode
    noise = max(winner.iqr_us[mode], baseline.iqr_us[mode])
    return best - winner.median_us[mode] > max(LEAST_GAIN * best, 2 * noise)
