"""The figures of a report: rows, how Altair draws them, and which columns their tables have.

Colours are variables of the page's style sheet, so that one drawing serves light, dark and paper.
Quantities are therefore coloured in classes, not along a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import altair as alt
import vl_convert

from taxfree.reporting import calls, comparisons, studies
from taxfree.reporting.sources import Sources

#: limits of the classes of speed-up, and the class above, below and between them
_LIMITS = (0.8, 1 - comparisons.EVEN, 1 + comparisons.EVEN, 1.25, 1.5)
_CLASSES = ("loss2", "loss1", "even", "gain1", "gain2", "gain3")


def _class_of(ratio: str) -> str:
    """The class of a ratio, as an expression of Vega."""
    *below, last = _CLASSES
    tests = [f"{ratio} < {limit} ? '{name}'" for limit, name in zip(_LIMITS, below, strict=True)]
    return " : ".join([*tests, f"'{last}'"])


_PARTS = (
    *("bound", "kernel work", "residual", "locality"),
    *("bulk synchronous", "launch", "graph penalty"),
)
_KINDS = ("send", "compute", "wait")
_STEPS = (0, 1, 3, 5, 6, 7)  # colours that none of these has
_ROWS = alt.NamedData("rows")
_FONT = "system-ui, sans-serif"


@dataclass(frozen=True)
class Column:
    """A column of a figure's table: its heading, and the key of a row."""

    heading: str
    key: str


@dataclass(frozen=True)
class Control:
    """A choice above a figure.

    Args:
        label: before it.
        name: the key of rows that are shown where it equals the choice, or a drawing's parameter.
        kind: "rows" or "parameter".
        choices: value -> as it is called; the first is chosen.
    """

    label: str
    name: str
    kind: Literal["rows", "parameter"]
    choices: dict[str, str]


@dataclass(frozen=True)
class Figure:
    """A drawing with its rows and its table.

    Args:
        name: its anchor.
        title: above it.
        rows: what is drawn; all have `op`, `gpus`, `machine`, `measured` and `source`.
        drawing: in Vega, of a data set named "rows".
        columns: of the table.
        controls: choices above it.
        table: rows of the table, if they are not those that are drawn.
        widths: least and most of a strip, in pixels.
    """

    name: str
    title: str
    rows: list[dict[str, Any]]
    drawing: dict[str, Any]
    columns: tuple[Column, ...]
    controls: tuple[Control, ...] = ()
    table: list[dict[str, Any]] = field(default_factory=list)
    widths: tuple[int, int] = (200, 4096)


@dataclass(frozen=True)
class Section:
    """A heading, a few sentences, and figures; without figures, why there are none."""

    name: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    without: str


def sections(sources: Sources) -> list[Section]:
    """All sections of a report."""
    compared = comparisons.rows(comparisons.comparisons(sources))
    return [
        Section(
            "map",
            "Map: fused against the library",
            "A cell is one problem: the library's time over ours. The library's time is that of "
            "its fastest path, in a graph or eager; ours is in a graph where there are graphs. "
            "Orange is slower than the library, blue is faster, grey is within 5 %.",
            tuple(map_of(op, compared) for op in dict.fromkeys(row["op"] for row in compared)),
            "There are no records of problems of this version.",
        ),
        Section(
            "speed-up",
            "Speed-up, with losses",
            "Each mark is a problem. Left of the line at 1, the library is faster.",
            (speedups(compared),) if compared else (),
            "There are no records of problems of this version.",
        ),
        Section(
            "taxes",
            "Taxes before and after",
            "Of each pair of bars the upper is an eager call of the library, the lower one of what "
            "dispatch ran. Parts below the bound's are taxes and what is left; negative parts "
            "are drawn to the left of zero.",
            _some(taxes_of, calls.taxes(sources)),
            "No account is at hand. The output of taxfree explain --json is one: give that file "
            "with --results.",
        ),
        Section(
            "studies",
            "Studies",
            "Each tuned problem is a study: candidates in the order in which they were tried, and "
            "the best so far. Importances are Optuna's PED-ANOVA over the meta-parameters of "
            "one variant; with few trials they are rough.",
            (
                *_some(convergence_of, studies.convergence(sources)),
                *_some(importances_of, studies.importances(sources)),
            ),
            "No trials are at hand. Shipped tables hold records without their trials; the database "
            "of taxfree tune holds both: give it with --db.",
        ),
        Section(
            "timeline",
            "Timeline of one call",
            "Steps of the library are bars of a rank. Programs of a fused kernel are thin bars in "
            "the band of their rank: when each computes, waits and sends.",
            _some(timeline_of, calls.timelines(sources)),
            "No timeline is at hand. The file of taxfree explain --trace is one: give it with "
            "--results.",
        ),
    ]


