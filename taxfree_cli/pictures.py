"""Pictures by matplotlib: times over bounds, taxes, timelines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taxfree.errors import TaxfreeError, UsageError
from taxfree.files import require_writable
from taxfree.problems import heading
from taxfree_cli.bench_views import us
from taxfree_cli.explain_views import varying
from taxfree_tune.measuring.results import DISPATCH, Row, by_problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from taxfree_tune.profiling.timeline import Bar, Timeline


def require_picture(path: Path, option: str = "--plot") -> None:
    """Check, before anything is measured, that there can be a picture.

    Args:
        option: that names it.

    Raises:
        TaxfreeError: matplotlib is not installed, or the file cannot be written.
        UsageError: it writes no such pictures.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TaxfreeError(
            f"{option} needs matplotlib, which is not installed", "pip install 'taxfree[plot]'"
        ) from error
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise UsageError(f"{option} {path}: no such kind of picture", f"one of: {', '.join(kinds)}")
    require_writable(path)


def _save(figure: Figure, path: Path) -> None:
    """Write a picture.

    Raises:
        TaxfreeError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise TaxfreeError(f"{path} cannot be written: {error}", "name a .png file") from error


def _without_frame(axis: Axes) -> None:
    """Leave the two lines that scales stand on."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


# -- times over bounds --


def plot_times(rows: Sequence[Row], along: str, path: Path) -> None:
    """Draw time / t_bound against a field of the problem, a panel per other fields.

    Fused variants are drawn through, others dashed, and what dispatch picks is a broad line behind.

    Args:
        rows: measured; of each variant the graph's time, or the eager one without graphs.
        along: the field on the horizontal axis.
        path: a PNG, or what else matplotlib writes by that name.

    Raises:
        TaxfreeError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    panels = _panels(rows, along)
    styles = _styles(rows)
    figure = Figure(figsize=(9.0, 3.6 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for variant, points in curves.items():
            axis.plot(*zip(*sorted(points), strict=True), label=variant, **styles[variant])
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title, fontsize="medium", loc="left")
        axis.set(xlabel=along, ylabel="time / bound")
        axis.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
        highest = max(y for points in curves.values() for _, y in points)
        axis.set_yticks([tick for tick in _TICKS if tick <= 1.5 * highest])
        axis.minorticks_off()
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter("{x:g}")
        axis.grid(axis="y", color="lightgrey", linewidth=0.5)
        _without_frame(axis)
    named: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(named.values(), named, loc="outside right upper", frameon=False)
    _save(figure, path)


_TICKS = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """How each variant's line is drawn, alike in all panels."""
    styles: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.variant == DISPATCH:
            styles[row.variant] = {"color": "gold", "linewidth": 7, "alpha": 0.6, "zorder": 1}
        elif row.variant not in styles:
            line = "-" if row.fused else "--"
            color = "black" if row.variant == "baseline" else f"C{len(styles) % 10}"
            styles[row.variant] = {"color": color, "linestyle": line, "marker": ".", "zorder": 2}
    return styles


def _panels(rows: Sequence[Row], along: str) -> dict[str, dict[str, list[tuple[float, float]]]]:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for group in by_problem(rows):
        fields = {name: value for name, value in group[0].problem.items() if name != along}
        curves = panels.setdefault(heading(group[0].op, fields), {})
        modes = {row.mode for row in group}
        for row in group:
            if row.mode == "graph" or "graph" not in modes:
                point = (row.problem[along], row.x_bound)
                curves.setdefault(row.variant, []).append(point)
    lines = {title: c for title, c in panels.items() if max(map(len, c.values())) > 1}
    return lines or panels  # points are for those who have nothing else


# -- taxes --

#: part of a row -> its colour; the lowest of a bar first
_STACK = {
    "bound": "#4c9f70",
    "kernel work": "#8fa3bf",
    "residual": "#c9d1de",
    "locality": "#b48ead",
    "bulk synchronous": "#e0b04a",
    "launch": "#cf5c5c",
    "graph penalty": "#5c2b2b",
    "no account": "#9a9a9a",
}


def plot_taxes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the parts of each row as a stacked bar, a group per problem, and its bound.

    Args:
        rows: of `Explanation.rows`, or of a file of `explain --json`; at least one.
        path: a PNG, or what else matplotlib writes by that name.

    Raises:
        TaxfreeError: the picture cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from taxfree_tune.taxes import stacked

    along = varying([row["problem"] for row in rows])[:1]
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(_panel(row, along), []).append(row)
    widest = max(map(len, panels.values()))
    size = (max(8.0, 1.0 + 0.75 * widest), 0.6 + 3.4 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, panel) in zip(axes, panels.items(), strict=True):
        _bars(axis, panel, along)
        axis.set_title(title, fontsize="small", loc="left")
    shown = [name for name in _STACK if any(stacked(row).get(name) for row in rows)]
    swatches = [Patch(color=_STACK[name], label=name) for name in shown]
    figure.legend(
        handles=swatches, loc="outside upper left", ncols=len(shown), fontsize="small",
        frameon=False,
    )  # fmt: skip
    _save(figure, path)


