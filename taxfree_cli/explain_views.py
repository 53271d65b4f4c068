"""How accounts of the taxes are shown: bars that fit the terminal, a row per shape, pictures."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from taxfree.errors import TaxfreeError
from taxfree.shapes import written
from taxfree_cli.bench_views import us
from taxfree_cli.output import results
from taxfree_cli.record_views import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from taxfree.explain import Explanation, Pipeline, Timeline
    from taxfree.stamping import Span
    from taxfree.taxes import Account, Part
    from taxfree.timeline import Activity

_LABEL, _TIME, _SPREAD, _SHARE = 20, 9, 8, 6
_FIGURES = _LABEL + _TIME + _SPREAD + _SHARE
_WIDEST_BAR = 40
_STYLES = {
    "launch": "red",
    "bulk synchronous": "yellow",
    "locality": "magenta",
    "graph penalty": "red",
    "residual": "blue",
    "bound": "green",
}


def print_explanation(explanation: Explanation) -> None:
    """Print one problem: its bounds, each pipeline's account, and what dispatch picks."""
    console = results()
    for line in lines(explanation, console.width):
        console.print(line, highlight=False)
    console.print()


def lines(explanation: Explanation, width: int) -> list[Text | Table]:
    """One problem as lines that fit `width` characters."""
    modelled = " modelled" if explanation.is_modelled else ""
    bounds = explanation.bounds
    gemm = "-" if bounds.t_gemm_us is None else us(bounds.t_gemm_us)
    found: list[Text | Table] = [
        Text(f"{explanation.op} {written(explanation.op, explanation.problem)}", style="bold"),
        Text(
            f"{explanation.hardware}: bound {us(bounds.t_bound_us)} us (floor "
            f"{us(bounds.t_floor_us)}, link {us(bounds.t_link_us)}), gemm alone {gemm} us{modelled}"
        ),
    ]
    for pipeline in explanation.pipelines:
        found += _pipeline(pipeline, width, modelled)
    for each in explanation.skipped:
        found.append(Text(f"{each.variant}: {each.state}: {each.reason}"))
    if explanation.choice is not None:
        choice = explanation.choice
        found.append(Text(f"dispatch picks {choice.variant} ({choice.kind}): {choice.why}"))
        for rung in explanation.ladder:
            mark = "+" if rung.found else "-"
            found.append(Text(f"  {mark} {rung.looked_for}: {rung.why}", style="dim"))
    return found


# -- one pipeline --


def _pipeline(pipeline: Pipeline, width: int, modelled: str) -> list[Text | Table]:
    account = pipeline.slowest
    name = f"{pipeline.variant} {words(pipeline.config)}".rstrip()
    kernels = f"{pipeline.kernels} kernel{'s' if pipeline.kernels > 1 else ''}"
    graph = "" if account.t_graph_us is None else f", {us(account.t_graph_us)} in a graph"
    ranks = f"; slowest: rank {account.rank}" if len(pipeline.accounts) > 1 else ""
    found: list[Text | Table] = [
        Text(f"\n{'dispatch: ' if pipeline.is_dispatched else ''}{name}", style="bold"),
        Text(f"{us(account.t_eager_us)} us eager{graph}, {kernels}{ranks}{modelled}"),
    ]
    for tax in dict.fromkeys(part.tax for part in account.parts):
        time = account.tax_us(tax)
        assert time is not None
        found.append(_tax(tax, time, None, account, width, modelled))
        for part in account.parts:
            if part.tax == tax:
                found += _part(part, account, width)
    residual = account.residual_us
    found.append(_tax("residual", residual, account.residual_iqr_us, account, width, modelled))
    if account.kernel_us is not None:
        found.append(_of_residual("kernels", account.kernel_us, account))
        found.append(_of_residual("unexplained", account.residual_us - account.kernel_us, account))
    if account.unsplit:
        found += _remark(account.unsplit, width)
    found.append(_tax("bound", account.t_bound_us, None, account, width, modelled))
    if pipeline.stamped is not None:
        found += [Text(f"  open: {problem}", style="red") for problem in account.problems()]
        found += _instrument(pipeline, width)
        if len(pipeline.accounts) > 1:
            found.append(_ranks(pipeline.accounts, width))
    return found


