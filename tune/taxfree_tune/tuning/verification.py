"""Whether a table of records still holds: on this machine, or for a list of problems."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taxfree import fingerprints
from taxfree.errors import TaxfreeError, WorkerLost, WrongResult
from taxfree.problems import format_problem, recorded_problem
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune import devices
from taxfree_tune.measuring.groups import group_for
from taxfree_tune.measuring.results import Mode
from taxfree_tune.measuring.trial import Candidate, Outcome
from taxfree_tune.tuning.together import BASELINE, Together
from taxfree_tune.tuning.winner import LEAST_GAIN, is_faster, measurement_of
from taxfree_tune.workers.group import Workers
from taxfree_tuning_db import Record, Table, stale_reason

_HELD = ("holds", "disturbed")


@dataclass(frozen=True)
class Verification:
    """A record, measured again.

    Args:
        record: as recorded.
        state: "holds"; "slower" where another candidate of the record is now clearly faster than
            its winner; "unknown" where the winner is a variant that does not exist; "disturbed"
            where the GPUs were busy or throttled, which decides nothing; else the state of the
            winner's outcome.
        mode: "graph" or "eager": the mode that decides.
        winner_us: time of the recorded winner now, or None.
        fastest: variant of the fastest candidate now; empty if none was timed.
        reason: one line; empty if a record of today's version holds.
    """

    record: Record
    state: str
    mode: Mode
    winner_us: float | None = None
    fastest: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a part of a JSON document."""
        names = ("state", "mode", "winner_us", "fastest", "reason")
        record = self.record
        return {
            "op": record.op,
            "problem": record.problem,
            "winner": record.winner.variant,
            "recorded_us": record.winner.median_us.get(self.mode),
        } | {name: getattr(self, name) for name in names}


def of_this_machine(records: Iterable[Record], fabric: str) -> list[Record]:
    """Return the records of this kind of device whose problems exist and have enough devices."""
    gpu, most = devices.gpu_name(fabric), devices.most_ranks(fabric)
    return [
        record
        for record in records
        if record.hardware.gpu == gpu
        and (problem := recorded_problem(record.op, record.problem)) is not None
        and problem.world_size <= most
    ]


def sample(records: Sequence[Record], count: int, seed: int) -> list[Record]:
    """Return up to `count` records, ordered by world size; a seed always gives the same."""
    ordered = sorted(records, key=lambda record: record.key)
    taken = random.Random(seed).sample(ordered, min(count, len(ordered)))
    return sorted(taken, key=lambda record: (int(record.problem["world_size"]), record.key))


def verify(records: Sequence[Record], fabric: str) -> Iterator[Verification]:
    """Measure the candidates of records again, those of a record side by side.

    Args:
        records: of this machine, see `of_this_machine`; those of one world size one after another.
        fabric: "host", "cuda" or "rocm".

    Raises:
        TaskFailed, WorkerLost: ranks cannot be started, or a baseline cannot be run.
    """
    for world_size in dict.fromkeys(int(record.problem["world_size"]) for record in records):
        alike = [record for record in records if record.problem["world_size"] == world_size]
        problems = [recorded_problem(record.op, record.problem) for record in alike]
        with Workers(lambda all_=problems: group_for(all_, fabric)) as workers:  # type: ignore[misc]
            together = Together(workers, workers.group().hardware)
            for record, problem in zip(alike, problems, strict=True):
                assert problem is not None
                yield _verdict(record, problem, together)


def _verdict(record: Record, problem: Problem, together: Together) -> Verification:
    versions = fingerprints.versions(record.op)
    stale = stale_reason(record, versions) or ""
    if record.winner.variant not in versions:
        return Verification(record, "unknown", together.mode, reason=stale)
    others = [
        Candidate(measurement.variant, measurement.config)
        for measurement in (record.winner, *record.runners_up)
        if measurement.variant in versions and measurement.variant != BASELINE.variant
    ]
    candidates = [BASELINE, *others]
    outcomes = together.finals(problem, candidates)
    verdict = judged(record, together.mode, list(zip(candidates, outcomes, strict=True)))
    reasons = "; ".join(filter(None, (stale, verdict.reason)))
    return dataclasses.replace(verdict, reason=reasons)


