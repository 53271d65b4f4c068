"""Taxes as stacked bars, and calls over time."""

from __future__ import annotations

from typing import Any

import altair as alt

from taxfree_tune.reporting import calls
from taxfree_tune.reporting.drawing import (
    ORIGIN,
    ROWS,
    Control,
    Figure,
    coloured,
    finished,
    hover,
    panel_control,
    strips,
)

# -- taxes --

_PARTS = (
    *("bound", "kernel work", "residual", "locality"),
    *("bulk synchronous", "launch", "graph penalty", "no account"),
)
_TAXED = {
    "panel": "panel",
    "rows": "size",
    "variant": "variant",
    "part": "part",
    "us": "us",
    "% of the library's call": "percent",
    "whole call, us": "total_us",
    **ORIGIN,
}


def account_bars(rows: list[dict[str, Any]], legend: alt.Legend | None) -> Any:
    """Stacked bars: of each size one bar per pipeline; the parameter `unit` is us or percent."""
    unit = "datum[unit == 'us' ? 'us' : 'percent']"
    end = "datum[unit == 'us' ? 'end_us' : 'end_percent']"
    colours = {part: f"var(--{part.replace(' ', '-')})" for part in _PARTS}
    y = alt.Y("size:O", title=rows[0]["size_field"])
    offset = alt.YOffset("pipeline:O")
    axis = alt.Axis(labelExpr="datum.label + (unit == 'us' ? ' us' : ' %')")
    bars = (
        alt.Chart(ROWS)
        .transform_calculate(
            value=unit,
            said="datum.size_field + ' ' + datum.size + ', ' + datum.variant + ': ' + datum.part"
            " + ' ' + datum.us + ' us, ' + format(datum.percent, '.0f') + ' % of the call of the"
            " library; the whole call ' + datum.total_us + ' us' + datum.remark",
        )
        .mark_bar(opacity=1)
        .encode(
            x=alt.X("value:Q", title=None, axis=axis),
            y=y,
            yOffset=offset,
            color=coloured("part", colours, sort=list(_PARTS), legend=legend),
            order="depth:Q",
            description="said:N",
            tooltip=hover(_TAXED),
        )
    )
    names = (
        alt.Chart(ROWS)
        .transform_filter("datum.depth == 0")
        .transform_calculate(
            value=end,
            room=f"1.4 * ({end})",
            text="datum.variant + ' ' + format(datum.total_us, '.3~g') + ' us' + datum.remark",
        )
        .mark_text(align="left", dx=4, fontSize=10, aria=False, color="var(--ink)")
        .encode(x="value:Q", y=y, yOffset=offset, text="text:N")
    )
    room = names.mark_point(opacity=0, aria=False).encode(x="room:Q", text=alt.Undefined)
    height = alt.Step(15, **{"for": "offset"})
    return alt.layer(bars, names, room).properties(height=height)


def taxes_of(rows: list[dict[str, Any]]) -> Figure:
    """The accounts of the chosen problem."""
    return Figure(
        "taxes-bars",
        "One eager call of the slowest rank",
        rows,
        finished(account_bars(rows, None).properties(width="container"), unit="percent"),
        _TAXED,
        (
            panel_control("Problem", rows),
            Control(
                "Scale",
                "unit",
                "parameter",
                {"percent": "percent of the library's call", "us": "microseconds"},
            ),
        ),
    )


# -- timelines --

_KINDS = ("send", "compute", "wait")
_STEPS = (0, 1, 3, 5, 6, 7)  # colours that no part and no kind has
_SPENT = {
    "call": "panel",
    "variant": "variant",
    "rank": "rank",
    "step or activity": "kind",
    "how often": "count",
    "first begin, us": "begin_us",
    "last end, us": "end_us",
    **ORIGIN,
}


def timeline_of(rows: list[dict[str, Any]]) -> Figure:
    """Bars over time, a strip per pipeline, a band per rank."""
    steps = [kind for kind in dict.fromkeys(row["kind"] for row in rows) if kind not in _KINDS]
    colours = {step: f"var(--c{_STEPS[index % len(_STEPS)]})" for index, step in enumerate(steps)}
    colours |= {kind: f"var(--{kind})" for kind in _KINDS}
    ranks = 1 + max(row["rank"] for row in rows)
    drawn = (
        alt.Chart(ROWS)
        .transform_calculate(
            said="datum.variant + ', rank ' + datum.rank + ', ' + datum.kind"
            " + (isValid(datum.program) ? ' of program ' + datum.program : '') + ': '"
            " + datum.begin_us + ' to ' + datum.end_us + ' us'",
            layer="indexof(['send', 'compute', 'wait'], datum.kind)",
        )
        .mark_rect(strokeWidth=0, opacity=1)
        .encode(
            x=alt.X("begin_us:Q", title="us since the first event of the call"),
            x2="end_us:Q",
            y=alt.Y(
                "top:Q",
                title=None,
                scale=alt.Scale(domain=[ranks - 0.5, -0.5], nice=False, zero=False),
                axis=alt.Axis(
                    values=list(range(ranks)), labelExpr="'rank ' + datum.value", grid=False
                ),
            ),
            y2="bottom:Q",
            color=coloured("kind", colours, legend=alt.Legend(orient="bottom", columns=4)),
            order="layer:Q",
            description="said:N",
            tooltip=["kind:N", "rank:O", "program:O", "begin_us:Q", "end_us:Q", "measured:N"],
        )
        .properties(width=300, height=max(70, 36 * ranks))
    )
    return Figure(
        "timeline-call",
        "One call of each pipeline",
        rows,
        finished(strips(drawn, "variant", rows)),
        _SPENT,
        (panel_control("Call", rows),),
        table=calls.spans(rows),
    )