def _panel(row: Mapping[str, Any], along: Sequence[str]) -> str:
    fields = {name: value for name, value in row["problem"].items() if name not in along}
    modelled = ", modelled" if row["is_modelled"] else ""
    return f"{heading(row['op'], fields)}, {row['hardware']}{modelled}"


def _bars(axis: Axes, panel: Sequence[Mapping[str, Any]], along: Sequence[str]) -> None:

    from taxfree_tune.taxes import stacked

    at, lowest, highest = 0.0, 0.0, 0.0
    places: list[float] = []
    groups: dict[str, list[float]] = {}
    for row in panel:
        problem = " ".join(f"{field}={row['problem'][field]}" for field in along)
        at += 1.0 if problem in groups else 1.7
        places.append(at)
        groups.setdefault(problem, []).append(at)
        above = below = 0.0
        for name, time in stacked(row).items():
            axis.bar(at, time, 0.85, bottom=above if time >= 0 else below, color=_STACK[name])
            above, below = above + max(0.0, time), below + min(0.0, time)
        axis.text(at, above, us(row["t_eager_us"], 3), ha="center", va="bottom", fontsize="x-small")
        lowest, highest = min(lowest, below), max(highest, above)
    axis.set_ylim(1.05 * lowest, 1.2 * highest)
    for problem, own in groups.items():
        middle = (own[0] + own[-1]) / 2
        axis.text(middle, 1.18 * highest, problem, ha="center", va="top", fontsize="small")
    axis.set_xticks(places, [row["variant"] for row in panel], fontsize="x-small")
    axis.set_xlim(places[0] - 0.9, places[-1] + 0.9)
    axis.set_ylabel("us per eager call", fontsize="small")
    axis.tick_params(axis="x", length=0)
    axis.tick_params(axis="y", labelsize="x-small")
    axis.axhline(0, color="black", linewidth=0.5)
    _without_frame(axis)


# -- timelines --

_ACTIVITIES = {"send": "#e0b04a", "compute": "#4c9f70", "wait": "#cf5c5c"}  # the last on top
_STEPS = ("#5b8cc0", "#b48ead", "#4c9f70", "#8fa3bf", "#e0b04a")


def plot_timelines(timelines: Sequence[Timeline], title: str, path: Path) -> None:
    """Draw one call of each pipeline, one above the other, on one time axis.

    Steps are bars of a rank. Programs of a fused kernel are thin bars in the band of their rank,
    the lowest program id on top.

    Args:
        timelines: the baseline's first.
        title: of the picture.
        path: a PNG, or what else matplotlib writes by that name.

    Raises:
        TaxfreeError: the picture cannot be written.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = dict.fromkeys(step.name for timeline in timelines for step in timeline.steps)
    colours = dict(zip(names, itertools.cycle(_STEPS), strict=False)) | _ACTIVITIES
    ranks = 1 + max(rank for timeline in timelines for rank in timeline.ranks)
    size = (9.0, 0.8 + len(timelines) * (0.6 + 0.45 * ranks))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for axis, timeline in zip(axes, timelines, strict=True):
        shown = []
        for kind, colour in colours.items():
            bars = [_corners(bar) for bar in timeline.bars() if bar.kind == kind]
            if bars:  # one collection: there may be ten thousand
                shown.append(Patch(color=colour, label=kind))
                axis.add_collection(PolyCollection(bars, facecolors=colour, linewidths=0))
        axis.autoscale_view()
        axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize="x-small")
        axis.set_ylim(ranks - 0.5, -0.5)
        axis.set_title(timeline.variant, fontsize="small", loc="left")
        axis.legend(
            handles=shown, fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1),
            frameon=False,
        )  # fmt: skip
        axis.tick_params(labelsize="x-small")
        _without_frame(axis)
    axes[-1].set_xlabel("us since the first event of the call", fontsize="small")
    figure.suptitle(title, fontsize="small")
    _save(figure, path)


def _corners(bar: Bar) -> list[tuple[float, float]]:
    left, right = bar.timed.begin_us, bar.timed.end_us
    return [(left, bar.top), (right, bar.top), (right, bar.bottom), (left, bar.bottom)]