def judged(record: Record, mode: Mode, tried: Sequence[tuple[Candidate, Outcome]]) -> Verification:
    """Judge a record by outcomes of its candidates: the baseline first, then the winner if other.

    The winner's time may differ from the recorded one, with a driver or a clock: what was chosen
    holds as long as no other candidate of the record is clearly faster.
    """
    winner, outcome = tried[0 if record.winner.variant == BASELINE.variant else 1]
    if outcome.state != "measured":
        return Verification(record, outcome.state, mode, reason=outcome.reason)
    measured = [
        measurement_of(record.op, candidate, outcome, mode)
        for candidate, outcome in tried
        if outcome.state == "measured"
    ]
    of_winner = next(
        measurement for measurement in measured if measurement.variant == winner.variant
    )
    best = min(measured, key=lambda measurement: measurement.median_us[mode])
    disturbed = "; ".join(
        dict.fromkeys(outcome.disturbed for _, outcome in tried if outcome.disturbed)
    )
    state, reason = "holds", ""
    if disturbed:
        state, reason = "disturbed", disturbed
    elif is_faster(best, mode, of_winner, mode, LEAST_GAIN):
        state = "slower"
        share = best.median_us[mode] / of_winner.median_us[mode]
        reason = f"{best.variant} takes {share:.0%} of its time"
    return Verification(record, state, mode, of_winner.median_us[mode], best.variant, reason)


def require_held(verdicts: Sequence[Verification]) -> None:
    """Check that all records hold.

    Raises:
        WrongResult, WorkerLost: a winner is wrong, or hangs or crashes.
        TaxfreeError: a record does not hold, or all measurements were disturbed.
    """
    kinds = {"wrong": WrongResult, "hung": WorkerLost, "crashed": WorkerLost}
    broken = [verdict for verdict in verdicts if verdict.state not in _HELD]
    broken.sort(key=lambda verdict: verdict.state not in kinds)
    if broken:
        first = broken[0]
        raise kinds.get(first.state, TaxfreeError)(
            f"{len(broken)} of {len(verdicts)} records no longer hold; first "
            f"{first.record.op} {format_problem(first.record.op, first.record.problem)}: "
            f"{first.state}: {first.reason}",
            "`taxfree tune` measures them anew; `taxfree db prune` deletes unknown variants",
        )
    if all(verdict.state == "disturbed" for verdict in verdicts):
        raise TaxfreeError(f"nothing could be verified: {verdicts[0].reason}", "free the GPUs")


# -- problems without a record --


@dataclass(frozen=True)
class Lacking:
    """A problem without a record of today's version.

    Args:
        problem: the problem.
        reason: "no record", the version that its record was measured with, or who lent its winner.
    """

    problem: Problem
    reason: str


def lacking(problems: Iterable[Problem], table: Table, gpu: str | None) -> list[Lacking]:
    """Return the problems without a record of today's version for a GPU; measures nothing."""
    of_gpu: dict[tuple[str, str], list[Record]] = {}
    for key in [record.key for record in table.records() if record.hardware.gpu == gpu]:
        for record in table.layers(key):
            of_gpu.setdefault(_place(record.op, record.problem), []).append(record)
    lacking_records = []
    for problem in problems:
        op = op_of(problem)
        versions = fingerprints.versions(op)
        records = of_gpu.get(_place(op, dataclasses.asdict(problem)), [])
        stale = [
            f"{record.lender} lent its winner" if record.is_lent else stale_reason(record, versions)
            for record in records
        ]
        if None not in stale:
            lacking_records.append(Lacking(problem, next(filter(None, stale), "no record")))
    return lacking_records


def _place(op: str, problem: Mapping[str, Any]) -> tuple[str, str]:
    return op, repr(sorted(problem.items()))