def _some(make: Any, rows: list[dict[str, Any]]) -> tuple[Figure, ...]:
    return (make(rows),) if rows else ()


# -- the map and the losses --

_COMPARED = (
    Column("problem", "family"),
    Column("rows or keys", "size"),
    Column("GPUs", "gpus"),
    Column("ours, times as fast", "ours_x"),
    Column("dispatch, times as fast", "dispatch_x"),
    Column("ours", "ours"),
    Column("ours, us", "ours_us"),
    Column("dispatch", "dispatch"),
    Column("dispatch, us", "dispatch_us"),
    Column("library", "library"),
    Column("library, us", "library_us"),
    Column("bound, us", "bound_us"),
    Column("bound is", "bound"),
    Column("kernel", "kernel"),
    Column("machine", "machine"),
    Column("measured", "measured"),
    Column("source", "source"),
    Column("config of ours", "config"),
)
_LOST = (
    Column("operation", "op"),
    *_COMPARED[:-7],
    Column("measured", "measured"),
    Column("source", "source"),
)
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
_PAINT = alt.Color("paint:N", scale=None, legend=None)


def map_of(op: str, compared: Sequence[dict[str, Any]]) -> Figure:
    """The map of one operation: sizes along, numbers of GPUs down, a strip per family."""
    rows = [row for row in compared if row["op"] == op]
    sizes = len({row["size"] for row in rows})
    x = alt.X("size:O", title=rows[0]["size_field"], axis=alt.Axis(labelAngle=0, **_compact()))
    y = alt.Y("gpus:O", title="GPUs")
    cells = alt.Chart().mark_rect(cornerRadius=3, strokeWidth=2)
    figures = alt.Chart().mark_text(fontSize=11, aria=False)
    drawn = alt.layer(
        cells.encode(
            x=x,
            y=y,
            color=_PAINT,
            description="said:N",
            stroke=alt.condition(
                "datum.kernel == 'current'", alt.value("transparent"), alt.value("var(--stale)")
            ),
            tooltip=_hover(_COMPARED),
        ),
        figures.encode(
            x=x,
            y=y,
            text=alt.Text("x:Q", format=".2f"),
            color=alt.Color("ink:N", scale=None, legend=None),
        ),
        data=_ROWS,
    ).properties(width=300, height=alt.Step(24))
    return Figure(
        f"map-{op}",
        op,
        rows,
        _finished(_strips(drawn, "family", rows), _RATIO, measure="ours"),
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
            color=alt.Color("verdict:N", scale=None, legend=None),
            description="said:N",
            tooltip=_hover(_COMPARED),
        )
    )
    drawn = alt.layer(ticks, line, data=_ROWS).properties(width=300, height=alt.Step(20))
    chart = _strips(drawn, "op", rows)
    losses = [
        row
        for row in rows
        if any(row[name] is not None and row[name] < 1 for name in ("ours_x", "dispatch_x"))
    ]
    losses.sort(key=lambda row: min(row["ours_x"] or 9.0, row["dispatch_x"] or 9.0))
    return Figure(
        "speed-ups",
        "All problems",
        rows,
        _finished(chart, _RATIO, measure="ours"),
        _LOST,
        (_MEASURE,),
        table=losses,
    )


_FOR_OFFSET: dict[str, Any] = {"for": "offset"}


# -- taxes --

_TAXED = (
    Column("panel", "panel"),
    Column("rows", "size"),
    Column("variant", "variant"),
    Column("part", "part"),
    Column("us", "us"),
    Column("% of the library's call", "percent"),
    Column("whole call, us", "total_us"),
    Column("machine", "machine"),
    Column("measured", "measured"),
    Column("source", "source"),
)


