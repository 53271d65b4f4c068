"""Winners as a map by operation, sizes and numbers of GPUs, which fits the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from taxfree.problems import format_problem
from taxfree_cli.output import print_lines, print_table, printable, results, width_of
from taxfree_kernels.variant import Problem

#: fields in which a neighbour's record serves; operations say so beside code that loads torch
SIZES = ("batch", "length", "kv_len_per_rank", "rows", "m")


@dataclass(frozen=True)
class Cell:
    """What won for a problem.

    Args:
        op, problem: the operation and all fields of the problem.
        gpu: the device's name; empty to leave it out.
        text: the winner, and perhaps by how much.
    """

    op: str
    problem: Mapping[str, Any]
    gpu: str
    text: str


def winner_text(variant: str, ratio: float | None = None) -> str:
    """A winner and its speed-up over the library; without one where the library wins."""
    if variant == "baseline":
        return "library"
    return variant if ratio is None else f"{variant} {ratio:.2f}x"


def typed(op: str, problems: Iterable[Problem]) -> list[str]:
    """Problems as one would type them: a line for all that differ only in a size."""
    sizes: dict[str, list[str]] = {}
    for problem in problems:
        fields = asdict(problem)
        free = [name for name in SIZES if name in fields][-1]
        line = f"{op} {format_problem(op, fields | {free: '*'})}"
        sizes.setdefault(line, []).append(str(fields[free]))
    return [line.replace("*", ",".join(values)) for line, values in sizes.items()]


def print_map(cells: Iterable[Cell]) -> None:
    """Print a table for all problems that differ only in sizes and numbers of GPUs.

    There is a column for each number of GPUs; where that is too wide, a table for each.
    """
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        same = {
            name: value
            for name, value in cell.problem.items()
            if name not in (*SIZES, "world_size")
        }
        heading = f"{cell.op} {format_problem(cell.op, same)}"
        groups.setdefault((heading, cell.gpu), []).append(cell)
    for (heading, gpu), group in groups.items():
        print_lines(
            textwrap.wrap(
                printable(", ".join(filter(None, (heading, gpu)))),
                max(20, results().width),
                subsequent_indent="  ",
            )
        )
        _print_group(group)
        print_lines([""])


def _print_group(group: list[Cell]) -> None:
    sizes = [name for name in SIZES if name in group[0].problem]
    counts = sorted({cell.problem["world_size"] for cell in group})
    rows: dict[tuple[int, ...], dict[int, str]] = {}
    for cell in group:
        size = tuple(cell.problem[name] for name in sizes)
        texts = rows.setdefault(size, {})
        count = cell.problem["world_size"]
        texts[count] = ", ".join(filter(None, (texts.get(count), cell.text)))
    table = [[*size, *(texts.get(count, "") for count in counts)] for size, texts in rows.items()]
    table.sort(key=lambda row: row[: len(sizes)])
    headings = [*sizes, *map(_gpus, counts)]
    if width_of([headings, *table]) <= results().width:
        print_table(headings, table)
        return
    for column, count in enumerate(counts, start=len(sizes)):
        of_column = [[*row[: len(sizes)], row[column]] for row in table if row[column]]
        print_table([*sizes, _gpus(count)], of_column)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"
