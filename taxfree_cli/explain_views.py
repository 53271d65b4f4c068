"""How accounts of the taxes are shown: bars that fit the terminal, or a row per shape."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from taxfree.problems import format_problem
from taxfree_cli.bench_views import bounds_line, us
from taxfree_cli.output import fitting_table, results, width_of
from taxfree_cli.record_views import words

if TYPE_CHECKING:
    from taxfree_tune.profiling.explain import Explanation, Pipeline
    from taxfree_tune.profiling.saved import SavedTimelines
    from taxfree_tune.profiling.step_timer import TimedPipeline
    from taxfree_tune.profiling.timeline import Bar, Timeline
    from taxfree_tune.taxes import Account, Part

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
    shown: list[Text | Table] = [*_wrapped(title, width, style="bold"), *_wrapped(limits, width)]
    for pipeline in explanation.pipelines:
        shown += _pipeline(pipeline, width, modelled)
    for skipped in explanation.skipped:
        shown += _wrapped(f"{skipped.variant}: {skipped.state}: {skipped.reason}", width)
    if explanation.choice is not None:
        choice = explanation.choice
        picks = f"dispatch picks {choice.variant} ({choice.kind}): {choice.why}"
        said = "; ".join(filter(None, (picks, choice.in_eager_calls)))
        shown += [Text(), *_wrapped(said, width)]
        for step in explanation.lookup_trace:
            mark = "+" if step.found else "-"
            shown += _wrapped(f"{mark} {step.looked_for}: {step.why}", width, 2, "dim")
    return shown


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
    shown: list[Text | Table] = [
        Text(),
        *_wrapped(f"{picked}{name}", width, style="bold"),
        *_wrapped(times, width),
    ]
    if pipeline.signals is not None:
        programs, releases, *by_chiplet = pipeline.signals.values()
        fewest = "".join(f"; {count} if chiplets share one" for count in by_chiplet)
        shown += _wrapped(f"{programs} programs signal, {releases} releases{fewest}", width)
    if account.no_account:
        return [*shown, *_no_account(pipeline, width)]
    for tax in dict.fromkeys(part.tax for part in account.parts):
        shown.append(_tax(tax, account.tax_us(tax) or 0.0, None, account, width, modelled))
        for part in account.parts:
            if part.tax == tax:
                shown += _part(part, account, width)
    residual = account.residual_us
    shown.append(_tax("residual", residual, account.residual_iqr_us, account, width, modelled))
    if account.kernel_us is not None:
        rest = account.residual_us - account.kernel_us
        for name, time in (("kernel work", account.kernel_us), ("unexplained", rest)):
            share = time / account.t_eager_us
            shown.append(Text(_figures(f"    {name}", time, None, share, width)))
    if account.unsplit:
        shown += _remark(account.unsplit, width)
    shown.append(_tax("bound", account.t_bound_us, None, account, width, modelled))
    if not modelled:
        for problem in account.problems():
            shown += _wrapped(f"open: {problem}", width, 2, "red")
    if pipeline.timed is not None:
        shown += _instrument(pipeline.timed, account, width)
    if len(pipeline.accounts) > 1:
        shown.append(_ranks(pipeline.accounts, width))
    return shown


def _no_account(pipeline: Pipeline, width: int) -> list[Text]:
    """The call and its steps as they were timed, and why there is no more to say."""
    account = pipeline.slowest
    shown = [Text(_figures("  call", account.t_eager_us, account.t_eager_iqr_us, 1.0, width))]
    if pipeline.timed is not None:  # a saved explanation is without the measurement
        measured = pipeline.timed.measurement
        for step, us_in_place in zip(measured.steps, measured.step_us(), strict=True):
            share = us_in_place / account.t_eager_us
            shown.append(Text(_figures(f"    {step.name}", us_in_place, None, share, width)))
    if account.t_graph_us is None:
        todo = "interpreted kernels share the cores: on GPUs the account is of the hardware"
    else:
        todo = "run it again with nothing else on the machine"
    shown += _wrapped(f"no account: {account.no_account}", width, 2, "red")
    return [*shown, *_wrapped(todo, width, 4, "dim")]


def _tax(
    name: str, time: float, spread: float | None, account: Account, width: int, remark: str
) -> Text:
    share = time / account.t_eager_us
    line = Text(_figures(f"  {name}", time, spread, share, width) + remark)
    room = min(_WIDEST_BAR, width - len(line) - 2)
    return line.append("  ").append(
        "█" * round(room * min(1.0, max(0.0, share))), style=_STYLES[name]
    )


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
        f"{share:>z{columns[3]}.0%}"
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


def _instrument(timed: TimedPipeline, account: Account, width: int) -> list[Text]:
    """How exact it is."""
    measured = timed.measurement
    clock = f"the clock moves by {us(measured.alignment.step_ns * 1e-3, 3)} us"
    if measured.trace is None:
        reading = us(float(measured.clock_reading_us().max()), 3)
        said = f"a clock reading adds {reading} us, taken off each step; {clock}"
    else:
        added = measured.program_trace_us()
        share = added / (account.t_graph_us or account.t_eager_us)
        said = f"tracing what programs do adds {_signed(added)} us, {share:z.0%}; {clock}"
    return _remark(said, width)


def _ranks(accounts: Sequence[Account], width: int) -> Table:
    """All ranks, part by part; tax by tax where the terminal is narrow."""
    parts = [part.name for part in accounts[0].parts]
    by_part = [("rank", "eager", *parts, "residual"), *_rank_rows(accounts, by_part=True)]
    if width_of(by_part) <= width:
        return fitting_table(by_part, width)
    taxes = list(dict.fromkeys(part.tax for part in accounts[0].parts))
    short = [tax.replace("bulk synchronous", "bulk") for tax in taxes]
    by_tax = [("rank", "eager", *short, "residual"), *_rank_rows(accounts, by_part=False)]
    return fitting_table(by_tax, width, leave_out=["residual", *reversed(short)])


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


# -- timelines --

_PROGRAMS = {"compute": "█", "send": "▒", "wait": "░"}  # the last is drawn on top
_STEPS = "▒░█▓"
_PROGRAM_LINES = 4  # of a rank


def print_timelines(saved: SavedTimelines) -> None:
    """Print one call of each pipeline, a band of lines per rank, on one time axis."""
    console = results()
    for line in timeline_lines(saved, console.width):
        console.print(line, highlight=False)
    console.print()


def timeline_lines(saved: SavedTimelines, width: int) -> list[Text]:
    """Timelines as lines that fit `width` characters.

    Steps of several kernels share a line of their rank. Programs of a fused kernel share four, the
    lowest ids on top: what is later in the legend hides what is earlier.
    """
    title = f"{saved.op} {format_problem(saved.op, saved.problem)}, {saved.hardware}"
    shown = _wrapped(title, width, style="bold")
    bars = {timeline.variant: timeline.bars() for timeline in saved.timelines}
    end = max(bar.timed.end_us for drawn in bars.values() for bar in drawn)
    room = max(10, min(width, 100) - len("rank 0 "))
    for timeline in saved.timelines:
        drawn = bars[timeline.variant]
        steps = dict.fromkeys(step.name for step in timeline.steps)
        shades = dict(zip(steps, itertools.cycle(_STEPS), strict=False)) or _PROGRAMS
        last = max(bar.timed.end_us for bar in drawn)
        legend = ", ".join(f"{shade} {kind}" for kind, shade in shades.items())
        shown += [Text(), *_wrapped(f"{timeline.variant}, {us(last)} us: {legend}", width)]
        for rank in timeline.ranks:
            of_rank = [bar for bar in drawn if bar.timed.rank == rank]
            for line, text in enumerate(_band(timeline, of_rank, shades, room / end, room)):
                label = f"rank {rank} " if line == 0 else " " * len(f"rank {rank} ")
                shown.append(Text(label + text))
    return shown


def _band(
    timeline: Timeline, bars: Sequence[Bar], shades: Mapping[str, str], per_us: float, room: int
) -> list[str]:
    """The lines of one rank."""
    count = _PROGRAM_LINES if timeline.activities else 1
    top = min(bar.top for bar in bars)
    height = (max(bar.bottom for bar in bars) - top) / count
    lines = [[" "] * room for _ in range(count)]
    by_kind = sorted(bars, key=lambda bar: list(shades).index(bar.kind))
    for bar in by_kind:
        line = min(count - 1, int((bar.top - top) / height))
        begin, end = bar.timed.begin_us * per_us, bar.timed.end_us * per_us
        first = min(room - 1, int(begin))
        for column in range(first, max(first + 1, min(room, round(end)))):
            lines[line][column] = shades[bar.kind]
    return ["".join(line).rstrip() for line in lines]


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
_TIMED = ("eager", "bound", "graph")  # what is left of no account


def print_sweep(explained: Sequence[Explanation]) -> None:
    """Print one row per problem and pipeline, in microseconds per call of the slowest rank."""
    console = results()
    console.print(Text(sweep_title(explained), style="bold"))
    console.print(sweep(explained, console.width))
    skipped = (skip for explanation in explained for skip in explanation.skipped)
    for said in dict.fromkeys(f"{skip.variant}: {skip.state}: {skip.reason}" for skip in skipped):
        console.print(said, markup=False, highlight=False)
    if not explained[0].is_modelled:
        console.print(
            Text("* dispatch picks it; ! open, or no account: docs/taxes.md", style="dim")
        )


def sweep_title(explained: Sequence[Explanation]) -> str:
    """The fields that all problems of a sweep share."""
    first = explained[0]
    differ = varying([explanation.problem for explanation in explained])
    same = {name: value for name, value in first.problem.items() if name not in differ}
    modelled = ", modelled" if first.is_modelled else ""
    return f"{first.op} {format_problem(first.op, same)}, {first.hardware}, us{modelled}"


def sweep(explained: Sequence[Explanation], width: int) -> Table:
    """The table of `print_sweep`; columns that do not fit are left out."""
    differ = varying([explanation.problem for explanation in explained])
    rows = [(*differ, "variant", *_SWEEP)]
    for explanation in explained:
        fields = [str(explanation.problem[name]) for name in differ]
        for pipeline in explanation.pipelines:
            account = pipeline.slowest
            shown = _TIMED if account.no_account else _SWEEP
            figures = (cell(account) if name in shown else "-" for name, cell in _SWEEP.items())
            rows.append((*fields, _marked(pipeline, explanation.is_modelled), *figures))
    return fitting_table(rows, width, leave_out=list(_SWEEP)[:0:-1])


def _marked(pipeline: Pipeline, is_modelled: bool) -> str:
    """The variant's name: * where dispatch picks it, ! where its account is open or none."""
    picked = "*" if pipeline.is_dispatched else ""
    is_open = not is_modelled and pipeline.slowest.problems()
    return f"{pipeline.variant}{picked}{'!' if is_open else ''}"


def varying(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which problems differ."""
    first = problems[0]
    return [name for name in first if any(problem[name] != first[name] for problem in problems)]


def _optional(time: float | None) -> str:
    return "-" if time is None else _signed(time)