def _tax(
    name: str, time: float, spread: float | None, account: Account, width: int, remark: str
) -> Text:
    share = time / account.t_eager_us
    line = Text(_figures(f"  {name}", time, spread, share) + remark)
    room = min(_WIDEST_BAR, width - len(line) - 2)
    return line.append("  ").append("█" * round(room * max(0.0, share)), style=_STYLES[name])


def _part(part: Part, account: Account, width: int) -> list[Text]:
    line = Text(_figures(f"    {part.name}", part.us, part.iqr_us, part.us / account.t_eager_us))
    method = part.method
    if part.memory_bytes:
        method += f"; {_bytes(part.memory_bytes)}"
    if len(line) + 2 + len(method) <= width:
        return [line.append(f"  {method}", style="dim")]
    return [line, *_remark(method, width)]


def _of_residual(name: str, time: float, account: Account) -> Text:
    return Text(_figures(f"    {name}", time, None, time / account.t_eager_us))


def _figures(label: str, time: float, spread: float | None, share: float) -> str:
    iqr = "" if spread is None else f"±{_signed(spread)}"
    return f"{label:<{_LABEL}}{_signed(time):>{_TIME}}{iqr:>{_SPREAD}}{share:>{_SHARE}.0%}"


def _signed(time: float) -> str:
    """Microseconds, which may be negative: hundredths of short times only."""
    digits = 2 if abs(time) < 10 else 1 if abs(time) < 100 else 0
    return f"{time:.{digits}f}"


def _bytes(count: int) -> str:
    unit, name = (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    return f"{us(count / unit, 3)} {name}"


def _remark(text: str, width: int) -> list[Text]:
    return [Text(f"      {line}", style="dim") for line in textwrap.wrap(text, max(20, width - 6))]


def _instrument(pipeline: Pipeline, width: int) -> list[Text]:
    """How exact it is, and what steps take elsewhere than in place."""
    assert pipeline.stamped is not None
    measured = pipeline.stamped.measurement
    said = [
        f"a clock reading adds {us(float(measured.stamp_us().max()), 3)} us, taken off each step; "
        f"the clock moves by {us(measured.alignment.step_ns * 1e-3, 3)} us"
    ]
    if measured.notes is not None:
        notes_us = measured.notes_us()
        share = notes_us / (pipeline.slowest.t_graph_us or pipeline.slowest.t_eager_us)
        said.append(f"noting what programs do adds {_signed(notes_us)} us, {share:.0%}")
    alone = pipeline.stamped.alone
    if alone:
        each = " + ".join(f"{step.name} {us(step.us)}{_at(step.mhz)}" for step in alone)
        in_place = pipeline.stamped.mhz.get("graph")
        said.append(
            f"alone: {each} = {us(sum(step.us for step in alone))} us; the whole in a graph"
            f"{_at(in_place)}"
        )
    return [line for text in said for line in _remark(text, width)]


def _at(mhz: float | None) -> str:
    return "" if mhz is None else f" at {mhz:.0f} MHz"


def _ranks(accounts: Sequence[Account], width: int) -> Table:
    """All ranks, part by part; tax by tax where the terminal is narrow."""
    parts = [part.name for part in accounts[0].parts]
    by_part = _table(("rank", "eager", *parts, "residual"), _rank_rows(accounts, by_part=True))
    if _width(by_part) <= width:
        return _rendered(by_part)
    taxes = list(dict.fromkeys(part.tax for part in accounts[0].parts))
    short = [tax.replace("bulk synchronous", "bulk") for tax in taxes]
    return _rendered(
        _table(("rank", "eager", *short, "residual"), _rank_rows(accounts, by_part=False))
    )


def _rank_rows(accounts: Sequence[Account], *, by_part: bool) -> list[tuple[str, ...]]:
    rows = []
    for account in accounts:
        if by_part:
            times = [part.us for part in account.parts]
        else:
            taxes = dict.fromkeys(part.tax for part in account.parts)
            times = [account.tax_us(tax) or 0.0 for tax in taxes]
        figures = (account.t_eager_us, *times, account.residual_us)
        rows.append((str(account.rank), *map(_signed, figures)))
    return rows


_Cells = list[tuple[str, ...]]


def _table(headings: Sequence[str], rows: _Cells) -> _Cells:
    return [tuple(headings), *rows]


def _width(cells: _Cells) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True))


