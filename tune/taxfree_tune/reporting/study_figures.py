"""Convergence of studies, and importances of meta-parameters."""

from __future__ import annotations

from typing import Any

import altair as alt

from taxfree_tune.reporting.drawing import (
    ORIGIN,
    ROWS,
    Figure,
    coloured,
    finished,
    hover,
    panel_control,
)

_TRIED = {
    "study": "panel",
    "trial": "trial",
    "variant": "variant",
    "config": "config",
    "us": "us",
    "best so far, us": "best_us",
    "library, us": "library_us",
    **ORIGIN,
}
_IMPORTANT = {
    "study": "panel",
    "variant": "variant",
    "meta-parameter": "parameter",
    "importance": "importance",
    "trials": "trials",
    **ORIGIN,
}


def convergence_of(rows: list[dict[str, Any]]) -> Figure:
    """Times of trials as points, the best so far as a line, the library's as a dashed one."""
    variants = dict.fromkeys(row["variant"] for row in rows)
    colours = {variant: f"var(--c{index % 8})" for index, variant in enumerate(variants)}
    x = alt.X("trial:Q", title="trial", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(nice=False))
    points = (
        alt.Chart(ROWS)
        .transform_calculate(
            said="'trial ' + datum.trial + ', ' + datum.variant + ' ' + datum.config + ': '"
            " + datum.us + ' us, best so far ' + datum.best_us + ' us'"
        )
        .mark_circle(size=60, opacity=1)
        .encode(
            x=x,
            y=alt.Y("us:Q", title="us", scale=alt.Scale(type="log", zero=False)),
            color=coloured("variant", colours, legend=alt.Legend(orient="bottom", columns=4)),
            description="said:N",
            tooltip=hover(_TRIED),
        )
    )
    best = (
        alt.Chart(ROWS)
        .mark_line(interpolate="step-after", color="var(--ink)", aria=False)
        .encode(x=x, y="best_us:Q")
    )
    library = (
        alt.Chart(ROWS)
        .transform_aggregate(us="max(library_us)")
        .mark_rule(strokeDash=[4, 4], color="var(--loss2)", strokeWidth=2, aria=False)
        .encode(y="us:Q")
    )
    chart = alt.layer(library, best, points).properties(width="container", height=240)
    return Figure(
        "convergence",
        "Convergence; the dashed line is the library",
        rows,
        finished(chart),
        _TRIED,
        (panel_control("Study", rows),),
    )


def importances_of(rows: list[dict[str, Any]]) -> Figure:
    """A bar per meta-parameter, the variants one after another."""
    chart = (
        alt.Chart(ROWS)
        .transform_calculate(
            name="datum.variant + ': ' + datum.parameter",
            said="datum.variant + ' ' + datum.parameter + ': importance '"
            " + format(datum.importance, '.0%') + ' in ' + datum.trials + ' trials'",
        )
        .mark_bar(color="var(--c0)", cornerRadius=2)
        .encode(
            x=alt.X("importance:Q", title="importance", axis=alt.Axis(format="%")),
            y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(labelLimit=180)),
            description="said:N",
            tooltip=hover(_IMPORTANT),
        )
        .properties(width="container", height=alt.Step(18))
    )
    return Figure(
        "importances",
        "Importance of meta-parameters",
        rows,
        finished(chart),
        _IMPORTANT,
        (panel_control("Study", rows),),
    )
