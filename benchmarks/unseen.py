"""Tests predictions for sizes without records, by leave-one-out validation. Needs no GPU.

    python -m benchmarks.unseen           # a table
    python -m benchmarks.unseen --json    # the same rows, the settings and a summary
    python -m benchmarks.unseen --write   # what dispatch reads (prediction.json), and the document
    python -m benchmarks.unseen --refit   # fit the cost model without each family; minutes

A family is all problems of the same n and k (attention: heads and their sizes). For each family
with results or records, all its records are withheld, and each method of
``taxfree._runtime.prediction`` predicts the variant and config in graphs. If exactly these were
measured on the problem, the prediction is judged: against the fastest measurement there, and
against the library's fastest path. Times are relative to the baseline of their own run, and
averaged over runs. Other predictions count as unmeasured, without a verdict. Beyond the reach of
all other records nothing is predicted, and the baseline runs.

A method serves a setting (an operation, and all fields that a prediction does not cross) if at
least two families were left out, and in each of them at least half of the predictions were
measured, their geometric mean reaches 95 % of the best, and none is below 97 % of the library's
speed.

The cost model was also fitted to rows of some families. With `--refit` it is fitted again for each
family, without its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import model_error
from benchmarks.documents import ROOT, is_current, table, with_blocks, write_changed
from taxfree._runtime.prediction import (
    METHODS,
    Evidence,
    Prediction,
    distance,
    fixed_fields,
    predict,
)
from taxfree.cost_model import H200, Machine
from taxfree.fingerprints import interpolated_fields, versions
from taxfree.measuring.results import DISPATCH, by_problem, load
from taxfree.shapes import recorded_problem
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import is_library, operation, operation_names
from taxfree_tuning_db import (
    OF_A_BENCH,
    HardwareFingerprint,
    Record,
    Table,
    shipped_records,
)

RESULTS = ROOT / "benchmarks/results"
SHOWN = ROOT / "taxfree/_runtime/prediction.json"
DOCUMENT = ROOT / "docs/cost-model.md"
LEAST_OF_BEST = 0.95
LEAST_OF_LIBRARY = 0.97
LEAST_MEASURED = 0.5
_MODE = "graph"

Family = tuple[Any, ...]


@dataclass
class ProblemTimes:
    """The measurements of one problem.

    Args:
        op, problem: the operation, and the problem's fields.
        hardware: of the measurement.
        times: variant and config -> its times over the baseline's, one per run.
    """

    op: str
    problem: dict[str, Any]
    hardware: HardwareFingerprint
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def family(self) -> Family:
        """The fields across which a prediction goes."""
        return tuple(self.problem[name] for name in operation(self.op).family_fields)

    def add_run(self, run: Mapping[str, float]) -> None:
        """Add the times of variants that were timed together, the baseline among them."""
        for name, us in run.items():
            self.times.setdefault(name, []).append(us / run[_name("baseline", {})])

    def time(self, variant: str, config: Mapping[str, Any]) -> float | None:
        """The mean over runs of a variant's time over the baseline's."""
        times = self.times.get(_name(variant, config))
        return None if times is None else statistics.fmean(times)

    def best(self, of_library: bool = False) -> float:
        """The shortest relative time of all variants, or of the library's."""
        return min(
            statistics.fmean(times)
            for name, times in self.times.items()
            if not of_library or is_library(self.op, json.loads(name)[0])
        )


def _name(variant: str, config: Mapping[str, Any]) -> str:
    # a config from before a meta-parameter was measured with the parameter off
    on = {name: value for name, value in config.items() if value is not False}
    return json.dumps([variant, on], sort_keys=True)


def measured(results: Path, records: Iterable[Record]) -> list[ProblemTimes]:
    """All measurements of current kernels in graphs, by problem."""
    found: dict[str, ProblemTimes] = {}

    def add(new: ProblemTimes, run: Mapping[str, float]) -> None:
        if recorded_problem(new.op, new.problem) and _name("baseline", {}) in run:
            key = json.dumps([new.op, new.problem, new.hardware.gpu], sort_keys=True)
            found.setdefault(key, new).add_run(run)

    for path in sorted(results.glob("*/*-x[0-9]*.json")):
        if path.parent.name not in operation_names():
            continue
        file = load(path)
        hardware = HardwareFingerprint(**file.environment["hardware"])
        for rows in by_problem(file.rows):
            run = {}
            for row in rows:
                config = dict(row.config)
                variant = config.pop("variant") if row.variant == DISPATCH else row.variant
                if row.mode == _MODE and is_current(row):
                    run.setdefault(_name(variant, config), row.median_us)
            add(ProblemTimes(rows[0].op, rows[0].problem, hardware), run)
    for record in records:
        if record.provenance.get("method") == OF_A_BENCH:  # of a result file
            continue
        current = versions(record.op) if record.op in operation_names() else {}
        run = {
            _name(each.variant, each.config): each.median_us[_MODE]
            for each in (record.baseline, record.winner, *record.runners_up)
            if each.version == current.get(each.variant) and _MODE in each.median_us
        }
        add(ProblemTimes(record.op, record.problem, record.hardware), run)
    return list(found.values())


