"""How accounts of the taxes are shown: bars that fit the terminal, a row per shape, pictures."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from taxfree.shapes import format_problem, heading
from taxfree_cli.bench_views import bounds_line, save_picture, us, without_frame
from taxfree_cli.output import results
from taxfree_cli.record_views import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from taxfree.profiling.explain import Explanation, Pipeline
    from taxfree.profiling.program_trace import Activity
    from taxfree.profiling.step_timer import Span
    from taxfree.profiling.timeline import Timeline
    from taxfree.taxes import Account, Part

#: widths of label, time, spread and share; spreads are left out where the terminal is narrow
_COLUMNS, _NARROW_COLUMNS, _NARROW = (20, 9, 8, 6), (18, 7, 0, 5), 54
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
    title = f"{explanation.op} {format_problem(explanation.op, explanation.problem)}"
    limits = f"{explanation.hardware}: {bounds_line(explanation.bounds)}{modelled}"
    found: list[Text | Table] = [*_wrapped(title, width, style="bold"), *_wrapped(limits, width)]
    for pipeline in explanation.pipelines:
        found += _pipeline(pipeline, width, modelled)
    for each in explanation.skipped:
        found += _wrapped(f"{each.variant}: {each.state}: {each.reason}", width)
    if explanation.choice is not None:
        choice = explanation.choice
        picks = f"dispatch picks {choice.variant} ({choice.kind}): {choice.why}"
        said = "; ".join(filter(None, (picks, choice.in_eager_calls)))
        found += [Text(), *_wrapped(said, width)]
        for step in explanation.lookup_trace:
            mark = "+" if step.found else "-"
            found += _wrapped(f"{mark} {step.looked_for}: {step.why}", width, 2, "dim")
    return found


def _wrapped(text: str, width: int, indent: int = 0, style: str = "") -> list[Text]:
    """A text in lines that fit; those after the first are two deeper."""
    first, others = " " * indent, " " * (indent + 2)
    width = max(20, width)
    return [
        Text(line, style=style)
        for line in textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others)
    ]


# -- one pipeline --


def _pipeline(pipeline: Pipeline, width: int, modelled: str) -> list[Text | Table]:
    account = pipeline.slowest
    name = f"{pipeline.variant} {words(pipeline.config)}".rstrip()
    kernels = f"{pipeline.kernels} kernel{'s' if pipeline.kernels > 1 else ''}"
    graph = "" if account.t_graph_us is None else f", {us(account.t_graph_us)} in a graph"
    ranks = f"; slowest: rank {account.rank}" if len(pipeline.accounts) > 1 else ""
    picked = "dispatch: " if pipeline.is_dispatched else ""
    times = f"{us(account.t_eager_us)} us eager{graph}, {kernels}{ranks}{modelled}"
    found: list[Text | Table] = [
        Text(),
        *_wrapped(f"{picked}{name}", width, style="bold"),
        *_wrapped(times, width),
    ]
    if pipeline.signals is not None:
        programs, releases, *by_chiplet = pipeline.signals.values()
        fewest = "".join(f"; {count} if chiplets share one" for count in by_chiplet)
        found += _wrapped(f"{programs} programs signal, {releases} releases{fewest}", width)
    for tax in dict.fromkeys(part.tax for part in account.parts):
        found.append(_tax(tax, account.tax_us(tax) or 0.0, None, account, width, modelled))
        for part in account.parts:
            if part.tax == tax:
                found += _part(part, account, width)
    residual = account.residual_us
    found.append(_tax("residual", residual, account.residual_iqr_us, account, width, modelled))
    if account.kernel_us is not None:
        rest = account.residual_us - account.kernel_us
        for name, time in (("kernel work", account.kernel_us), ("unexplained", rest)):
            share = time / account.t_eager_us
            found.append(Text(_figures(f"    {name}", time, None, share, width)))
    if account.unsplit:
        found += _remark(account.unsplit, width)
    found.append(_tax("bound", account.t_bound_us, None, account, width, modelled))
    if pipeline.timed is not None:
        for problem in account.problems():
            found += _wrapped(f"open: {problem}", width, 2, "red")
        found += _instrument(pipeline, width)
        if len(pipeline.accounts) > 1:
            found.append(_ranks(pipeline.accounts, width))
    return found


def _tax(
    name: str, time: float, spread: float | None, account: Account, width: int, remark: str
) -> Text:
    share = time / account.t_eager_us
    line = Text(_figures(f"  {name}", time, spread, share, width) + remark)
    room = min(_WIDEST_BAR, width - len(line) - 2)
    return line.append("  ").append("█" * round(room * max(0.0, share)), style=_STYLES[name])


def _part(part: Part, account: Account, width: int) -> list[Text]:
    share = part.us / account.t_eager_us
    line = Text(_figures(f"    {part.name}", part.us, part.iqr_us, share, width))
    method = part.method
    if part.memory_bytes:
        method += f"; {_bytes(part.memory_bytes)}"
    if len(line) + 2 + len(method) <= width:
        return [line.append(f"  {method}", style="dim")]
    return [line, *_remark(method, width)]


def _figures(label: str, time: float, spread: float | None, share: float, width: int) -> str:
    columns = _COLUMNS if width >= _NARROW else _NARROW_COLUMNS
    iqr = "" if spread is None or not columns[2] else f"±{_signed(spread)}"
    return (
        f"{label:<{columns[0]}}{_signed(time):>{columns[1]}}{iqr:>{columns[2]}}"
        f"{share:>{columns[3]}.0%}"
    )


def _signed(time: float) -> str:
    """Microseconds, which may be negative: hundredths of short times only."""
    digits = 2 if abs(time) < 10 else 1 if abs(time) < 100 else 0
    return f"{time:.{digits}f}"


def _bytes(count: int) -> str:
    unit, name = (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    return f"{us(count / unit, 3)} {name}"


def _remark(text: str, width: int) -> list[Text]:
    return [Text(f"      {line}", style="dim") for line in textwrap.wrap(text, max(14, width - 6))]


def _instrument(pipeline: Pipeline, width: int) -> list[Text]:
    """How exact it is, and what steps take elsewhere than in place."""
    assert pipeline.timed is not None
    measured = pipeline.timed.measurement
    clock = f"the clock moves by {us(measured.alignment.step_ns * 1e-3, 3)} us"
    if measured.trace is None:
        reading = us(float(measured.clock_reading_us().max()), 3)
        said = [f"a clock reading adds {reading} us, taken off each step; {clock}"]
    else:
        program_trace_us = measured.program_trace_us()
        share = program_trace_us / (pipeline.slowest.t_graph_us or pipeline.slowest.t_eager_us)
        said = [
            f"tracing what programs do adds {_signed(program_trace_us)} us, {share:.0%}; {clock}"
        ]
    alone = pipeline.timed.alone
    if alone:
        each = " + ".join(f"{step.name} {us(step.us)}{_at(step.mhz)}" for step in alone)
        in_place = pipeline.timed.mhz.get("graph")
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
    by_part = [("rank", "eager", *parts, "residual"), *_rank_rows(accounts, by_part=True)]
    if _width(by_part) <= width:
        return _rendered(by_part)
    taxes = list(dict.fromkeys(part.tax for part in accounts[0].parts))
    short = [tax.replace("bulk synchronous", "bulk") for tax in taxes]
    return _rendered([("rank", "eager", *short, "residual"), *_rank_rows(accounts, by_part=False)])


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


def _width(cells: _Cells) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True))


def _rendered(cells: _Cells) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in cells[0]:
        table.add_column(title, justify="right", no_wrap=True)
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
    skipped = (each for explanation in explained for each in explanation.skipped)
    for said in dict.fromkeys(f"{each.variant}: {each.state}: {each.reason}" for each in skipped):
        console.print(said, markup=False, highlight=False)
    if not explained[0].is_modelled:
        console.print(Text("* dispatch picks it; ! open: see docs/taxes.md", style="dim"))


def sweep_title(explained: Sequence[Explanation]) -> str:
    """The fields that all problems of a sweep share."""
    first = explained[0]
    differ = varying([each.problem for each in explained])
    same = {name: value for name, value in first.problem.items() if name not in differ}
    modelled = ", modelled" if first.is_modelled else ""
    return f"{first.op} {format_problem(first.op, same)}, {first.hardware}, us{modelled}"


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
    is_open = pipeline.timed is not None and pipeline.slowest.problems()
    return f"{pipeline.variant}{picked}{'!' if is_open else ''}"


def varying(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which problems differ."""
    first = problems[0]
    return [name for name in first if any(each[name] != first[name] for each in problems)]