def _rendered(cells: _Cells) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in cells[0]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    return table


# -- many problems --

#: heading -> cell of an account; the last go first where the terminal is narrow
_SWEEP: dict[str, Callable[[Account], str]] = {
    "eager": lambda account: us(account.t_eager_us),
    "launch": lambda account: _optional(account.tax_us("launch")),
    "bulk": lambda account: _optional(account.tax_us("bulk synchronous")),
    "locality": lambda account: _optional(account.tax_us("locality")),
    "residual": lambda account: _signed(account.residual_us),
    "bound": lambda account: us(account.t_bound_us),
    "graph": lambda account: _optional(account.t_graph_us),
    "penalty": lambda account: _optional(account.tax_us("graph penalty")),
}


def print_sweep(explained: Sequence[Explanation]) -> None:
    """Print one row per problem and pipeline, in microseconds per call of the slowest rank."""
    console = results()
    console.print(Text(sweep_title(explained), style="bold"))
    console.print(sweep(explained, console.width))
    if not explained[0].is_modelled:
        console.print(Text("* dispatch picks it; ! open: see docs/taxes.md", style="dim"))


def sweep_title(explained: Sequence[Explanation]) -> str:
    """What all problems of a sweep have in common."""
    first = explained[0]
    differ = varying([each.problem for each in explained])
    same = {name: value for name, value in first.problem.items() if name not in differ}
    modelled = ", modelled" if first.is_modelled else ""
    return f"{first.op} {written(first.op, same)}, {first.hardware}, us{modelled}"


def sweep(explained: Sequence[Explanation], width: int) -> Table:
    """The table of `print_sweep`; columns that do not fit are left out."""
    differ = varying([each.problem for each in explained])
    names = list(_SWEEP)
    while True:
        cells: _Cells = [(*differ, "variant", *names)]
        for explanation in explained:
            for pipeline in explanation.pipelines:
                fields = (str(explanation.problem[name]) for name in differ)
                figures = (_SWEEP[name](pipeline.slowest) for name in names)
                cells.append((*fields, _marked(pipeline), *figures))
        if _width(cells) <= width or len(names) == 1:
            return _rendered(cells)
        names.pop()


def _marked(pipeline: Pipeline) -> str:
    """The variant's name: * where dispatch picks it, ! where its account is open."""
    picked = "*" if pipeline.is_dispatched else ""
    is_open = pipeline.stamped is not None and pipeline.slowest.problems()
    return f"{pipeline.variant}{picked}{'!' if is_open else ''}"