# -- judging --


@dataclass(frozen=True)
class Row:
    """One method on the problems of one family whose records were withheld.

    Args:
        op, gpu, world_size, fixed: the setting; see `taxfree._runtime.prediction.Evidence`.
        method: of `taxfree._runtime.prediction.METHODS`.
        left_out: the family's fields.
        problems: number of problems of the family.
        beyond: of these, without a prediction: no other record is near, the baseline runs.
        unmeasured: predictions whose variant and config were not measured on the problem.
        judged: predictions that were measured.
        of_best: geometric mean of best time / predicted one's time; None if none was judged.
        of_library: worst ratio of the library's best time / predicted one's time.
        reach, sizes: of judged predictions; see `taxfree._runtime.prediction.Evidence`.
        verdict: "serve" or "library".
    """

    op: str
    gpu: str
    world_size: int
    fixed: dict[str, Any]
    method: str
    left_out: dict[str, Any]
    problems: int
    beyond: int
    unmeasured: int
    judged: int
    of_best: float | None
    of_library: float | None
    reach: dict[str, float]
    sizes: dict[str, list[int]]

    @property
    def why_not(self) -> str:
        """Why this family does not support the method; empty if it does."""
        if self.of_best is None or self.of_library is None:
            return "no prediction was measured"
        made = self.judged + self.unmeasured
        if self.judged < LEAST_MEASURED * made:
            return f"only {self.judged} of {made} predictions were measured"
        if self.of_best < LEAST_OF_BEST:
            return f"{self.of_best:.3f} of the best"
        if self.of_library < LEAST_OF_LIBRARY:
            return f"{self.of_library:.3f} of the library's speed"
        return ""

    @property
    def verdict(self) -> str:
        """The verdict of this family alone."""
        return "library" if self.why_not else "serve"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"verdict": self.verdict, "why_not": self.why_not}


@cache
def judged(*, refit: bool = False) -> tuple[Row, ...]:
    """All methods on all families, from the committed results and the shipped records.

    Args:
        refit: predict for each family by a cost model that was fitted without its rows.
    """
    records = shipped_records()
    known = [
        record
        for op in operation_names()
        for record in Table(shipped=records).serving(versions(op))
        if record.op == op
    ]  # fmt: skip
    groups: dict[str, list[ProblemTimes]] = {}
    for each in measured(RESULTS, records):
        setting = [each.op, each.hardware.gpu, fixed_fields(each.op, each.problem)]
        groups.setdefault(json.dumps(setting, sort_keys=True), []).append(each)
    rows = []
    for _, group in sorted(groups.items()):
        op, families = group[0].op, sorted({each.family for each in group})
        for method, family in itertools.product(METHODS, families):
            machine = fitted_without(op, family) if refit and len(families) > 1 else None
            rows.append(judge(method, family, group, known, machine))
    return tuple(rows)


def judge(
    method: str,
    family: Family,
    group: Sequence[ProblemTimes],
    records: Sequence[Record],
    machine: Machine | None = None,
) -> Row:
    """A method on one family of a setting, without the records of that family.

    Args:
        machine: with other rates than the cost model's own.
    """
    one, own = group[0], [each for each in group if each.family == family]
    names = operation(one.op).family_fields
    others = [
        record
        for record in records
        if record.op == one.op and tuple(record.problem[name] for name in names) != family
    ]
    known: list[tuple[ProblemTimes, Prediction, float]] = []
    beyond = 0
    for each in own:
        found = _predicted(method, each, others, machine)
        time = None if found is None else each.time(found.variant, found.config)
        beyond += found is None
        if found is not None and time is not None:
            known.append((each, found, time))
    shares = [each.best() / time for each, _, time in known]
    return Row(
        op=one.op,
        gpu=one.hardware.gpu,
        world_size=one.problem["world_size"],
        fixed=fixed_fields(one.op, one.problem),
        method=method,
        left_out=dict(zip(names, family, strict=True)),
        problems=len(own),
        beyond=beyond,
        unmeasured=len(own) - beyond - len(known),
        judged=len(known),
        of_best=statistics.geometric_mean(shares) if known else None,
        of_library=min(
            (each.best(of_library=True) / time for each, _, time in known), default=None
        ),
        reach={
            name: max(
                distance(each.problem, found.nearest.problem, name) for each, found, _ in known
            )
            for name in names
            if known
        },
        sizes={
            name: _range(each.problem[name] for each, _, _ in known)
            for name in interpolated_fields(one.op)
            if known
        },
    )


def _range(values: Iterable[int]) -> list[int]:
    found = list(values)
    return [min(found), max(found)]


@cache
def fitted_without(op: str, family: Family) -> Machine:
    """H200 as fitted to the rows of all other families."""
    rows = model_error.rows()
    others = [
        each
        for each in rows
        if each.row.op != op
        or tuple(each.row.problem[name] for name in operation(op).family_fields) != family
    ]
    is_fitted = sum(each.is_fitted for each in others) < sum(each.is_fitted for each in rows)
    return model_error.fit(others, H200) if is_fitted else H200


