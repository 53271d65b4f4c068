"""The map of speed-ups, and all of them on a line, with a table of the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from taxfree_tune.reporting import comparisons
from taxfree_tune.reporting.drawing import ORIGIN, ROWS, Control, Figure, finished, hover, strips

#: limits of the classes of speed-up, and the class above, below and between them: colours are
#: variables of the style sheet, so a ratio has the colour of a class, and not one along a scale
_LIMITS = (0.8, 1 - comparisons.EVEN, 1 + comparisons.EVEN, 1.25, 1.5)
_CLASSES = ("loss2", "loss1", "even", "gain1", "gain2", "gain3")


def _class_of(ratio: str) -> str:
    """The class of a ratio, as an expression of Vega."""
    *below, last = _CLASSES
    tests = [f"{ratio} < {limit} ? '{name}'" for limit, name in zip(_LIMITS, below, strict=True)]
    return " : ".join([*tests, f"'{last}'"])


_COMPARED = {
    "problem": "family",
    "rows or keys": "size",
    "GPUs": "gpus",
    "ours, times as fast": "ours_x",
    "dispatch, times as fast": "dispatch_x",
    "ours": "ours",
    "ours, us": "ours_us",
    "dispatch": "dispatch",
    "dispatch, us": "dispatch_us",
    "library": "library",
    "library, us": "library_us",
    "bound, us": "bound_us",
    "bound is": "bound",
    "kernel": "kernel",
    **ORIGIN,
    "config of ours": "config",
}
_ABSENT_OF_LOSSES = ("bound, us", "bound is", "kernel", "machine", "config of ours")
_LOST = {"operation": "op"} | {
    name: key for name, key in _COMPARED.items() if name not in _ABSENT_OF_LOSSES
}
_MEASURE = Control(
    "Compare",
    "measure",
    "parameter",
    {"ours": "our fastest variant", "dispatch": "what dispatch runs"},
)
#: the ratio that is compared, its class, and a sentence; of rows that have the ratio
_RATIO: tuple[dict[str, str], ...] = (
    {"calculate": "datum[measure + '_x']", "as": "x"},
    {"filter": "isValid(datum.x)"},
    {"calculate": _class_of("datum.x"), "as": "class"},
    {"calculate": "'var(--' + datum.class + ')'", "as": "paint"},
    {
        "calculate": "datum.class == 'even' ? 'var(--faint)'"
        " : 'var(--' + slice(datum.class, 0, 4) + ')'",
        "as": "verdict",
    },
    {"calculate": "'var(--on-' + datum.class + ')'", "as": "ink"},
    {
        "calculate": "datum.op + ' ' + datum.family + ', ' + datum.size_field + ' ' + datum.size"
        " + ', ' + datum.gpus + ' GPUs: ' + format(datum.x, '.2f')"
        " + ' times as fast as the library. ' + datum[measure] + ' ' + datum[measure + '_us']"
        " + ' us, library (' + datum.library + ') ' + datum.library_us + ' us, bound '"
        " + datum.bound_us + ' us (' + datum.bound + '). Config ' + datum.config + '. '"
        " + datum.machine + ', measured ' + datum.measured + ', ' + datum.source + ', kernel '"
        " + datum.kernel",
        "as": "said",
    },
)
_RATIO_TICKS = [0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8]
_CELL_WIDTHS = 28, 70
_COMPACT = (  # 131072 as 128K
    "datum.value >= 2048 && datum.value % 1024 == 0 ? datum.value / 1024 + 'K' : datum.value"
)


def _painted(field: str) -> alt.Color:
    """The colour that a field names."""
    return alt.Color(f"{field}:N", scale=None, legend=None)


def map_of(op: str, compared: Sequence[dict[str, Any]]) -> Figure:
    """The map of one operation: sizes along, numbers of GPUs down, a strip per family."""
    rows = [row for row in compared if row["op"] == op]
    sizes = len({row["size"] for row in rows})
    x = alt.X(
        "size:O", title=rows[0]["size_field"], axis=alt.Axis(labelAngle=0, labelExpr=_COMPACT)
    )
    y = alt.Y("gpus:O", title="GPUs")
    cells = alt.Chart().mark_rect(cornerRadius=3, strokeWidth=2)
    figures = alt.Chart().mark_text(fontSize=11, aria=False)
    drawn = alt.layer(
        cells.encode(
            x=x,
            y=y,
            color=_painted("paint"),
            description="said:N",
            stroke=alt.condition(
                "datum.kernel == 'current'", alt.value("transparent"), alt.value("var(--stale)")
            ),
            tooltip=hover(_COMPARED),
        ),
        figures.encode(
            x=x,
            y=y,
            text=alt.Text("x:Q", format=".2f"),
            color=_painted("ink"),
        ),
        data=ROWS,
    ).properties(width=300, height=alt.Step(24))
    return Figure(
        f"map-{op}",
        op,
        rows,
        finished(strips(drawn, "family", rows), _RATIO, measure="ours"),
        _COMPARED,
        (_MEASURE,),
        widths=(sizes * _CELL_WIDTHS[0], sizes * _CELL_WIDTHS[1]),
    )


def speedups(rows: list[dict[str, Any]]) -> Figure:
    """All ratios along, numbers of GPUs down, a strip per operation; the losses as a table."""
    line = alt.Chart().mark_rule(color="var(--ink)", aria=False).encode(x=alt.datum(1))
    ticks = (
        alt.Chart()
        .mark_tick(thickness=3, size=16, opacity=1)
        .encode(
            x=alt.X(
                "x:Q",
                title="times as fast as the library",
                scale=alt.Scale(type="log", nice=False, padding=12),
                axis=alt.Axis(values=_RATIO_TICKS, format="~g"),
            ),
            y=alt.Y("gpus:O", title="GPUs"),
            color=_painted("verdict"),
            description="said:N",
            tooltip=hover(_COMPARED),
        )
    )
    drawn = alt.layer(ticks, line, data=ROWS).properties(width=300, height=alt.Step(20))
    chart = strips(drawn, "op", rows)

    def worst(row: dict[str, Any]) -> float:
        return min(row["ours_x"] or math.inf, row["dispatch_x"] or math.inf)

    losses = sorted((row for row in rows if worst(row) < 1), key=worst)
    return Figure(
        "speed-ups",
        "All problems",
        rows,
        finished(chart, _RATIO, measure="ours"),
        _LOST,
        (_MEASURE,),
        table=losses,
    )
