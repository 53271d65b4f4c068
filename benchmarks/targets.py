"""Prints each target with the measured figure, its file, and whether its kernels are current."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.documents import is_current
from taxfree.fingerprints import interpolated_fields
from taxfree.problems import format_problem
from taxfree_tune.measuring.results import Row, by_problem, fastest, load

FOLDER = Path(__file__).parent
Kind = Literal["at_most_us", "at_most_times", "speedup"]
KINDS = get_args(Kind)
#: in the unit of the target's kind, and the measured row
Figure = tuple[float, Row]


@dataclass(frozen=True)
class Target:
    """One entry of targets.toml, where the fields are explained."""

    name: str
    op: str
    file: str
    measured: Sequence[str]
    kind: Kind
    value: float
    where: Mapping[str, Any]
    against: Sequence[str] = ()
    aim: float | None = None

    @classmethod
    def from_toml(cls, entry: Mapping[str, Any]) -> Iterator[Target]:
        """Read an entry, which has exactly one of the kinds: a target, or one for each row."""
        fields = dict(entry)
        ((kind, value),) = [(kind, fields.pop(kind)) for kind in KINDS if kind in fields]
        if not isinstance(value, Mapping):
            yield cls(kind=kind, value=value, **fields)
            return
        name, where, aims = fields.pop("name"), fields.pop("where"), fields.pop("aim", {})
        along = interpolated_fields(fields["op"])[-1]
        for size, limit in value.items():
            own = {"name": f"{name}, {along}={size}", "where": where | {along: int(size)}}
            yield cls(kind=kind, value=limit, aim=aims.get(size), **own, **fields)

    def is_met_by(self, figure: float) -> bool:
        """Whether a measured figure is good enough."""
        return figure >= self.value if self.kind == "speedup" else figure <= self.value

    @property
    def wanted(self) -> str:
        """The target in a few words."""
        sign = ">=" if self.kind == "speedup" else "<="
        unit = " us" if self.kind == "at_most_us" else "x"
        aim = "" if self.aim is None else f", aim {self.aim:g}{unit}"
        return f"{sign} {self.value:g}{unit}{aim}"


def figures(target: Target, rows: Iterable[Row]) -> list[Figure]:
    """The figure of each problem that a target is about."""
    rated = []
    for group in by_problem(row for row in rows if row.op == target.op):
        measured, against = (
            fastest([row for row in group if f"{row.variant} {row.mode}" in names])
            for names in (target.measured, target.against)
        )
        if measured is None or not _is_about(target, measured.problem):
            continue
        if target.kind == "at_most_us":
            rated.append((measured.median_us, measured))
        elif against is not None:
            ratio = measured.median_us / against.median_us
            rated.append((1 / ratio if target.kind == "speedup" else ratio, measured))
    return rated


def _is_about(target: Target, problem: Mapping[str, Any]) -> bool:
    return all(
        problem.get(name) in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in target.where.items()
    )


def report(target: Target, folder: Path) -> list[str]:
    """Lines about one target: its worst problem, and where that was measured."""
    lines = [f"{target.name}: {target.wanted}"]
    path = folder / target.file
    if not path.exists():
        return [*lines, f"  not measured: there is no {target.file}"]
    rated = figures(target, load(path).rows)
    if not rated:
        return [*lines, f"  not measured: {target.file} has no such rows"]
    worst = (min if target.kind == "speedup" else max)(rated, key=lambda figure: figure[0])
    missed = [figure for figure in rated if not target.is_met_by(figure[0])]
    stale = [row for _, row in rated if not is_current(row)]
    verdict = f"missed on {len(missed)} of {len(rated)}" if missed else f"met on all {len(rated)}"
    kernels = f"{len(stale)} of former kernels" if stale else "of current kernels"
    others = [figure for figure in missed if figure is not worst]
    return [
        *lines,
        f"  {verdict}; worst {_described(target, worst)}",
        f"  {target.file}, {kernels}",
        *(f"  also missed: {_described(target, figure)}" for figure in others),
    ]


def _described(target: Target, figure: Figure) -> str:
    value, row = figure
    return f"{value:.4g} at {format_problem(target.op, row.problem)}"


def main() -> None:
    """Print all targets."""
    with open(FOLDER / "targets.toml", "rb") as file:
        entries = tomllib.load(file)["target"]
    for target in (target for entry in entries for target in Target.from_toml(entry)):
        print("\n".join(report(target, FOLDER / "results")))


if __name__ == "__main__":
    main()