def _predicted(
    method: str, each: ProblemTimes, records: Sequence[Record], machine: Machine | None
) -> Prediction | None:
    hardware = next(known for known in KNOWN.values() if known.name == each.hardware.gpu)
    problem = recorded_problem(each.op, each.problem)
    return predict(method, each.op, problem, records, each.hardware, hardware, machine=machine)


def evidence(rows: Iterable[Row]) -> list[Evidence]:
    """The predictions that dispatch may use: for each setting the first method that holds."""
    settings: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        key = json.dumps([row.op, row.gpu, row.fixed], sort_keys=True)
        settings.setdefault(key, {}).setdefault(row.method, []).append(row)
    return [_evidence(methods) for methods in settings.values()]


def _evidence(methods: Mapping[str, Sequence[Row]]) -> Evidence:
    reasons = []
    for method, rows in methods.items():
        if len(rows) == 1:
            only = _shown(rows[0].left_out)
            return _none_of(rows[0], f"all results have {only}")
        failed = next((row for row in rows if row.why_not), None)
        if failed is None:
            return _some_of(method, rows)
        reasons.append(f"{method}: {failed.why_not} without {_shown(failed.left_out)}")
    return _none_of(rows[0], "; ".join(reasons))


def _none_of(row: Row, why: str) -> Evidence:
    return Evidence(row.op, row.gpu, row.fixed, None, {}, {}, why)


def _some_of(method: str, rows: Sequence[Row]) -> Evidence:
    one, judged = rows[0], sum(row.judged for row in rows)
    made = judged + sum(row.unmeasured for row in rows)
    of_best = min(row.of_best for row in rows if row.of_best is not None)
    of_library = min(row.of_library for row in rows if row.of_library is not None)
    why = (
        f"{method}: at least {of_best:.3f} of the best and {of_library:.3f} of the library's speed,"
        f" {judged} of {made} predictions measured"
    )
    reach = {name: max(row.reach[name] for row in rows) for name in one.reach}
    sizes = {name: _range(size for row in rows for size in row.sizes[name]) for name in one.sizes}
    return Evidence(one.op, one.gpu, one.fixed, method, reach, sizes, why)


def _shown(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


# -- output --


def text(shown: Sequence[Evidence]) -> str:
    """The content of `taxfree/_runtime/prediction.json`."""
    return json.dumps([dataclasses.asdict(each) for each in shown], indent=1) + "\n"


def summary(rows: Sequence[Row], shown: Sequence[Evidence]) -> dict[str, Any]:
    """Counts over all settings."""
    return {
        "settings": len(shown),
        "settings_served": sum(each.method is not None for each in shown),
        "problems": sum(row.problems for row in rows if row.method == rows[0].method),
        "by_method": {
            method: {
                name: sum(getattr(row, name) for row in rows if row.method == method)
                for name in ("judged", "unmeasured", "beyond")
            }
            for method in METHODS
        },
    }


def families(rows: Iterable[Row]) -> str:
    """A table in Markdown: families of settings that have several."""
    header = (
        "setting", "method", "left out", "problems", "beyond", "unmeasured", "judged",
        "of the best", "worst, of the library", "verdict",
    )  # fmt: skip
    lines = [
        (
            f"{row.op} {_shown(row.fixed)}", row.method, _shown(row.left_out),
            str(row.problems), str(row.beyond), str(row.unmeasured), str(row.judged),
            _figure(row.of_best), _figure(row.of_library), row.verdict,
        )
        for row in rows
        if row.judged or row.unmeasured
    ]  # fmt: skip
    return table(header, lines, text=[0, 1, 2, 9])


def settings(shown: Iterable[Evidence]) -> str:
    """A table in Markdown: the method that serves each setting, and why."""
    lines = [
        (f"{each.op} {_shown(each.fixed)}", each.method or "library", each.why) for each in shown
    ]
    return table(("setting", "serves", "why"), lines, text=[0, 1, 2])


def documented(rows: Iterable[Row]) -> str:
    """The document with the current table of families."""
    return with_blocks(DOCUMENT.read_text(encoding="utf-8"), {"unseen": lambda _: families(rows)})


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> int:
    """Print or write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--write", action="store_true", help="write what dispatch reads, and the document"
    )
    parser.add_argument(
        "--refit", action="store_true", help="fit the cost model without each family; minutes"
    )
    options = parser.parse_args()
    if options.write and options.refit:
        parser.error("--write needs the committed cost model: leave out --refit")
    rows = judged(refit=options.refit)
    shown = evidence(rows)
    if options.write:
        SHOWN.write_text(text(shown), encoding="utf-8")
        write_changed({DOCUMENT: documented(rows)})
    if options.json:
        document = {
            "rows": [row.to_json() for row in rows],
            "settings": [dataclasses.asdict(each) for each in shown],
            "summary": summary(rows, shown),
        }
        print(json.dumps(document, indent=1))
    else:
        print(f"{families(rows)}\n{settings(shown)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
