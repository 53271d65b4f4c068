"""Figures as files, in the colours of a report on white: timelines, and calls on more ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from taxfree_tune.reporting import calls
from taxfree_tune.reporting.call_figures import timeline_of
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
        rows: a part of a call each: `panel`, `ranks`, `way`, `part`, `us`, the `depth` of the part
            in its bar, and `total_us` of the call.
        path: its name ends in one of `KINDS`.

    Raises:
        OSError: the picture cannot be written.
    """
    chart = alt.Chart(ROWS).encode(y=alt.Y("ranks:O", title="ranks"), yOffset=alt.YOffset("way:N"))
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
    panels = [
        layers.transform_filter(alt.datum.panel == panel).properties(
            width=_WIDTH, title=alt.Title(panel, anchor="start")
        )
        for panel in dict.fromkeys(row["panel"] for row in rows)
    ]
    _save(finished(alt.vconcat(*panels)), rows, path)
