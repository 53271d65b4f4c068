"""How measured rows are shown: a table per problem that fits the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from taxfree.problems import format_problem
from taxfree_cli.output import fitting_table, print_lines, print_table, results
from taxfree_tune.measuring.results import Row, RowComparison, fastest

if TYPE_CHECKING:
    from taxfree_tune.benching.bench import ProblemResult
    from taxfree_tune.measuring.bounds import Bounds


def us(time: float, digits: int = 4) -> str:
    """Microseconds with so many significant digits, and never an exponent."""
    return f"{time:.{digits}g}" if time < 10**digits - 1 else f"{time:.0f}"


def bounds_line(bounds: Bounds) -> str:
    """The bounds of a problem, in words."""
    floor, link = us(bounds.t_floor_us), us(bounds.t_link_us)
    line = f"bound {us(bounds.t_bound_us)} us (floor {floor}, link {link})"
    return line if bounds.t_gemm_us is None else f"{line}, gemm alone {us(bounds.t_gemm_us)} us"


#: heading -> cell of a row
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: row.mode,
    "us": lambda row: us(row.median_us),
    "x bound": lambda row: f"{row.x_bound:.2f}",
    "vs eager": lambda row: _times(row.speedup_eager),
    "vs graph": lambda row: _times(row.speedup_graph),
    "±us": lambda row: us(row.iqr_us, 2),
    "skew us": lambda row: us(row.skew_us, 2),
    "#wrong": lambda row: str(row.wrong),
    "TFLOP/s": lambda row: f"{row.tflops:.1f}",
    "GB/s": lambda row: f"{row.gbps:.0f}",
}
_COMPARISONS = ("x bound", "vs eager", "vs graph", "TFLOP/s", "GB/s")  # hardware, or the library
#: what goes first where the terminal is narrow
_LEFT_OUT = (
    "GB/s", "TFLOP/s", "skew us", "#wrong", "±us", "vs eager", "vs graph", "mode", "x bound",
)  # fmt: skip


def print_problem(result: ProblemResult) -> None:
    """Print one problem: its bounds, its rows, what was not timed, and what dispatch picks."""
    console = results()
    title = f"{result.op} {format_problem(result.op, asdict(result.problem))}"
    is_interpreted = result.hardware.backend == "interpreter"
    for line in (title, *([] if is_interpreted else [bounds_line(result.bounds)])):
        console.print(line, markup=False, highlight=False)
    if result.rows:
        console.print(problem_table(result.rows, console.width, is_interpreted))
        _print_clocks(result.rows[0])
    for skipped in result.skipped:
        if skipped.state != "refused":
            line = f"{skipped.variant}: {skipped.state}, #wrong {skipped.wrong}: {skipped.reason}"
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


def problem_table(rows: Sequence[Row], width: int, is_interpreted: bool = False) -> Table:
    """The rows of one problem; the fastest is marked, and columns that do not fit are left out.

    Args:
        rows: at least one.
        width: of the terminal, in characters.
        is_interpreted: times of kernels on a CPU, which are not compared.
    """
    others = [row for row in rows if row.variant != "dispatch"]  # it runs one of them
    best = None if is_interpreted else fastest(others or rows)
    columns = {
        heading: [cell(row) for row in rows]
        for heading, cell in _COLUMNS.items()
        if not (is_interpreted and heading in _COMPARISONS)
    }
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    names = [f"{'*' if row is best else ' '}{row.variant}" for row in rows]
    return fitting_table(
        [[" variant", *columns], *zip(names, *columns.values(), strict=True)],
        width,
        leave_out=_LEFT_OUT,
        left=(" variant", "mode"),
        styles=["bold" if row is best else "" for row in rows],
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def print_comparison(verdicts: Sequence[RowComparison], before: Path) -> None:
    """Print what became of each row since an earlier run."""
    if not verdicts:
        print_lines([f"{before} has none of these rows"])
        return
    columns = ("problem", "variant", "mode", "before us", "us", "change", "verdict")
    rows = [
        (
            format_problem(verdict.row.op, verdict.row.problem),
            verdict.row.variant,
            verdict.row.mode,
            verdict.before.median_us,
            verdict.row.median_us,
            f"{verdict.change:+z.1%}",
            verdict.judgement,
        )
        for verdict in verdicts
    ]
    print_table(columns, rows, title=f"compared with {before}")
