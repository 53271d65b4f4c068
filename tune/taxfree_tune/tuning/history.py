"""The user's tuning database and the shipped records: problems, and their best candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taxfree import fingerprints
from taxfree_kernels.hardware import Hardware
from taxfree_tune.measuring.trial import Candidate, key
from taxfree_tuning_db import (
    Database,
    DatabaseMissing,
    Record,
    TrialRecord,
    record_key,
    shipped_records,
)


@dataclass(frozen=True)
class TuningHistory:
    """Records and trials of earlier tuning.

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
        """Measured candidates of a problem: winner and runners-up, then trials, the fastest first.

        A candidate whose last trial failed is left out.
        """
        fingerprint = fingerprints.hardware_fingerprint(hardware)
        last = self._last_trials(op, record_key(op, problem, fingerprint))
        records = [
            record
            for record in self.records
            if (record.op, record.problem) == (op, problem) and record.hardware.is_same(fingerprint)
        ]
        measured = [measurement for r in records for measurement in (r.winner, *r.runners_up)]
        trials = [trial for trial in last.values() if trial.state == "measured"]
        trials.sort(key=lambda trial: min(trial.median_us.values()))
        candidates = [
            Candidate(measurement.variant, measurement.config) for measurement in measured
        ]
        candidates += [Candidate(trial.variant, trial.config) for trial in trials]
        failed = {text for text, trial in last.items() if trial.state != "measured"}
        return [candidate for candidate in candidates if key(candidate) not in failed]

    def _last_trials(self, op: str, record_key: str) -> dict[str, TrialRecord]:
        """The last trial of each candidate that holds today."""
        if self.path is None:
            return {}
        with Database(self.path, read_only=True) as database:
            trials = trials_that_hold(database, op, record_key)
            return {key(candidate): trial for candidate, trial in trials}


def trials_that_hold(
    database: Database, op: str, record_key: str
) -> Iterator[tuple[Candidate, TrialRecord]]:
    """The trials of earlier runs that hold today."""
    versions = fingerprints.versions(op)
    for trial in database.trials(record_key):
        is_disturbed = trial.state == "measured" and trial.reason
        if trial.version == versions.get(trial.variant) and not is_disturbed:
            yield Candidate(trial.variant, trial.config), trial
