"""`taxfree tune --dry-run`: what would be tried, and what its compilation refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from taxfree_cli import options
from taxfree_cli.output import note, print_json, print_lines, print_table, watched
from taxfree_cli.record_views import problem_words, words
from taxfree_kernels.variant import op_of
from taxfree_tune.shapes import choose

if TYPE_CHECKING:
    from taxfree_check.cross_compile.screen import ScreenVerdict


def list_candidates(
    shape_options: options.ShapeOptions,
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
    request = shape_options.request(options.MODELLED_GPUS)
    ops = shape_options.operations(request, only or ())
    problems = [problem for op in ops for problem in choose(op, request, lambda: ()).problems]
    options.note_left_out(request)
    note(
        f"compiling up to {trials} candidates of each of {len(problems)} problems; fewer: --trials"
    )
    from taxfree_check.cross_compile.screen import Screen
    from taxfree_tune.tuning import session

    rows = []
    with Screen(hardware) as screen:
        screened = (
            (problem, session.dry_run(problem, screen, hardware, trials, seed, only))
            for problem in problems
        )
        for problem, verdicts in watched("compile", len(problems), screened):
            if json:
                of_problem = {"op": op_of(problem), "problem": asdict(problem)}
                rows += [of_problem | _row(verdict) for verdict in verdicts]
            else:
                cells = [[*(_row(v) | {"config": words(v.config)}).values()] for v in verdicts]
                print_table(_COLUMNS, cells, problem_words(problem))
                print_lines([""])
    if json:
        print_json({"schema": 1, "hardware": name, "rows": rows})


_COLUMNS = ("variant", "config", "registers", "spilled", "shared", "refused")


def _row(verdict: ScreenVerdict) -> dict[str, Any]:
    kernels = list(verdict.kernels.values())
    return {
        "variant": verdict.variant,
        "config": dict(verdict.config),
        "registers": max((kernel.registers for kernel in kernels), default=None),
        "spilled": max((kernel.spill_bytes for kernel in kernels), default=None),
        "shared": max((kernel.shared_memory for kernel in kernels), default=None),
        "refused": verdict.illegal_reason,
    }