def _optional(time: float | None) -> str:
    return "-" if time is None else _signed(time)


# -- pictures --

#: part of a row -> its colour; the lowest of a bar first
_STACK = {
    "bound": "#4c9f70",
    "kernel work": "#8fa3bf",
    "residual": "#c9d1de",
    "locality": "#b48ead",
    "bulk synchronous": "#e0b04a",
    "launch": "#cf5c5c",
    "graph penalty": "#5c2b2b",
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
    from matplotlib.patches import Patch

    from taxfree.taxes import stacked

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
    shown = [name for name in _STACK if any(stacked(row)[name] for row in rows)]
    swatches = [Patch(color=_STACK[name], label=name) for name in shown]
    figure.legend(
        handles=swatches, loc="outside upper left", ncols=len(shown), fontsize="small",
        frameon=False,
    )  # fmt: skip
    save_picture(figure, path)


def _panel(row: Mapping[str, Any], along: Sequence[str]) -> str:
    fields = {name: value for name, value in row["problem"].items() if name not in along}
    modelled = ", modelled" if row["is_modelled"] else ""
    return f"{heading(row['op'], fields)}, {row['hardware']}{modelled}"


def _bars(axis: Axes, panel: Sequence[Mapping[str, Any]], along: Sequence[str]) -> None:

    from taxfree.taxes import stacked

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
    without_frame(axis)


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
        axis.legend(
            handles=swatches, fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1),
            frameon=False,
        )  # fmt: skip
        axis.tick_params(labelsize="x-small")
        without_frame(axis)
    axes[-1].set_xlabel("us since the first event of the call", fontsize="small")
    figure.suptitle(title, fontsize="small")
    save_picture(figure, path)


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
