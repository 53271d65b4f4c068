"""Whole models: tokens per second of each mode, as rows and as bars."""

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
from taxfree_tune.reporting.sources import Sources, iterate, machine_of

_COLOURS = {"torch": "var(--c1)", "taxfree": "var(--c0)"}
_COLUMNS = {
    "phase": "panel",
    "mode": "mode",
    "tokens/s": "tokens_per_s",
    "us": "us",
    "±us": "iqr_us",
    "times as fast as PyTorch": "speedup",
    "error": "error",
    "ran": "ran",
    **ORIGIN,
}


def rows(sources: Sources) -> list[dict[str, Any]]:
    """A row per phase and mode of each model."""
    return [
        {
            "op": "whole model",
            "gpus": row["world_size"],
            "machine": machine_of(file.environment),
            "measured": str(file.environment.get("created", ""))[:10],
            "source": file.source,
            "panel": f"{row['model']}, {row['layers']} layers, {_named(row['phase'])}, "
            f"{row['world_size']} GPUs",
            "path": row["path"],
            "mode": f"{row['path']} {row['mode']}",
            "tokens_per_s": round(row["tokens_per_s"]),
            "us": round(row["median_us"], 1),
            "iqr_us": round(row["iqr_us"], 1),
            "speedup": None if row["speedup"] is None else round(row["speedup"], 3),
            "error": float(f"{row['relative_error']:.2g}"),
            "ran": row.get("ran", ""),
        }
        for file, row in iterate(sources.models)
    ]


def _named(phase: dict[str, Any]) -> str:
    if phase["name"] == "prefill":
        return f"prefill of {phase['length']}"
    return f"decode of batch {phase['batch']} behind {phase['length']}"


def models_of(shown: list[dict[str, Any]]) -> Figure:
    """A bar per mode of the chosen phase."""
    chart = (
        alt.Chart(ROWS)
        .transform_calculate(
            said="datum.mode + ': ' + format(datum.tokens_per_s, ',') + ' tokens per second, '"
            " + datum.us + ' us'",
        )
        .mark_bar(cornerRadius=2)
        .encode(
            x=alt.X("tokens_per_s:Q", title="tokens per second"),
            y=alt.Y("mode:N", title=None, sort=None, axis=alt.Axis(labelLimit=180)),
            color=coloured("path", _COLOURS, legend=None),
            description="said:N",
            tooltip=hover(_COLUMNS),
        )
        .properties(width="container", height=alt.Step(22))
    )
    return Figure(
        "models-bars",
        "Tokens per second of models",
        shown,
        finished(chart),
        _COLUMNS,
        (panel_control("Phase", shown),),
    )
