"""Figures as files: times over bounds, and those of a report, in its colours on white."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from taxfree.problems import heading
from taxfree_tune.measuring.results import DISPATCH, Row, by_problem
from taxfree_tune.reporting import calls
from taxfree_tune.reporting.call_figures import account_bars, timeline_of
from taxfree_tune.reporting.drawing import ROWS, coloured, finished
from taxfree_tune.reporting.sources import ResultFile, Sources

_WIDTH = 640
_WRITERS = {
    ".png": lambda drawing: vl_convert.vega_to_png(drawing, scale=2),
    ".jpg": lambda drawing: vl_convert.vega_to_jpeg(drawing, scale=2),
    ".svg": lambda drawing: vl_convert.vega_to_svg(drawing).encode(),
    ".pdf": vl_convert.vega_to_pdf,
}
KINDS = tuple(_WRITERS)
_COLOURS = {"baseline": "var(--ink)", DISPATCH: "gold"}
_SCALED = {
    "work": "var(--bound)",
    "launches": "var(--launch)",
    "bytes": "var(--kernel-work)",
    "signals": "var(--bulk-synchronous)",
    "skew": "var(--locality)",
}


def _save(drawing: Mapping[str, Any], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a drawing of these rows; its name ends in one of `KINDS`.

    Raises:
        OSError: it cannot be written.
    """
    style = (files(__package__) / "page.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"(--[\w-]+): (#\w+)", style.partition("@media")[0]))
    text = re.sub(r"var\((--[\w-]+)\)", lambda name: light[name[1]], json.dumps(drawing))
    document = json.loads(text) | {"background": "white", "padding": 8}
    for data in document["data"]:
        if data["name"] == "rows":
            data["values"] = rows
    for signal in document.get("signals", []):
        if signal["name"] == "child_width":
            signal["value"] = _WIDTH
    picture = _WRITERS[path.suffix](document)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)


def save_times(measured: Sequence[Row], along: str, path: Path) -> None:
    """Draw time / t_bound against a field of the problem, a panel per other fields.

    Fused variants are drawn through, others dashed, and what dispatch picks is a broad line behind.

    Args:
        measured: of each variant the graph's time is drawn, or the eager one without graphs.
        along: the field on the horizontal axis.
        path: its name ends in one of `KINDS`.

    Raises:
        OSError: the picture cannot be written.
    """
    rows = [
        {
            "panel": heading(row.op, {k: v for k, v in row.problem.items() if k != along}),
            "variant": row.variant,
            "is_fused": row.fused,
            "size": row.problem[along],
            "x_bound": row.x_bound,
        }
        for group in by_problem(measured)
        for row in group
        if row.mode == "graph" or all(other.mode != "graph" for other in group)
    ]
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row["panel"], set()).add(row["size"])
    lines = [row for row in rows if len(sizes[row["panel"]]) > 1]
    rows = lines or rows  # points are for those who have nothing else
    colours = {
        name: _COLOURS.get(name, f"var(--c{index % 8})")
        for index, name in enumerate(dict.fromkeys(row["variant"] for row in rows))
    }
    chart = alt.Chart(ROWS).encode(
        x=alt.X(
            "size:Q",
            title=along,
            scale=alt.Scale(type="log", base=2, nice=False),
            axis=alt.Axis(values=sorted({row["size"] for row in rows}), format="d"),
        ),
        y=alt.Y(
            "x_bound:Q", title="time / bound", scale=alt.Scale(type="log", nice=False, padding=8)
        ),
        color=coloured("variant", colours, legend=alt.Legend(symbolOpacity=1)),
    )
    dash = alt.Scale(domain=[True, False], range=[[1, 0], [4, 4]])
    layers = alt.layer(
        chart.transform_filter(alt.datum.variant == DISPATCH).mark_line(strokeWidth=7, opacity=0.6),
        chart.transform_filter(alt.datum.variant != DISPATCH)
        .mark_line(point=True)
        .encode(strokeDash=alt.StrokeDash("is_fused:N", scale=dash, legend=None)),
    )
    panels = dict.fromkeys(row["panel"] for row in rows)
    _save(finished(_stacked(layers.properties(height=220), panels)), rows, path)


def save_taxes(accounts: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the parts of each account as a stacked bar, a panel per sizes that are alike.

    Args:
        accounts: of `Explanation.rows`; at least one.
        path: its name ends in one of `KINDS`.

    Raises:
        OSError: the picture cannot be written.
    """
    rows = calls.taxes(Sources(accounts=[ResultFile("", {}, accounts)]))
    bars = account_bars(rows, alt.Legend(orient="top", columns=0))
    panels = dict.fromkeys(row["panel"] for row in rows)
    _save(finished(_stacked(bars, panels), unit="us"), rows, path)


def save_timelines(call: dict[str, Any], path: Path) -> None:
    """Draw one call of each pipeline, one above the other, on one time axis.

    Args:
        call: an entry of `pictures` in the file of `explain --trace`.
        path: its name ends in one of `KINDS`.

    Raises:
        OSError: the picture cannot be written.
    """
    rows = calls.timelines(Sources(timelines=[ResultFile("", {}, [call])]))
    title = {"text": rows[0]["panel"], "anchor": "start"}
    _save(timeline_of(rows).drawing | {"title": title}, rows, path)


def save_scaled(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw calls on more and more ranks as stacked bars, a panel per problem.

    Args:
        rows: a part of a call each: `panel`, `ranks`, `way`, the number of its `bar` among those
            of as many ranks, `part`, `us`, the `depth` of the part in its bar, and `total_us` of
            the call.
        path: its name ends in one of `KINDS`.

    Raises:
        OSError: the picture cannot be written.
    """
    chart = alt.Chart(ROWS).encode(y=alt.Y("ranks:O", title="ranks"), yOffset=alt.YOffset("bar:O"))
    bars = chart.mark_bar().encode(
        x=alt.X("us:Q", title="us, modelled"),
        color=coloured("part", _SCALED, legend=alt.Legend(orient="top")),
        order="depth:Q",
    )
    names = (
        chart.transform_filter(alt.datum.depth == 0)
        .transform_calculate(text="datum.way + ' ' + format(datum.total_us, '.3~g')")
        .mark_text(align="left", dx=4, fontSize=10, color="var(--ink)")
        .encode(x="total_us:Q", text="text:N")
    )
    layers = alt.layer(bars, names).properties(height=alt.Step(15, **{"for": "offset"}))
    panels = dict.fromkeys(row["panel"] for row in rows)
    _save(finished(_stacked(layers, panels)), rows, path)


def _stacked(chart: Any, panels: Iterable[str]) -> Any:
    """A copy of the chart per panel, one below the other."""
    return alt.vconcat(
        *(
            chart.transform_filter(alt.datum.panel == panel).properties(
                width=_WIDTH, title=alt.Title(panel, anchor="start")
            )
            for panel in panels
        )
    )
