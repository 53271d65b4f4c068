"""Views of records and look-ups of the tuning database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from taxfree.problems import format_problem
from taxfree_cli.output import folded, print_lines, print_table
from taxfree_cli.record_map import SIZES, Cell, print_map, winner_text
from taxfree_kernels.variant import Problem, op_of
from taxfree_tuning_db import (
    Change,
    Difference,
    HardwareFingerprint,
    LookUp,
    Measurement,
    Record,
    TrialRecord,
)

if TYPE_CHECKING:
    from taxfree_tune.tuning.verification import Verification


def words(values: Mapping[str, Any]) -> str:
    """`block_m=16 stages=2`: a config or a fingerprint on one line."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def problem_words(problem: Problem) -> str:
    """A problem as one would type it, after its operation."""
    op = op_of(problem)
    return f"{op} {format_problem(op, asdict(problem))}"


def print_list(records: Iterable[Record]) -> None:
    """One line per record."""
    columns = ["op", "problem", "gpu", "winner", "us", "library us", "speed-up", "source"]
    print_table(columns, map(_row, in_order(records)))


def in_order(records: Iterable[Record]) -> list[Record]:
    """Records by operation and GPU, and by their numbers: the sizes last."""
    return sorted(records, key=_place)


def _place(record: Record) -> tuple[object, ...]:
    fields = sorted(record.problem.items(), key=lambda field: (field[0] in SIZES, field[0]))
    values = [(name, (0, value) if isinstance(value, int) else (1, str(value)))
              for name, value in fields]  # fmt: skip
    return record.op, record.hardware.gpu, record.problem["world_size"], values


def print_winners(records: Sequence[Record]) -> None:
    """Print the winners as a map, and how many records there are by source."""
    print_map(
        Cell(record.op, record.problem, record.hardware.gpu, _winner_text(record))
        for record in in_order(records)
    )
    counts = Counter(map(_source, records))
    sources = ", ".join(f"{count} {source}" for source, count in counts.items())
    print_lines([f"records: {sources}; --all shows their times" if counts else "records: none"])


def print_record(record: Record) -> None:
    """One record in full."""
    print_lines(
        folded(
            [
                f"{record.op} {format_problem(record.op, record.problem)}",
                f"  hardware  {words(asdict(record.hardware))}",
                f"  software  {words(asdict(record.software))}",
                f"  from      {words(record.provenance)}",
                f"  search    {record.trials} trials in {record.seconds_spent:.0f} s",
            ]
        )
    )
    measured = {"winner": record.winner, "library": record.baseline}
    measured |= {
        f"no. {rank}": measurement for rank, measurement in enumerate(record.runners_up, start=2)
    }
    columns = ["", "variant", "mode", "us", "iqr", "runs", "error"]
    print_table(
        columns, (row for role, measurement in measured.items() for row in _rows(role, measurement))
    )
    print_lines(
        folded(
            f"  {role:8} {words(measurement.config)}"
            for role, measurement in measured.items()
            if measurement.config
        )
    )


def print_trials(trials: Iterable[TrialRecord]) -> None:
    """One line per trial, in the order in which they were tried."""
    columns = ["trial", "variant", "us", "config", "reason"]
    print_table(columns, (_trial_row(trial) for trial in trials))


def look_up_json(
    problem: Mapping[str, Any], hardware: HardwareFingerprint, answer: LookUp
) -> dict[str, Any]:
    """A look-up as a part of a JSON document."""
    return {"problem": dict(problem), "hardware": asdict(hardware)} | asdict(answer)


def print_look_up(
    op: str, problem: Mapping[str, Any], hardware: HardwareFingerprint, answer: LookUp
) -> None:
    """The lookup trace of one look-up, and its outcome."""
    lines = [
        f"{op} {format_problem(op, problem)} on {hardware.gpu}",
        *(
            f"  {'+' if step.found else '-'} {step.looked_for}: {step.why}"
            for step in answer.lookup_trace
        ),
        f"  = {_outcome(answer)}",
    ]
    print_lines(folded(lines))


