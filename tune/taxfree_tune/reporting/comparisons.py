"""Our variants beside the library, problem by problem: the rows of the map and of the losses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from taxfree import fingerprints
from taxfree.problems import heading, recorded_problem
from taxfree_kernels.variant import is_library
from taxfree_tune.cost.machines import MACHINES
from taxfree_tune.cost_model import bounds_of
from taxfree_tune.measuring.results import DISPATCH, Results, Row, by_problem
from taxfree_tune.reporting.sources import Recorded, Sources, machine_of
from taxfree_tuning_db import Measurement

EVEN = 0.05  # a smaller difference from the library counts as none


@dataclass(frozen=True)
class Timed:
    """A variant's time in its decisive mode, in microseconds.

    Args:
        variant, config, mode: of the time.
        us: median.
        is_current: whether the variant's kernels are those of today.
    """

    variant: str
    config: Mapping[str, Any]
    mode: str
    us: float
    is_current: bool


@dataclass(frozen=True)
class Comparison:
    """One problem on one machine.

    Args:
        op, problem: the operation and the problem's fields.
        machine: product name of the GPU.
        library: the fastest way of the library, in a graph or eager.
        ours: our fastest variant, in a graph if there are any; None if none was measured.
        dispatch: what the dispatcher ran; None if that was not measured.
        bound_us: least time that the machine allows; None if it is not known.
        is_bound_modelled: whether it is from a data sheet instead of measured rates.
        created: ISO time of the measurement.
        source: where it is from.
    """

    op: str
    problem: Mapping[str, Any]
    machine: str
    library: Timed
    ours: Timed | None
    dispatch: Timed | None
    bound_us: float | None
    is_bound_modelled: bool
    created: str
    source: str

    @property
    def key(self) -> str:
        """The same for comparisons of one problem on one kind of machine."""
        return repr((self.machine, self.op, sorted(self.problem.items())))


def comparisons(sources: Sources) -> list[Comparison]:
    """The newest comparison of each problem, by operation, numbers of GPUs, and size.

    A bench comes before a record that was made from it: it measured what dispatch ran at the time.
    Of a record without a measured bound the bound is that of a bench, else modelled.
    """
    every = [*map(_of_record, sources.records), *_of_benches(sources.benches)]
    bounds = {
        comparison.key: comparison.bound_us
        for comparison in every
        if comparison.bound_us is not None
    }
    newest: dict[str, Comparison] = {}
    for comparison in sorted(every, key=lambda comparison: comparison.created):
        newest[comparison.key] = comparison
    compared = [
        _with_bound(comparison, bounds.get(comparison.key)) for comparison in newest.values()
    ]
    return sorted(compared, key=_order)


def _order(comparison: Comparison) -> tuple[Any, ...]:
    size = comparison.problem[fingerprints.size_field(comparison.op)]
    return (
        comparison.op,
        _by_numbers(family(comparison)),
        comparison.problem["world_size"],
        size,
        comparison.machine,
    )


def _by_numbers(text: str) -> list[str | int]:
    """A text that is sorted by the numbers in it: n=3584 before n=11008."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def family(comparison: Comparison) -> str:
    """The fields of a problem that neither its size nor the number of GPUs is."""
    return family_of(comparison.op, comparison.problem)


def family_of(op: str, problem: Mapping[str, Any]) -> str:
    """As above, of a problem's fields."""
    left_out = ("world_size", fingerprints.size_field(op))
    return heading(op, {name: value for name, value in problem.items() if name not in left_out})


def _of_record(recorded: Recorded) -> Comparison:
    record = recorded.record
    modes = record.baseline.median_us
    mode = "graph" if "graph" in modes else "eager"
    versions = fingerprints.versions(record.op)
    measured = {
        measurement.variant: measurement
        for measurement in (*record.runners_up[::-1], record.winner)
    }
    measured["baseline"] = record.baseline

    def timed(measurement: Measurement, in_mode: str) -> Timed:
        us, is_current = (
            measurement.median_us[in_mode],
            measurement.version == versions.get(measurement.variant),
        )
        return Timed(measurement.variant, measurement.config, in_mode, us, is_current)

    libraries = [
        measurement for name, measurement in measured.items() if is_library(record.op, name)
    ]
    others = [measurement for measurement in measured.values() if measurement not in libraries]
    return Comparison(
        record.op,
        record.problem,
        record.hardware.gpu,
        library=_fastest([timed(library, m) for library in libraries for m in library.median_us]),
        ours=_fastest([timed(other, mode) for other in others if mode in other.median_us], None),
        dispatch=timed(record.winner, mode),
        bound_us=None,
        is_bound_modelled=False,
        created=record.provenance.get("created", ""),
        source=recorded.source,
    )


