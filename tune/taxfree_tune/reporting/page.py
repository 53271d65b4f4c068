"""Writes a report as one HTML page that needs no network: figures, tables, and their origins."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
import vl_convert

from taxfree import fingerprints
from taxfree._version import __version__
from taxfree_tune.reporting.comparisons import verdict
from taxfree_tune.reporting.drawing import Figure
from taxfree_tune.reporting.sections import Section, sections
from taxfree_tune.reporting.sources import (
    Origin,
    Sources,
    machine_of,
    software_words,
)

_FILTERS = (("op", "Operation"), ("gpus", "GPUs"), ("machine", "Machine"))


def page(sources: Sources) -> str:
    """The page of these sources."""
    shown = sections(sources)
    figures = [figure for section in shown for figure in section.figures]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["cell"] = _cell
    environment.filters["origins"] = _origins_of
    environment.globals["is_number"] = lambda value: isinstance(value, int | float)
    template = environment.from_string(_asset("page.html.jinja"))
    text: str = template.render(
        version=__version__,
        style=_asset("page.css"),
        script=_asset("page.js"),
        library=vl_convert.javascript_bundle(),
        sections=shown,
        filters=[selector for selector in _filters(figures) if len(selector[2]) > 1],
        summary=_summary(shown),
        data=_embedded({figure.name: _data(figure) for figure in figures}),
        origins=origins(sources),
        left_out=sources.left_out,
    )
    return text


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _data(figure: Figure) -> dict[str, Any]:
    return {"drawing": figure.drawing, "rows": figure.rows, "widths": figure.widths}


def _embedded(document: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _filters(figures: Sequence[Figure]) -> list[tuple[str, str, list[str]]]:
    rows = [row for figure in figures for row in figure.rows]
    return [(key, name, _values(row[key] for row in rows)) for key, name in _FILTERS]


def _values(values: Iterable[Any]) -> list[str]:
    return [str(value) for value in sorted(set(values))]


def _summary(shown: Sequence[Section]) -> list[tuple[str, Counter[str]]]:
    """Of our fastest variants and of dispatch: how many are faster, even and slower."""
    rows = [row for figure in shown[0].figures for row in figure.rows]
    return [
        (label, Counter(verdict(row[key]) for row in rows if row[key] is not None))
        for label, key in (("Our fastest variant", "ours_x"), ("What dispatch runs", "dispatch_x"))
    ]


def _cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None or value == "":
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _origins_of(figure: Figure) -> str:
    """Where a figure's rows are from, and from when to when they were measured."""
    dates: dict[str, list[str]] = {}
    for row in figure.rows:
        dates.setdefault(row["source"], []).append(row["measured"])
    return "; ".join(f"{name}, {_period(min(days), max(days))}" for name, days in dates.items())


def _period(first: str, last: str) -> str:
    if not last:
        return "date unknown"
    return last if first == last else f"{first} to {last}"


# -- origins --


def origins(sources: Sources) -> list[Origin]:
    """The tables, databases and files that a report is made from."""
    origins_found = []
    alike: dict[tuple[str, ...], list[Any]] = {}
    for shown in sources.records:
        software = software_words(vars(shown.record.software))
        alike.setdefault((shown.source, shown.record.hardware.gpu, software), []).append(
            shown.record
        )
    for (source, machine, software), records in alike.items():
        times = [record.provenance.get("created", "") for record in records]
        gpus = {int(record.problem["world_size"]) for record in records}
        versions = [(r.op, r.winner.variant, r.winner.version) for r in records]
        origins_found.append(_origin(source, "records", machine, gpus, times, software, versions))
    for source, results in sources.benches:
        rows, environment = results.rows, results.environment
        versions = [
            (row.op, str(row.config.get("variant", row.variant)), row.version)
            for row in rows
            if row.version is not None
        ]
        origins_found.append(
            _of_file(source, "times", environment, [r.problem for r in rows], versions)
        )
    for file in sources.models:
        origins_found.append(_of_file(file.source, "models", file.environment, file.entries, ()))
    for holds, result_files in (
        ("accounts of taxes", sources.accounts),
        ("timelines", sources.timelines),
    ):
        for file in result_files:
            problems = [entry["problem"] for entry in file.entries]
            origins_found.append(_of_file(file.source, holds, file.environment, problems, ()))
    return origins_found


def _of_file(
    source: str,
    holds: str,
    environment: Mapping[str, Any],
    problems: Sequence[Mapping[str, Any]],
    versions: Sequence[tuple[str, str, int]],
) -> Origin:
    software = software_words(environment.get("software", {}))
    gpus = {int(problem["world_size"]) for problem in problems}
    times = [str(environment.get("created", ""))] * len(problems)
    return _origin(source, holds, machine_of(environment), gpus, times, software, versions)


def _origin(
    source: str,
    holds: str,
    machine: str,
    gpus: set[int],
    times: Sequence[str],
    software: str,
    versions: Sequence[tuple[str, str, int]],
) -> Origin:
    changed = sum(fingerprints.versions(op).get(v) != measured for op, v, measured in versions)
    first, last = min(times, default=""), max(times, default="")
    return Origin(
        source, holds, machine, tuple(sorted(gpus)), first, last, software, len(times), changed
    )
