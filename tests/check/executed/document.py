"""Writes docs/executed-mutants.md: `python -m tests.check.executed.document FOLDER`.

It takes an hour of a core. The folder keeps the result of each variant, so that a run that was
interrupted goes on; take out an operation's files to try it anew, or empty it to try all.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import torch

from taxfree_kernels.variant import Problem
from tests.check.executed.mutated import (
    ARCHITECTURE,
    OTHER_ARCHITECTURE,
    PROBLEMS,
    Outcome,
    Result,
    cases,
    result,
    survivors,
)

PATH = Path(__file__).parents[3] / "docs" / "executed-mutants.md"
MOST_OF_A_KIND = {ARCHITECTURE: 4, OTHER_ARCHITECTURE: 2}

_HEAD = """\
# Changes to machine code that execution detects

<!-- Written by `python -m tests.check.executed.document`: change that, not this page. -->

`taxfree check --executed` runs compiled code of gfx942 and gfx950 on a CPU. Would it notice wrong
code? Here each mutant is a kernel of which one instruction is deleted or weakened:

- `s_waitcnt` without one of its counters; `s_barrier`, matrix instructions, and reads and writes
  of LDS deleted
- `buffer_wbl2` and `buffer_inv` deleted, or at agent scope instead of system scope; atomics, loads
  and stores with narrower scope bits
- branches that never go, or always

Of each kernel and each kind of change, at most {most} mutants are drawn; of gfx950, {less}, of one
variant of each operation. Only instructions that the unchanged kernels execute are changed. Every
mutant runs under up to six schedules, until one run is not right. The problems have two ranks:

{problems}

A mutant is **equivalent** if the runs of the unchanged code give a mechanical reason why the change
cannot matter on the paths that ran. It is **harmless** if it survives and we know why it is as
right as the original, as long as no wait times out.
"""
_BY_VARIANT = """\
| operation | variant | GPU | code run | all | tried | equivalent | harmless | detected | survive |
|---|---|---|---:|---:|---:|---:|---:|---:|---:|"""
_BY_KIND = """
| change | tried | equivalent | harmless | wrong result | hang | error | survive |
|---|---:|---:|---:|---:|---:|---:|---:|"""
_REASONS = """
| {what} | mutants |
|---|---:|"""
_SURVIVORS = """
These survive, and we have no proof that they are harmless. Some may need a schedule that none
here was; of others the problem is too small.

| operation | variant | GPU | change | instruction | source |
|---|---|---|---|---|---|"""


def main(folder: Path) -> None:
    """Write the page."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    results = [_kept(folder / f"{'.'.join(case)}.json", *case) for case in cases()]
    PATH.write_text("\n".join(page(results)) + "\n", encoding="utf-8")


def _kept(path: Path, op: str, variant: str, architecture: str) -> Result:
    if not path.exists():
        found = result(op, variant, architecture, MOST_OF_A_KIND[architecture])
        path.write_text(json.dumps(found.as_json()))
    return Result.of_json(json.loads(path.read_text()))


def page(results: list[Result]) -> Iterable[str]:
    """Its lines."""
    problems = "\n".join(f"- {op}: `{_short(problem)}`" for op, problem in PROBLEMS.items())
    most, less = MOST_OF_A_KIND.values()
    yield _HEAD.format(most=most, less=less, problems=problems)
    every = [outcome for each in results for outcome in each.outcomes]
    detected = sum(each.verdict in ("wrong", "hang", "error") for each in every)
    matter = sum(each.verdict not in ("equivalent", "harmless") for each in every)
    yield f"**Detected: {detected} of {matter}** that are neither ({detected / matter:.1%}).\n"
    yield _BY_VARIANT
    for each in results:
        yield _row(each, f"{each.executed / each.instructions:.0%}")
    yield from _kinds(every)
    for verdict in ("equivalent", "harmless"):
        yield _REASONS.format(what=f"why {verdict}")
        reasons = Counter(each.reason for each in every if each.verdict == verdict)
        yield from (f"| {reason} | {count} |" for reason, count in reasons.most_common())
    if matter > detected:
        yield _SURVIVORS
    for each, outcome in survivors(results):
        lines = ", ".join(reversed(outcome.lines[:3]))
        cells = (each.op, each.variant, each.architecture, outcome.kind, f"`{outcome.instruction}`")
        yield f"| {' | '.join(cells)} | {lines} |"


def _short(problem: Problem) -> str:
    """Its dimensions, and what is not as by default."""
    shown = {each.name: getattr(problem, each.name) for each in fields(problem)}
    defaults = {each.name: each.default for each in fields(problem)} | {"v_head_dim": 16}
    return " ".join(f"{name}={value}" for name, value in shown.items() if value != defaults[name])


def _row(each: Result, share: str) -> str:
    counts = (each.count("equivalent"), each.count("harmless"),
              each.count("wrong", "hang", "error"), each.count("survives"))  # fmt: skip
    case = (each.op, each.variant, each.architecture)
    cells = (*case, share, each.every, len(each.outcomes), *counts)
    return "| " + " | ".join(map(str, cells)) + " |"


def _kinds(every: list[Outcome]) -> Iterable[str]:
    yield _BY_KIND
    for kind in sorted({each.kind for each in every}):
        found = Counter(each.verdict for each in every if each.kind == kind)
        verdicts = ("equivalent", "harmless", "wrong", "hang", "error", "survives")
        cells = (kind, found.total(), *(found[verdict] for verdict in verdicts))
        yield "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