def _of_benches(benches: Sequence[tuple[str, Results]]) -> Iterator[Comparison]:
    for source, results in benches:
        machine, created = machine_of(results.environment), results.environment.get("created", "")
        for rows in by_problem(results.rows):
            if recorded_problem(rows[0].op, rows[0].problem) is None:
                continue
            libraries = [row for row in rows if _is_library(row)]
            if not libraries:
                continue
            mode = "graph" if any(row.mode == "graph" for row in rows) else "eager"
            decisive = [row for row in rows if row.mode == mode]
            picked = [row for row in decisive if row.variant == DISPATCH]
            ours = [row for row in decisive if row not in picked and not _is_library(row)]
            yield Comparison(
                rows[0].op,
                rows[0].problem,
                machine,
                library=_fastest(list(map(_timed, libraries))),
                ours=_fastest(list(map(_timed, ours)), None),
                dispatch=_fastest(list(map(_timed, picked)), None),
                bound_us=rows[0].t_bound_us,
                is_bound_modelled=False,
                created=created,
                source=source,
            )


def _is_library(row: Row) -> bool:
    """Whether a row is the library's: its variant says so, or it is none of ours."""
    return row.variant != DISPATCH and (row.is_library or row.version is None)


def _timed(row: Row) -> Timed:
    config = dict(row.config)
    variant = str(config.pop("variant")) if row.variant == DISPATCH else row.variant
    version = fingerprints.versions(row.op).get(variant)
    return Timed(variant, config, row.mode, row.median_us, row.version == version)


def _fastest(candidates: Sequence[Timed], *default: Any) -> Any:
    return min(candidates, key=lambda call: call.us) if candidates or not default else default[0]


def _with_bound(comparison: Comparison, measured_us: float | None) -> Comparison:
    if comparison.bound_us is not None:
        return comparison
    if measured_us is not None:
        return replace(comparison, bound_us=measured_us)
    machine = next((m for m in MACHINES.values() if m.hardware.name == comparison.machine), None)
    problem = recorded_problem(comparison.op, comparison.problem)
    if machine is None or problem is None:
        return comparison
    return replace(
        comparison, bound_us=bounds_of(machine, problem).t_bound_us, is_bound_modelled=True
    )


# -- rows of figures and tables --


def rows(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """A row per problem, with words for tables and hovers; ratios are of the library's time.

    Where there are several machines, or times are modelled, a family says of which machine it is.
    """
    rows = [_row(comparison) for comparison in compared]
    if len({row["machine"] for row in rows}) > 1:
        for row in rows:
            row["family"] += f", {row['machine']}"
    return rows


def _row(comparison: Comparison) -> dict[str, Any]:
    size_field = fingerprints.size_field(comparison.op)
    row: dict[str, Any] = {
        "op": comparison.op,
        "gpus": comparison.problem["world_size"],
        "machine": comparison.machine,
        "family": family(comparison),
        "size": comparison.problem[size_field],
        "size_field": size_field,
        "library": f"{comparison.library.variant}, {comparison.library.mode}",
        "library_us": _us(comparison.library.us),
        "bound": "modelled" if comparison.is_bound_modelled else "at measured rates",
        "bound_us": _us(comparison.bound_us),
        "measured": comparison.created[:10],
        "source": comparison.source,
        "kernel": "current",
    }
    for name, timed in (("ours", comparison.ours), ("dispatch", comparison.dispatch)):
        row[name] = "not measured" if timed is None else timed.variant
        row[f"{name}_us"] = None if timed is None else _us(timed.us)
        row[f"{name}_x"] = None if timed is None else round(comparison.library.us / timed.us, 3)
    if comparison.ours is not None:
        row["config"] = " ".join(
            f"{name}={value}" for name, value in comparison.ours.config.items()
        )
        row["kernel"] = "current" if comparison.ours.is_current else "changed since"
    return row


def _us(time: float | None) -> float | None:
    """Four digits are more than a measurement has."""
    return None if time is None else float(f"{time:.4g}")


def verdict(ratio: float) -> str:
    """Whether a ratio of times means faster, slower, or neither."""
    if abs(ratio - 1) <= EVEN:
        return "even"
    return "faster" if ratio > 1 else "slower"