def taxes_of(rows: list[dict[str, Any]]) -> Figure:
    """Stacked bars: of each size one bar per pipeline."""
    unit = "datum[unit == 'us' ? 'us' : 'percent']"
    end = "datum[unit == 'us' ? 'end_us' : 'end_percent']"
    y = alt.Y("size:O", title=rows[0]["size_field"])
    offset = alt.YOffset("pipeline:O")
    bars = (
        alt.Chart(_ROWS)
        .transform_calculate(
            value=unit,
            said="datum.size_field + ' ' + datum.size + ', ' + datum.variant + ': ' + datum.part"
            " + ' ' + datum.us + ' us, ' + format(datum.percent, '.0f') + ' % of the call of the"
            " library; the whole call ' + datum.total_us + ' us' + datum.remark",
        )
        .mark_bar(opacity=1)
        .encode(
            x=alt.X("value:Q", title=None, axis=alt.Axis(labelExpr=_UNIT_LABEL)),
            y=y,
            yOffset=offset,
            color=alt.Color(
                "part:N",
                title=None,
                sort=list(_PARTS),
                scale=alt.Scale(
                    domain=list(_PARTS),
                    range=[f"var(--{name.replace(' ', '-')})" for name in _PARTS],
                ),
                legend=None,
            ),
            order="depth:Q",
            description="said:N",
            tooltip=_hover(_TAXED),
        )
    )
    names = (
        alt.Chart(_ROWS)
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
    chart = alt.layer(bars, names, room).properties(
        width="container", height=alt.Step(15, **_FOR_OFFSET)
    )
    panels = dict.fromkeys(row["panel"] for row in rows)
    return Figure(
        "taxes-bars",
        "One eager call of the slowest rank",
        rows,
        _finished(chart, unit="percent"),
        _TAXED,
        (
            Control("Problem", "panel", "rows", {panel: panel for panel in panels}),
            Control(
                "Scale",
                "unit",
                "parameter",
                {"percent": "percent of the library's call", "us": "microseconds"},
            ),
        ),
    )


_UNIT_LABEL = "datum.label + (unit == 'us' ? ' us' : ' %')"


# -- studies --

_TRIED = (
    Column("study", "panel"),
    Column("trial", "trial"),
    Column("variant", "variant"),
    Column("config", "config"),
    Column("us", "us"),
    Column("best so far, us", "best_us"),
    Column("library, us", "library_us"),
    Column("machine", "machine"),
    Column("measured", "measured"),
    Column("source", "source"),
)
_IMPORTANT = (
    Column("study", "panel"),
    Column("variant", "variant"),
    Column("meta-parameter", "parameter"),
    Column("importance", "importance"),
    Column("trials", "trials"),
    Column("machine", "machine"),
    Column("measured", "measured"),
    Column("source", "source"),
)


def _study_control(rows: Sequence[dict[str, Any]]) -> Control:
    panels = dict.fromkeys(row["panel"] for row in rows)
    return Control("Study", "panel", "rows", {panel: panel for panel in panels})


def convergence_of(rows: list[dict[str, Any]]) -> Figure:
    """Times of trials as points, the best so far as a line, the library's as a dashed one."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    x = alt.X("trial:Q", title="trial", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(nice=False))
    points = (
        alt.Chart(_ROWS)
        .transform_calculate(
            said="'trial ' + datum.trial + ', ' + datum.variant + ' ' + datum.config + ': '"
            " + datum.us + ' us, best so far ' + datum.best_us + ' us'"
        )
        .mark_circle(size=60, opacity=1)
        .encode(
            x=x,
            y=alt.Y("us:Q", title="us", scale=alt.Scale(type="log", zero=False)),
            color=alt.Color(
                "variant:N",
                title=None,
                scale=alt.Scale(
                    domain=variants,
                    range=[f"var(--c{place % 8})" for place in range(len(variants))],
                ),
                legend=alt.Legend(orient="bottom", columns=4),
            ),
            description="said:N",
            tooltip=_hover(_TRIED),
        )
    )
    best = (
        alt.Chart(_ROWS)
        .mark_line(interpolate="step-after", color="var(--ink)", aria=False)
        .encode(x=x, y="best_us:Q")
    )
    library = (
        alt.Chart(_ROWS)
        .transform_aggregate(us="max(library_us)")
        .mark_rule(strokeDash=[4, 4], color="var(--loss2)", strokeWidth=2, aria=False)
        .encode(y="us:Q")
    )
    chart = alt.layer(library, best, points).properties(width="container", height=240)
    return Figure(
        "convergence",
        "Convergence; the dashed line is the library",
        rows,
        _finished(chart),
        _TRIED,
        (_study_control(rows),),
    )


def importances_of(rows: list[dict[str, Any]]) -> Figure:
    """A bar per meta-parameter, the variants one after another."""
    chart = (
        alt.Chart(_ROWS)
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
            tooltip=_hover(_IMPORTANT),
        )
        .properties(width="container", height=alt.Step(18))
    )
    return Figure(
        "importances",
        "Importance of meta-parameters",
        rows,
        _finished(chart),
        _IMPORTANT,
        (_study_control(rows),),
    )


# -- timelines --

_SPENT = (
    Column("call", "panel"),
    Column("variant", "variant"),
    Column("rank", "rank"),
    Column("step or activity", "kind"),
    Column("how often", "count"),
    Column("first begin, us", "begin_us"),
    Column("last end, us", "end_us"),
    Column("machine", "machine"),
    Column("measured", "measured"),
    Column("source", "source"),
)


def timeline_of(rows: list[dict[str, Any]]) -> Figure:
    """Bars over time, a strip per pipeline, a band per rank."""
    steps = [kind for kind in dict.fromkeys(row["kind"] for row in rows) if kind not in _KINDS]
    kinds = [*steps, *_KINDS]
    colours = [f"var(--c{_STEPS[place % len(_STEPS)]})" for place in range(len(steps))]
    colours += [f"var(--{kind})" for kind in _KINDS]
    ranks = 1 + max(row["rank"] for row in rows)
    drawn = (
        alt.Chart(_ROWS)
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
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=kinds, range=colours),
                legend=alt.Legend(orient="bottom", columns=4),
            ),
            order="layer:Q",
            description="said:N",
            tooltip=[
                alt.Tooltip("kind:N"),
                alt.Tooltip("rank:O"),
                alt.Tooltip("program:O"),
                alt.Tooltip("begin_us:Q"),
                alt.Tooltip("end_us:Q"),
                alt.Tooltip("measured:N"),
            ],
        )
        .properties(width=300, height=max(70, 36 * ranks))
    )
    panels = dict.fromkeys(row["panel"] for row in rows)
    return Figure(
        "timeline-call",
        "One call of each pipeline",
        rows,
        _finished(_strips(drawn, "variant", rows)),
        _SPENT,
        (Control("Call", "panel", "rows", {panel: panel for panel in panels}),),
        table=calls.spans(rows),
    )


# -- all drawings --


def _strips(drawn: Any, by: str, rows: Sequence[dict[str, Any]]) -> Any:
    """A drawing per value of a key, one below the other, in the order of the rows."""
    order = list(dict.fromkeys(row[by] for row in rows))
    header = alt.Header(labelOrient="top", labelAnchor="start", labelAngle=0, labelPadding=2)
    row = alt.Row(f"{by}:N", title=None, sort=order, header=header)
    return drawn.facet(row=row, spacing=6).resolve_scale(y="independent")


def _hover(columns: Sequence[Column]) -> list[alt.Tooltip]:
    """The cells of a row's table, under their headings; a second heading of a name is left out."""
    named = {column.heading: column.key for column in reversed(columns)}
    kept = [column for column in columns if named[column.heading] == column.key]
    return [alt.Tooltip(field=c.key, title=c.heading, type="nominal") for c in kept]


def _compact() -> dict[str, Any]:
    """Axis options that write 131072 as 128K."""
    exact = "datum.value >= 2048 && datum.value % 1024 == 0"
    return {"labelExpr": f"{exact} ? datum.value / 1024 + 'K' : datum.value"}


def _finished(
    chart: Any, transform: Sequence[dict[str, str]] = (), **parameters: str
) -> dict[str, Any]:
    """The drawing as JSON, with parameters and the page's colours.

    Args:
        transform: of the rows, before all else.
    """
    if parameters:
        chart = chart.add_params(*(alt.param(name=n, value=v) for n, v in parameters.items()))
    ink, faint, line = "var(--ink)", "var(--faint)", "var(--line)"
    chart = chart.configure(background="transparent", font=_FONT)
    chart = chart.configure_view(stroke=None).configure_axis(
        labelColor=faint,
        titleColor=faint,
        titleFontWeight="normal",
        gridColor=line,
        domainColor=line,
        tickColor=line,
        labelFontSize=11,
        titleFontSize=11,
    )
    chart = chart.configure_header(labelColor=ink, labelFontSize=12, labelFont=_FONT)
    chart = chart.configure_legend(labelColor=ink, labelFontSize=11, symbolType="square")
    drawing: dict[str, Any] = chart.to_dict()
    if transform:
        drawing["transform"] = list(transform)
    # Compiled here: the page need not do it, nor show the compiler's warnings.
    drawing = vl_convert.vegalite_to_vega(drawing)
    drawing.pop("$schema", None)
    return drawing
