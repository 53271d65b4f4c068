"""`taxfree tune --dry-run`: what would be tried, and what its compilation refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from taxfree.problems import format_problem
from taxfree_cli import options
from taxfree_cli.output import print_json, print_table
from taxfree_cli.record_views import words
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune.shapes import choose

if TYPE_CHECKING:
    from taxfree_check.cross_compile.screen import ScreenVerdict


def list_candidates(
    given: options.ShapeOptions,
    name: str,
    trials: int,
    seed: int,
    only: Sequence[str] | None,
    json: bool,
) -> None:
    """Print the candidates that a search would begin with, compiled for a known GPU.

    Raises:
        UsageError: the shapes, a variant or the name of the GPU is unknown.
    """
    hardware = options.known_hardware(name)
    request = given.request(options.MODELLED_GPUS)
    ops = given.operations(request, only or ())
    problems = [problem for op in ops for problem in choose(op, request, lambda: ()).problems]
    options.note_left_out(request)
    from taxfree_check.cross_compile.screen import Screen
    from taxfree_tune.tuning import session

    rows = []
    with Screen(hardware) as screen:
        for problem in problems:
            verdicts = session.dry_run(problem, screen, hardware, trials, seed, only)
            rows += [_verdict_row(problem, verdict) for verdict in verdicts]
    if json:
        print_json({"schema": 1, "hardware": name, "rows": rows})
    else:
        _print(rows)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    headings = ("op", "problem", "variant", "config", "registers", "spilled", "shared", "refused")
    shown = [
        row | {"problem": format_problem(row["op"], row["problem"]), "config": words(row["config"])}
        for row in rows
    ]
    print_table(headings, [[row[heading] for heading in headings] for row in shown])


def _verdict_row(problem: Problem, verdict: ScreenVerdict) -> dict[str, Any]:
    resources = list(verdict.kernels.values())
    return {
        "op": op_of(problem),
        "problem": asdict(problem),
        "variant": verdict.variant,
        "config": dict(verdict.config),
        "registers": max((each.registers for each in resources), default=None),
        "spilled": max((each.spill_bytes for each in resources), default=None),
        "shared": max((each.shared_memory for each in resources), default=None),
        "refused": verdict.illegal_reason,
    }
