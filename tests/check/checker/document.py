"""Writes docs/mutants.md: `python -m tests.check.checker.document`, or `make docs`; some minutes.

Mutants are checked as in the tests, and counted by the first reason that a check gives.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.check.checker.mutated import GROUPS, HARMLESS, Group, without_place

PATH = Path(__file__).parents[3] / "docs" / "mutants.md"

_HEAD = """\
# Injected bugs that the checker detects

<!-- Written by `make docs`: change tests/check/checker/mutated.py, not this page. -->

A mutant is a device function of a real kernel with one construct deleted or weakened. This page
counts the mutants by file and operation, and says how the happens-before checker reports them.

These are mutated:

- each acquire, release and scope; each wait and signal, deleted or for another generation, channel
  or rank; the set of ranks that a wait is for, smaller by one
- arrivals: one program fewer is counted, or not only the last one goes on
- the polling loop; the step of the generation; the order of data and signal
- the number of payload slots and the offsets in them
- LL packets and Lamport words: stores, deleted or partial; flags of constant value; polls that
  accept one word for all; the slots, turns and emptying of Lamport words
- of the [decode step](ops/decode_step.md), by its twin in plain Triton: counts of units before the
  stores or without the program, areas of sums, counters that are not reset, sums in an order of
  each rank

Forks and joins of side streams, and the parity of the generation that `overlap` leaves, have tests
of their own. Code that runs only after a timeout is not mutated.

| functions | operation | mutants | reported | as |
|---|---|---|---|---|"""
_HARMLESS = """
The following mutants are not reported. They are as right as the original as long as no wait times
out:

| mutants | why they change nothing |
|---|---|"""


def main() -> None:
    """Write the page."""
    rows = list(_rows())
    total, reported = (sum(row[at] for row in rows) for at in (2, 3))
    lines = [_HEAD, *(_line(*row) for row in rows), _line("all", "", total, reported, "")]
    lines.append(_HARMLESS)
    reasons = defaultdict[str, dict[str, None]](dict)
    for _, mutant, why in HARMLESS:
        reasons[why][f"`{mutant}`"] = None
    lines += [_line(", ".join(mutants), why) for why, mutants in reasons.items()]
    PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rows() -> Iterator[tuple[str, str, int, int, str]]:
    """A row for the functions of a file that are mutated in calls of an operation."""
    reasons = defaultdict[tuple[str, str], Counter[str]](Counter)
    functions = defaultdict[tuple[str, str], dict[str, None]](dict)
    for name, group in GROUPS.items():
        for mutant in group.mutants():
            function = mutant.function.fn
            key = Path(function.__code__.co_filename).name, group.op
            functions[key][f"`{function.__name__}`"] = None
            reasons[key][_reason(name, group, mutant)] += 1
    for (file, op), counts in reasons.items():
        harmless = counts.pop("harmless", 0)
        said = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        where = f"{file}: {', '.join(functions[file, op])}"
        yield where, op, counts.total() + harmless, counts.total(), said


def _reason(name: str, group: Group, mutant: Any) -> str:
    violation = group.find(mutant)
    if violation is not None:
        return violation.reason.title
    if (name, without_place(mutant)) in [each[:2] for each in HARMLESS]:
        return "harmless"
    raise SystemExit(f"not reported: {mutant}")


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
