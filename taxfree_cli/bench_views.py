"""How measured rows are shown: a table per problem that fits the terminal, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from taxfree.errors import TaxfreeError, UsageError
from taxfree.measuring.results import DISPATCH, Row, Verdict, by_problem, fastest, require_writable
from taxfree.shapes import format_problem, heading
from taxfree_cli.output import print_lines, print_table, results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from taxfree.benching.bench import ProblemResult
    from taxfree.measuring.bounds import Bounds


def us(time: float, digits: int = 4) -> str:
    """Microseconds with so many significant digits, and never an exponent."""
    return f"{time:.{digits}g}" if time < 10**digits - 1 else f"{time:.0f}"


def bounds_line(bounds: Bounds) -> str:
    """The bounds of a problem, in words."""
    floor, link = us(bounds.t_floor_us), us(bounds.t_link_us)
    line = f"bound {us(bounds.t_bound_us)} us (floor {floor}, link {link})"
    return line if bounds.t_gemm_us is None else f"{line}, gemm alone {us(bounds.t_gemm_us)} us"


@dataclass(frozen=True)
class _Column:
    """A column of the table of a problem.

    Args:
        heading: above it.
        cell: what stands in it for a row.
        rank: how much it matters; where the terminal is narrow, the highest ranks go first.
        is_number: numbers stand on the right.
    """

    heading: str
    cell: Callable[[Row], str]
    rank: int
    is_number: bool = True


_COLUMNS = (
    _Column("mode", lambda row: row.mode, 2, is_number=False),
    _Column("us", lambda row: us(row.median_us), 0),
    _Column("x bound", lambda row: f"{row.x_bound:.2f}", 1),
    _Column("vs eager", lambda row: _times(row.speedup_eager), 4),
    _Column("vs graph", lambda row: _times(row.speedup_graph), 3),
    _Column("±us", lambda row: us(row.iqr_us, 2), 5),
    _Column("skew us", lambda row: us(row.skew_us, 2), 7),
    _Column("#wrong", lambda row: str(row.wrong), 6),
    _Column("TFLOP/s", lambda row: f"{row.tflops:.1f}", 8),
    _Column("GB/s", lambda row: f"{row.gbps:.0f}", 9),
)
_GAP = 2


def print_problem(result: ProblemResult) -> None:
    """Print one problem: its bounds, its rows, what was not timed, and what dispatch picks."""
    console = results()
    title = f"{result.op} {format_problem(result.op, asdict(result.problem))}"
    for line in (title, bounds_line(result.bounds)):
        console.print(line, markup=False, highlight=False)
    if result.rows:
        console.print(problem_table(result.rows, console.width))
        _print_clocks(result.rows[0])
    for each in result.skipped:
        if each.state != "refused":
            line = f"{each.variant}: {each.state}, #wrong {each.wrong}: {each.reason}"
            console.print(Text(line, style="red"))
    choice = result.choice
    picks = f"dispatch: {choice.variant} ({choice.kind}: {choice.why})"
    console.print(
        "; ".join(filter(None, (picks, choice.in_eager_calls))) + "\n",
        markup=False,
        highlight=False,
    )


def _print_clocks(row: Row) -> None:
    if row.sm_mhz is not None:
        held_down = f", held down by {' and '.join(row.throttled)}" if row.throttled else ""
        said = f"slowest GPU at {row.sm_mhz:.0f} MHz{held_down}"
        results().print(said, markup=False, highlight=False)


def problem_table(rows: Sequence[Row], width: int) -> Table:
    """The rows of one problem; the fastest is marked, and columns that do not fit are left out.

    Args:
        rows: at least one.
        width: of the terminal, in characters.
    """
    best = fastest(rows)
    columns = [column for column in _COLUMNS if any(column.cell(row) for row in rows)]
    names = [f"{'*' if row is best else ' '}{row.variant}" for row in rows]
    used = max(map(len, names)) + sum(_GAP + _width(column, rows) for column in columns)
    for column in sorted(columns, key=lambda column: -column.rank):
        if used <= width or len(columns) == 1:
            break
        columns.remove(column)
        used -= _GAP + _width(column, rows)
    table = Table(box=None, pad_edge=False)
    table.add_column(" variant", overflow="fold")
    for column in columns:
        table.add_column(
            column.heading, justify="right" if column.is_number else "left", no_wrap=True
        )
    for name, row in zip(names, rows, strict=True):
        cells = (Text(column.cell(row)) for column in columns)
        table.add_row(Text(name), *cells, style="bold" if row is best else "")
    return table


def _width(column: _Column, rows: Sequence[Row]) -> int:
    return max(len(column.heading), *(len(column.cell(row)) for row in rows))


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def print_comparison(verdicts: Sequence[Verdict], before: Path) -> None:
    """Print what became of each row since an earlier run."""
    if not verdicts:
        print_lines([f"{before} has none of these rows"])
        return
    columns = ("problem", "variant", "mode", "before us", "us", "change", "verdict")
    rows = [
        (
            format_problem(each.row.op, each.row.problem),
            each.row.variant,
            each.row.mode,
            each.before.median_us,
            each.row.median_us,
            f"{each.change:+.1%}",
            each.judgement,
        )
        for each in verdicts
    ]
    print_table(columns, rows, title=f"compared with {before}")


# -- pictures --


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


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture.

    Raises:
        TaxfreeError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise TaxfreeError(f"{path} cannot be written: {error}", "name a .png file") from error


def without_frame(axis: Axes) -> None:
    """Leave the two lines that scales stand on."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def plot(rows: Sequence[Row], along: str, path: Path) -> None:
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
        without_frame(axis)
    named: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(named.values(), named, loc="outside right upper", frameon=False)
    save_picture(figure, path)


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
