"""`taxfree check --executed`: which kernels are executed, and what that showed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from taxfree.errors import TaxfreeError, UsageError, WrongResult
from taxfree_cli.check_function import DEFAULT_RANKS, failure_of, function_of, takes_world
from taxfree_cli.output import note, print_json, print_lines, print_table

if TYPE_CHECKING:
    from taxfree_check.executed.check import ExecutedCheck


def require_compiled() -> None:
    """Check that kernels are not interpreted.

    Raises:
        UsageError: they are.
    """
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise UsageError("--executed needs compiled kernels", "unset TRITON_INTERPRET")


def show_executed(checks: Iterable[ExecutedCheck], json: bool) -> None:
    """Execute, and print one report.

    Raises:
        WrongResult: a run is not right.
        TaxfreeError: nothing was executed.
    """
    finished = []
    for checked in checks:
        verdict = checked.wrong[0].verdict if checked.wrong else "right"
        note(f"{checked.op} {checked.variant}, {checked.problem}: {verdict}")
        finished.append(checked)
    if json:
        print_json({"checks": [checked.as_json() for checked in finished]})
    else:
        _print(finished)
    if not finished:
        raise TaxfreeError(
            "nothing to execute: no kernels for AMD GPUs serve what was asked for",
            "give another --op, --variant or --shapes",
        )
    wrong = [checked for checked in finished if checked.wrong]
    if wrong:
        names = list(dict.fromkeys(f"{checked.op} {checked.variant}" for checked in wrong))
        raise WrongResult(f"not right when executed: {', '.join(names)}", "see the report above")


def _print(checks: list[ExecutedCheck]) -> None:
    from taxfree_check.executed.check import kernels, rows

    columns = ["op", "variant", "verdict", "runs", "gave up", "instructions run", "seconds"]
    print_table(columns, rows(checks))
    print_lines(["", "instructions of each kernel, all its compilations together:"])
    print_table(
        ["op", "variant", "kernel", "compiled", "all", "executed", "giving up", "merging", "never",
         "share"],
        [
            (op, variant, check.kernel, check.compiled, check.instructions, check.executed,
             check.giving_up, check.merging, len(check.never), f"{check.share_never:.1%}")
            for op, variant, check in kernels(checks)
        ],
    )  # fmt: skip
    for checked in checks:
        for shown in checked.wrong:
            silent = "" if shown.silent is None else f", rank {shown.silent} silent"
            print_lines([
                "", f"{shown.op} {shown.variant}, seed {shown.seed}{silent}: {shown.verdict}",
                str(shown.problem), *([shown.details] if shown.details else []),
                f"replay: {checked.replay(shown)}",
            ])  # fmt: skip


def execute_function(
    target: str, ranks: int | None, seeds: Sequence[int], architecture: str, json: bool
) -> None:
    """Execute the kernels that a function of anybody runs, once for each seed, and report.

    Args:
        target: "FILE::FUNCTION"; it takes a world.
        ranks: of the world.

    Raises:
        UsageError: there is no such function, or its kernels are interpreted.
        WrongResult: a run hung, accessed what is no tensor, or gave a wrong result.
        TaxfreeError: it needs what the executor does not have; or the function failed.
    """
    function = function_of(target)
    if not takes_world(function):
        raise UsageError(f"{target} takes no world", "def function(world): ... world.run(call)")
    require_compiled()
    from taxfree_check.executed.errors import ExecutionError, UnknownInstruction
    from taxfree_check.executed.world import ExecutedWorld

    rows, wrong = [], ""
    for seed in seeds:
        world = ExecutedWorld(ranks or DEFAULT_RANKS, seed, architecture)
        verdict, details = "right", ""
        try:
            function(world)
        except AssertionError as error:
            verdict, details = "wrong", str(error) or "an assertion failed"
        except UnknownInstruction as error:
            raise TaxfreeError(
                f"{target} cannot be executed: {error.message}", error.hint
            ) from error
        except ExecutionError as error:
            verdict, details = type(error).__name__, f"{error.message} {error.hint}".strip()
        except TaxfreeError:
            raise
        except (Exception, SystemExit) as error:
            raise failure_of(target, error) from error
        instructions = sum(shown.instructions for shown in world.runs)
        seconds = sum(shown.seconds for shown in world.runs)
        rows.append((seed, verdict, instructions, seconds, details))
        if verdict != "right" and not wrong:
            wrong = (
                f"taxfree check --executed {target} --ranks {world.ranks} --arch {architecture} "
                f"--first-seed {seed} --seeds 1"
            )
    columns = ("seed", "verdict", "instructions", "seconds", "details")
    if json:
        print_json({"runs": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        print_table(columns, rows)
    if wrong:
        raise WrongResult(f"{target} is not right when executed", f"replay: {wrong}")
    if not any(instructions for _, _, instructions, *_ in rows):
        raise TaxfreeError(
            "nothing to execute: no kernel was launched", f"{target} has to launch one"
        )