def difference_json(difference: Difference) -> dict[str, Any]:
    """A difference of two tables as a part of a JSON document."""
    sides = {"before": difference.before, "after": difference.after}
    documents = {name: record and record.to_json() for name, record in sides.items()}
    named = {"change": difference.change, "key": difference.record.key}
    return named | {"differing": difference.differing} | documents


def print_differences(differences: Sequence[Difference]) -> None:
    """One line per record that differs, and how many there are of each kind."""
    columns = ["change", "op", "problem", "gpu", "before", "us", "after", "us now", "differs in"]
    if differences:
        print_table(columns, map(_difference_row, differences))
    counts = Counter(difference.change for difference in differences)
    print_lines([", ".join(f"{counts[kind]} {kind}" for kind in get_args(Change))])


def print_verdicts(verdicts: Iterable[Verification]) -> None:
    """One line per record that was measured again."""
    columns = ["state", "op", "problem", "winner", "recorded us", "us", "fastest now", "why"]
    print_table(columns, map(_verdict_row, verdicts))


def _difference_row(difference: Difference) -> Iterable[object]:
    record = difference.record
    yield from (difference.change, record.op, format_problem(record.op, record.problem))
    yield record.hardware.gpu
    for side in (difference.before, difference.after):
        winner = side and side.winner
        yield winner and f"{winner_text(winner.variant)} {words(winner.config)}".rstrip()
        yield winner and min(winner.median_us.values())
    yield ", ".join(difference.differing)


def _verdict_row(verdict: Verification) -> Sequence[object]:
    record, winner = verdict.record, verdict.record.winner
    return (
        verdict.state,
        record.op,
        format_problem(record.op, record.problem),
        winner_text(winner.variant),
        winner.median_us.get(verdict.mode),
        verdict.winner_us,
        winner_text(verdict.fastest),
        verdict.reason,
    )


def _outcome(answer: LookUp) -> str:
    if answer.record is None or answer.kind == "refused":
        return f"{answer.kind}: {_library(answer)}"
    winner, kind = answer.record.winner, answer.kind
    whose = f"{kind}: {answer.record.lender}" if kind == "lent" else kind
    outcome = f"{whose}: {winner_text(winner.variant)} {words(winner.config)}".rstrip()
    if not answer.soft_mismatches:
        return outcome
    return f"{outcome} (measured with another {', '.join(answer.soft_mismatches)})"


def _library(answer: LookUp) -> str:
    """What runs of the library: one path, or two."""
    named = {
        mode: "the library" if variant == "baseline" else f"{variant} {words(config)}".rstrip()
        for mode, (variant, config) in answer.library.items()
    }
    if len(set(named.values())) < 2:
        return f"{named.get('graph', 'the library')} runs"
    return f"{named['graph']} runs in graphs, {named['eager']} in eager calls"


def _winner_text(record: Record) -> str:
    text = winner_text(record.winner.variant, _speed_up(record))
    return f"{text} ({_source(record)})" if record.is_lent else text


def _speed_up(record: Record) -> float | None:
    """Of the winner over the library; None for times of interpreted kernels, which mean nothing."""
    ours = _best_us(record.winner)
    if not ours or record.hardware.link == "shared memory":
        return None
    return _best_us(record.baseline) / ours


def _row(record: Record) -> list[object]:
    ours, baseline = _best_us(record.winner), _best_us(record.baseline)
    return [
        record.op,
        format_problem(record.op, record.problem),
        record.hardware.gpu,
        winner_text(record.winner.variant),
        ours,
        baseline,
        _speed_up(record),
        _source(record),
    ]


def _source(record: Record) -> str:
    return f"lent: {record.lender}" if record.is_lent else record.provenance.get("source", "")


def _rows(role: str, measured: Measurement) -> list[list[object]]:
    error = measured.relative_error
    return [
        [
            role,
            measured.variant,
            mode,
            median,
            measured.iqr_us[mode],
            measured.samples,
            "" if error is None else f"{error:.2g}",
        ]
        for mode, median in measured.median_us.items()
    ]


def _trial_row(trial: TrialRecord) -> list[object]:
    us = min(trial.median_us.values(), default=None)
    return [trial.state, trial.variant, us, words(trial.config), trial.reason]


def _best_us(measured: Measurement) -> float:
    return min(measured.median_us.values())