def varying(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which problems differ."""
    first = problems[0]
    return [name for name in first if any(each[name] != first[name] for each in problems)]


def _optional(time: float | None) -> str:
    return "-" if time is None else _signed(time)


# -- pictures --

#: field of a row -> what it is called, and its colour; the lowest of a bar first
_STACK = {
    "t_bound_us": ("bound", "#4c9f70"),
    "residual_us": ("residual", "#8fa3bf"),
    "locality_us": ("locality", "#b48ead"),
    "bulk_synchronous_us": ("bulk synchronous", "#e0b04a"),
    "launch_us": ("launch", "#cf5c5c"),
    "graph_penalty_us": ("graph penalty", "#5c2b2b"),
}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the parts of each row as a stacked bar, a group per problem, and its bound.

    Args:
        rows: of `Explanation.rows`, or of a file of `explain --json`; at least one.
        path: a PNG, or what else matplotlib writes by that name.

    Raises:
        TaxfreeError: the picture cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    along = varying([row["problem"] for row in rows])[:1]
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(_panel(row, along), []).append(row)
    widest = max(map(len, panels.values()))
    size = (max(8.0, 2.0 + 0.5 * widest), 3.6 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, panel) in zip(axes, panels.items(), strict=True):
        _bars(axis, panel, along)
        axis.set_title(title, fontsize="small")
    shown = {field: style for field, style in _STACK.items() if any(row[field] for row in rows)}
    swatches = [Patch(color=colour, label=name) for name, colour in reversed(shown.values())]
    line = Line2D([], [], color="black", linewidth=1, label="t_bound")
    figure.legend(handles=[*swatches, line], loc="outside right upper", fontsize="x-small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise TaxfreeError(f"{path} cannot be written: {error}", "name a .png file") from error


def _panel(row: Mapping[str, Any], along: Sequence[str]) -> str:
    fields = {name: value for name, value in row["problem"].items() if name not in along}
    # The direction of the gather is what panels differ in, so it is said even by default.
    title = f"gather_dim={fields.pop('gather_dim')} " if "gather_dim" in fields else ""
    modelled = ", modelled" if row["is_modelled"] else ""
    return f"{title}{written(row['op'], fields)}, {row['hardware']}{modelled}"


def _bars(axis: Axes, panel: Sequence[Mapping[str, Any]], along: Sequence[str]) -> None:
    at, lowest, highest = 0.0, 0.0, 0.0
    ticks, names = [], []
    problem = None
    for row in panel:
        name = row["variant"]
        if row["problem"] != problem:
            problem = row["problem"]
            at += 0.6
            name = " ".join([*(f"{field}={problem[field]}" for field in along), "", name])
        above = below = 0.0
        for field, (_, colour) in _STACK.items():
            time = row[field] or 0.0
            axis.bar(at, time, 0.9, bottom=above if time >= 0 else below, color=colour)
            above, below = above + max(0.0, time), below + min(0.0, time)
        axis.hlines(row["t_bound_us"], at - 0.5, at + 0.5, "black", linewidth=1)
        lowest, highest = min(lowest, below), max(highest, above)
        ticks.append(at)
        names.append(name)
        at += 1
    axis.set_xticks(ticks, names, rotation=90, fontsize="x-small")
    axis.set_xlim(-0.2, at - 0.2)
    axis.set_ylim(1.05 * lowest, 1.05 * highest)  # bars stick to the edges by themselves
    axis.set_ylabel("us per call, eager")
    axis.axhline(0, color="black", linewidth=0.5)


_ACTIVITIES = {"send": "#e0b04a", "compute": "#4c9f70", "wait": "#cf5c5c"}  # the last on top
_STEPS = ("#5b8cc0", "#b48ead", "#4c9f70", "#8fa3bf", "#e0b04a")
_BAND = 0.8  # of the distance from rank to rank


def draw_timelines(timelines: Sequence[Timeline], title: str, path: Path) -> None:
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
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = dict.fromkeys(step.name for timeline in timelines for step in timeline.steps)
    steps = dict(zip(names, itertools.cycle(_STEPS), strict=False))
    ranks = 1 + max(rank for timeline in timelines for rank in timeline.ranks)
    size = (9.0, 0.8 + len(timelines) * (0.6 + 0.45 * ranks))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for axis, timeline in zip(axes, timelines, strict=True):
        programs = 1 + max((each.program for each in timeline.activities), default=0)
        bars: dict[str, list[_Bar]] = {}
        for step in timeline.steps:
            bars.setdefault(step.name, []).append(_bar(step, step.rank - _BAND / 2, _BAND))
        for kind in _ACTIVITIES:
            for each in timeline.activities:
                if each.kind == kind:
                    top = each.rank - _BAND / 2 + each.program * _BAND / programs
                    bars.setdefault(kind, []).append(_bar(each, top, _BAND / programs))
        colours = steps | _ACTIVITIES
        _draw_bars(axis, bars, colours)
        axis.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize="x-small")
        axis.set_ylim(ranks - 0.5, -0.5)
        axis.set_title(timeline.variant, fontsize="small", loc="left")
        swatches = [Patch(color=colours[name], label=name) for name in bars]
        axis.legend(handles=swatches, fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    axes[-1].set_xlabel("us since the first event of the call")
    figure.suptitle(title, fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise TaxfreeError(f"{path} cannot be written: {error}", "name a .png file") from error


_Bar = list[tuple[float, float]]


def _bar(timed: Span | Activity, top: float, height: float) -> _Bar:
    """The corners of a bar."""
    left, right, bottom = timed.begin_us, timed.end_us, top + height
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _draw_bars(axis: Axes, bars: Mapping[str, list[_Bar]], colours: Mapping[str, str]) -> None:
    """One collection per colour: there may be ten thousand bars."""
    from matplotlib.collections import PolyCollection

    for name, corners in bars.items():
        axis.add_collection(PolyCollection(corners, facecolors=colours[name], linewidths=0))
    axis.autoscale_view()
