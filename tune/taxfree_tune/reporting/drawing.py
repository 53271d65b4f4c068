"""Shared by the figures of a report: what a figure is, and how Altair draws one.

Colours are variables of the page's style sheet, so that one drawing serves light, dark and paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import altair as alt
import vl_convert

ROWS = alt.NamedData("rows")
ORIGIN = {"machine": "machine", "measured": "measured", "source": "source"}  # columns of tables
_FONT = "system-ui, sans-serif"


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
        columns: of the table: heading -> key of a row.
        controls: choices above it.
        table: rows of the table, if they are not those that are drawn.
        widths: least and most of a strip, in pixels.
    """

    name: str
    title: str
    rows: list[dict[str, Any]]
    drawing: dict[str, Any]
    columns: Mapping[str, str]
    controls: tuple[Control, ...] = ()
    table: list[dict[str, Any]] = field(default_factory=list)
    widths: tuple[int, int] = (200, 4096)


def panel_control(label: str, rows: Sequence[dict[str, Any]]) -> Control:
    """A choice of the panel that is shown."""
    return Control(label, "panel", "rows", {row["panel"]: row["panel"] for row in rows})


def coloured(field: str, colours: Mapping[str, str], **options: Any) -> alt.Color:
    """A colour for each value of a field."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", title=None, scale=scale, **options)


def strips(drawn: Any, by: str, rows: Sequence[dict[str, Any]]) -> Any:
    """A drawing per value of a key, one below the other, in the order of the rows."""
    order = list(dict.fromkeys(row[by] for row in rows))
    header = alt.Header(
        labelOrient="top", labelAnchor="start", labelAngle=0, labelPadding=2,
        labelExpr="split(datum.value, ', ')",
    )  # fmt: skip
    row = alt.Row(f"{by}:N", title=None, sort=order, header=header)
    return drawn.facet(row=row, spacing=6).resolve_scale(y="independent")


def hover(columns: Mapping[str, str]) -> list[alt.Tooltip]:
    """The cells of a row's table, under their headings."""
    return [alt.Tooltip(field=key, title=name, type="nominal") for name, key in columns.items()]


def finished(
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
