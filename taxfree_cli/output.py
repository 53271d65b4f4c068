"""Results on stdout, everything else on stderr; of several nodes, the first one speaks.

Problems are told by every process, and progress by one of each node, with its name before it.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from taxfree.errors import UsageError
from taxfree_cli.exits import CommandFailure
from taxfree_tune.workers.launch import LaunchedProcess

_T = TypeVar("_T")

# Of an output that is no terminal, and of a terminal that does not know its own.
_UNWATCHED_WIDTH, _UNKNOWN_WIDTH = 240, 80


#: what bars and spreads are drawn with where the output takes ASCII alone
_PLAIN = {"█": "#", "▓": "%", "▒": "+", "░": ".", "±": "~"}


class _Console(Console):
    """A console that lets no text of a file steer the terminal.

    It leaves it to `app.run` what becomes of a reader that has gone.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        plain = str.maketrans(_PLAIN) if self.encoding.startswith("ascii") else {}
        for text, style, control in super().render(renderable, options):
            shown = text if control else printable(text, "\n").translate(plain)
            yield Segment(shown, style, control)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def place() -> LaunchedProcess:
    """This process's place among those of a launcher."""
    try:
        return LaunchedProcess.from_environment()
    except UsageError:  # which `main` reports
        return LaunchedProcess()


def results() -> Console:
    """The console for results."""
    return _console(stderr=False)


def messages() -> Console:
    """The console for progress; a terminal only where somebody watches."""
    return _console(stderr=True)


def note(text: str, *, every_node: bool = False) -> None:
    """Print a message that is neither a result nor a problem."""
    _console(stderr=True, every_node=every_node).print(
        _named(text), style="dim", markup=False, highlight=False, soft_wrap=True
    )


def warn(text: str) -> None:
    """Print a problem that does not stop the command."""
    _labelled("warning", "yellow", text)


def print_failure(failure: CommandFailure) -> None:
    """Print why the command stops, on every node: each may have its own reason."""
    _labelled("error", "bold red", failure.message)
    if failure.hint:
        _labelled("hint", "cyan", failure.hint)


def print_json(document: object) -> None:
    """Print the one JSON document of a command."""
    text = json.dumps(document, indent=2, allow_nan=False)
    if not place().name:
        sys.stdout.write(f"{text}\n")


def print_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[object]],
    title: str = "",
    narrow: Iterable[str] | None = None,
) -> None:
    """Print a table of results; numbers are right-aligned, nothing is cut off.

    A table that is wider than the terminal becomes a list, unless `narrow` are lines to print in
    its place: the first cell of each row, and below it one line for each other cell.

    Args:
        columns: headings.
        rows: cells; strings are shown as they are, floats with four digits, None as nothing.
        title: a line above the table.
    """
    headings, cells = list(columns), [list(row) for row in rows]
    console = results()
    if width_of([headings, *cells]) <= console.width:
        words = [
            heading
            for heading, *column in zip(headings, *cells, strict=True)
            if not (column and all(isinstance(cell, int | float) for cell in column))
        ]
        table = fitting_table([headings, *(map(_shown, row) for row in cells)], left=words)
        table.title = Text(title, style="table.title") if title else None
        table.title_justify = "left"
        console.print(table)
    else:
        lines = folded(_listed(headings, cells) if narrow is None else narrow)
        print_lines([*filter(None, [title]), *lines])


def fitting_table(
    rows: Iterable[Iterable[str]],
    width: int = _UNWATCHED_WIDTH,
    leave_out: Iterable[str] = (),
    left: Container[str] = (),
    styles: Iterable[str] = (),
) -> Table:
    """A table to be printed; columns that do not fit are left out.

    Args:
        rows: the headings, then cells.
        leave_out: columns that may go, in this order, if they are there.
        left: columns of words, which stand on the left.
        styles: of the rows below the headings; none by default.
    """
    kept = [list(row) for row in rows]
    for heading in leave_out:
        if heading in kept[0] and width_of(kept) > width:
            gone = kept[0].index(heading)
            kept = [row[:gone] + row[gone + 1 :] for row in kept]
    table = Table(box=None, pad_edge=False)
    for heading in kept[0]:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for row, style in zip_longest(kept[1:], styles, fillvalue=""):
        table.add_row(*map(Text, row), style=style)
    return table


def width_of(rows: Iterable[Sequence[object]]) -> int:
    """How wide a table of these rows is, headings among them: columns are two characters apart."""
    columns = zip(*rows, strict=True)
    return sum(max(cell_len(_shown(cell)) for cell in column) + 2 for column in columns) - 2


def _listed(headings: list[str], cells: list[list[object]]) -> Iterator[str]:
    indent = max(map(len, headings[1:]), default=0) + 2
    for first, *others in cells:
        yield _shown(first)
        for heading, value in zip(headings[1:], others, strict=True):
            if _shown(value):
                yield f"  {heading:{indent}}{_shown(value)}"


def print_lines(lines: Iterable[str]) -> None:
    """Print plain lines of results, each unbroken."""
    console = results()
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Lines of prose, those broken that are wider than the terminal; each keeps its indent."""
    width = max(20, results().width)
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        wrapper = textwrap.TextWrapper(
            width, subsequent_indent=f"{indent}  ", break_on_hyphens=False
        )
        is_command = line.startswith("replay:")  # to be copied
        fits = is_command or len(line) <= width
        yield from [line] if fits else wrapper.wrap(line)


def watched(command: str, count: int, results: Iterator[_T]) -> Iterator[_T]:
    """Results with a bar on stderr that knows the remaining time and goes while they print."""
    console = messages()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )
    task = progress.add_task(command, total=count)
    with progress:
        for result in results:
            progress.advance(task)
            progress.stop()
            yield result
            progress.start()


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return printable(str(value))


def printable(text: str, also: str = "") -> str:
    """A text whose characters that steer a terminal, but those, are shown as Python writes them."""
    if text.isprintable():
        return text
    kept = f"\t{also}"
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def _labelled(label: str, style: str, text: str) -> None:
    line = Text.assemble((f"{label}:", style), f" {_named(text)}")
    _console(stderr=True, every_node=True).print(line, soft_wrap=True)


def _named(text: str) -> str:
    name = place().name
    return printable(f"{name}: {text}" if name else text)


def _console(*, stderr: bool, every_node: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return _Console(
        file=stream,
        width=_width(stream),
        quiet=bool(place().name) and not every_node,
    )


def _width(stream: TextIO) -> int:
    """Columns: of COLUMNS, unless that is 0 or no number; of the terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH
    except OSError:
        return _UNWATCHED_WIDTH
