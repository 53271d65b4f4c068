"""Result files: what `bench` writes, and what tables, pictures and comparisons are made from.

One JSON document: ``{"schema": 1, "environment": {...}, "rows": [...], "skipped": [...]}``. A row
is one variant in one mode on one problem. Variants that were not timed, because they are wrong or
do not run, are listed under "skipped" with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from taxfree.errors import UsageError
from taxfree.files import read_json, write
from taxfree_kernels.variant import is_library
from taxfree_tuning_db.renamed import with_new_names

SCHEMA = 1
DISPATCH = "dispatch"  # in the place of a variant: what the dispatcher picks
LEAST_CHANGE = 0.03  # of a time: less is not called a change, however quiet the machine

Mode = Literal["eager", "graph"]
Judgement = Literal["better", "same", "worse"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One variant, measured in one mode on one problem. Times are in microseconds per call.

    Args:
        op, problem: the operation, and the problem's fields.
        variant: "baseline", a variant's name, or "dispatch" for what the dispatcher picks.
        config: of the variant; for "dispatch", of the variant that ran, plus the key "variant".
        mode: "eager", or "graph" for calls captured in a graph.
        median_us, iqr_us: median and interquartile range of the samples.
        samples_us: one per repetition, each the slowest rank's.
        t_floor_us, t_gemm_us, t_link_us, t_bound_us: see `taxfree_tune.measuring.bounds`.
        relative_error: Frobenius norm of the difference from the float64 reference over that of
            the reference; the worst rank's.
        version: of the variant; for "dispatch", of the picked one; None if it is none of ours.
        fused: see `taxfree_kernels.variant.Variant`.
        launches: kernels that one call launches; a collective counts as one.
        skew_us: median over repetitions of slowest minus fastest rank.
        wrong: number of wrong values on small-integer inputs, over all ranks.
        speedup_eager, speedup_graph: the baseline's time in that mode over this row's; None if
            the baseline was not timed in that mode.
        tflops: the problem's flops per rank over the time, in TFLOP/s.
        gbps: the problem's memory bytes per rank over the time, in GB/s.
        sm_mhz: the slowest GPU's clock right after the measurement; None if it cannot be read.
        throttled: why GPUs reduced their clocks then.
    """

    op: str
    problem: dict[str, Any]
    variant: str
    config: dict[str, Any]
    mode: Mode
    median_us: float
    iqr_us: float
    samples_us: tuple[float, ...]
    t_floor_us: float
    t_gemm_us: float | None
    t_link_us: float
    t_bound_us: float
    relative_error: float | None
    version: int | None = None
    fused: bool = False
    launches: int = 0
    skew_us: float = 0.0
    wrong: int = 0
    speedup_eager: float | None = None
    speedup_graph: float | None = None
    tflops: float = 0.0
    gbps: float = 0.0
    sm_mhz: float | None = None
    throttled: tuple[str, ...] = ()

    @property
    def x_bound(self) -> float:
        """Time over bound: 1 is as fast as this machine allows."""
        return self.median_us / self.t_bound_us

    @property
    def speedup(self) -> float | None:
        """Over the baseline in the row's own mode."""
        return self.speedup_graph if self.mode == "graph" else self.speedup_eager

    @property
    def is_library(self) -> bool:
        """Whether its variant is the library's."""
        return is_library(self.op, self.variant)

    @property
    def key(self) -> str:
        """The key by which rows of different runs are matched."""
        return json.dumps([self.op, self.problem, self.variant, self.mode], sort_keys=True)


@dataclass(frozen=True)
class Skipped:
    """A variant that was not timed.

    Args:
        op, problem, variant, config: as in a row.
        state: "refused" (does not serve the problem), "failed", "wrong" or "hung".
        reason: one line.
        wrong: values that differ on small-integer inputs, over all ranks.
    """

    op: str
    problem: dict[str, Any]
    variant: str
    config: dict[str, Any]
    state: str
    reason: str
    wrong: int = 0


@dataclass(frozen=True)
class Results:
    """The content of a result file."""

    environment: dict[str, Any]
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "skipped": [dataclasses.asdict(skipped) for skipped in self.skipped],
        }


