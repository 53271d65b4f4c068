"""Studies of past tuning: how fast they found the best, as rows and as a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from taxfree import fingerprints
from taxfree.problems import format_problem
from taxfree_tune.reporting.drawing import (
    ORIGIN,
    ROWS,
    Figure,
    coloured,
    finished,
    hover,
    panel_control,
)
from taxfree_tune.reporting.sources import Recorded, Sources
from taxfree_tuning_db import TrialRecord

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


def convergence(sources: Sources) -> list[dict[str, Any]]:
    """A row per measured trial of each study: its time, and the best so far, in microseconds."""
    rows = []
    for recorded in sources.records:
        best = float("inf")
        baseline = recorded.record.baseline
        for number, trial in enumerate(_measured(recorded), start=1):
            us = trial.median_us[_mode(trial.median_us)]
            best = min(best, us)
            rows.append(
                _common(recorded)
                | {
                    "trial": number,
                    "variant": trial.variant,
                    "config": " ".join(f"{name}={value}" for name, value in trial.config.items()),
                    "us": round(us, 3),
                    "best_us": round(best, 3),
                    "library_us": round(baseline.median_us[_mode(baseline.median_us)], 3),
                }
            )
    return rows


def _common(recorded: Recorded) -> dict[str, Any]:
    record = recorded.record
    return {
        "op": record.op,
        "gpus": record.problem["world_size"],
        "machine": record.hardware.gpu,
        "panel": f"{record.op} {format_problem(record.op, record.problem)}",
        "measured": record.provenance.get("created", "")[:10],
        "source": recorded.source,
    }


def _mode(times: Mapping[str, float]) -> str:
    return "graph" if "graph" in times else "eager"


def _measured(recorded: Recorded) -> list[TrialRecord]:
    """The measured trials of today's kernels, in the order in which they were tried."""
    versions = fingerprints.versions(recorded.record.op)
    return [
        trial
        for trial in recorded.trials
        if trial.state == "measured"
        and not trial.reason  # not disturbed
        and trial.version == versions.get(trial.variant)
    ]


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