def load(path: Path) -> Results:
    """Read a result file; fields that this version does not know are left out.

    Raises:
        UsageError: it cannot be read, or is no result file.
    """
    document = read_json(path, "give a file of bench --out")
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a result file of schema {SCHEMA}", "see bench --out")
    try:
        environment: Any = document.get("environment")
        _require(isinstance(environment, dict), "environment", "is not an object")
        rows = _list(Row, document.get("rows"), "rows")
        skipped = _list(Skipped, document.get("skipped", []), "skipped")
        return Results(environment, rows, skipped)
    except ValueError as error:
        raise UsageError(f"{path}: {error}", "see bench --out") from error


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


#: annotation of a field -> whether a value of a document is of it
_IS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int),
    "int | None": lambda value: value is None or isinstance(value, int),
    "float": lambda value: _is_number(value) and value >= 0,
    "float | None": lambda value: value is None or (_is_number(value) and value >= 0),
    "Mode": lambda value: value in get_args(Mode),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "tuple[float, ...]": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "tuple[str, ...]": lambda value: (
        isinstance(value, list) and all(isinstance(text, str) for text in value)
    ),
}
_DIVISORS = ("median_us", "t_bound_us")


def _list(kind: type[_T], entries: Any, name: str) -> tuple[_T, ...]:
    _require(isinstance(entries, list), name, "is not a list")
    return tuple(_entry(kind, f"{name}[{index}]", entry) for index, entry in enumerate(entries))


def _entry(kind: Any, where: str, document: Any) -> Any:
    _require(isinstance(document, dict), where, "is not an object")
    document = with_new_names(document.get("op"), document)
    values = {}
    for declared in dataclasses.fields(kind):
        if declared.name not in document:
            _require(
                declared.default is not dataclasses.MISSING,
                f"{where}.{declared.name}",
                "is missing",
            )
            continue
        value = document[declared.name]
        fits = _IS[str(declared.type)](value) and not (declared.name in _DIVISORS and value == 0)
        _require(fits, f"{where}.{declared.name}", "makes no sense")
        values[declared.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _require(holds: bool, where: str, why: str) -> None:
    if not holds:
        raise ValueError(f"{where} {why}")


def save(results: Results, path: Path) -> None:
    """Write a result file, whole or not at all.

    Raises:
        TaxfreeError: it cannot be written.
    """
    write(path, json.dumps(results.to_json(), indent=1, allow_nan=False) + "\n")


def machine_name(gpu: str) -> str:
    """A GPU as result files are named by it: "nvidia-h200"."""
    return gpu.lower().replace(" ", "-")


# -- comparisons --


@dataclass(frozen=True)
class RowComparison:
    """A row beside the same row of an earlier run.

    Args:
        row, before: today's, and the earlier one.
        judgement: "same" where the times differ by less than the noise.
    """

    row: Row
    before: Row
    judgement: Judgement

    @property
    def change(self) -> float:
        """Relative change of the time; negative is faster."""
        return self.row.median_us / self.before.median_us - 1

    def to_json(self) -> dict[str, Any]:
        names = ("op", "problem", "variant", "mode", "median_us")
        return {name: getattr(self.row, name) for name in names} | {
            "before_us": self.before.median_us,
            "change": self.change,
            "judgement": self.judgement,
        }


def compare(rows: Iterable[Row], before: Iterable[Row]) -> list[RowComparison]:
    """Compare each row that is also in an earlier run.

    A change counts if it exceeds 3 % of the earlier time and the sum of both interquartile ranges.
    """
    earlier = {row.key: row for row in before}
    return [
        RowComparison(row, earlier[row.key], _judge(row, earlier[row.key]))
        for row in rows
        if row.key in earlier
    ]


def _judge(row: Row, before: Row) -> Judgement:
    noise = max(LEAST_CHANGE * before.median_us, row.iqr_us + before.iqr_us)
    if abs(row.median_us - before.median_us) <= noise:
        return "same"
    return "better" if row.median_us < before.median_us else "worse"


def below(rows: Iterable[Row], least: float) -> list[Row]:
    """The dispatcher's rows whose speed-up over the baseline is below `least`.

    They are compared in a graph if there are graphs, else eagerly.
    """
    picked = [row for row in rows if row.variant == DISPATCH]
    mode = "graph" if any(row.mode == "graph" for row in picked) else "eager"
    return [row for row in picked if row.mode == mode and (row.speedup or 0.0) < least]


def by_problem(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows of each problem, in the order in which problems come."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row.op, row.problem], sort_keys=True), []).append(row)
    yield from groups.values()


def fastest(rows: Sequence[Row]) -> Row | None:
    """The row with the least time, or None of none."""
    return min(rows, key=lambda row: row.median_us, default=None)
