"""`taxfree check FILE::FUNCTION`: checks kernels that a function runs, and shows what was found."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taxfree.errors import TaxfreeError, UsageError, WrongResult
from taxfree_cli.output import folded, print_json, print_lines, print_table

if TYPE_CHECKING:
    from taxfree_check.checker import Checked

DEFAULT_RANKS = 4


def check_function(
    target: str,
    ranks: int | None,
    seeds: int | None,
    first_seed: int | None,
    json: bool,
    program: str | None = None,
) -> None:
    """Run a function that checks kernels; it takes a world, or makes its own.

    Args:
        target: "FILE::FUNCTION".
        program: arguments of a command line: the function is the main one of a program that a
            launcher starts on each rank.
        ranks, seeds, first_seed: in place of those of its worlds; None leaves them.

    Raises:
        UsageError: there is no such function.
        WrongResult: a schedule has shown a violation, or the function a wrong result.
        TaxfreeError: nothing was found, but too little ran; or the function failed.
    """
    function = function_of(target)
    from taxfree_check.checker import CheckFailed, Overrides, World, overrides

    wanted = "" if ranks is None else f" --ranks {ranks}"
    wanted += "" if program is None else f" --program {shlex.quote(program)}"
    request = Overrides(ranks, seeds, first_seed, f"taxfree check {target}{wanted}")
    token = overrides.set(request)
    wrong = ""
    try:
        if program is not None:
            from taxfree_check.checker.programs import run_program

            with World(DEFAULT_RANKS) as world:
                run_program(world, function, shlex.split(program))
        elif takes_world(function):
            with World(DEFAULT_RANKS) as world:
                function(world)
        else:
            function()
    except CheckFailed:
        pass  # the report is with its world
    except AssertionError as error:
        wrong = str(error) or "an assertion failed"
    except TaxfreeError:
        raise
    except (Exception, SystemExit) as error:
        raise failure_of(target, error) from error
    finally:
        overrides.reset(token)
    checks = [checked for world in request.worlds for checked in world.checks]
    show(checks, json)
    if wrong:
        raise WrongResult(f"{target}: {wrong}", "the result after the last schedule is wrong")
    require_pass(checks)


def takes_world(function: Callable[..., object]) -> bool:
    """Whether a function wants to be given a world."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.default is inspect.Parameter.empty for parameter in parameters)


def failure_of(target: str, error: BaseException) -> TaxfreeError:
    """What a user is told of an error that a function raises."""
    message = f"{target} raised {type(error).__name__}: {error}"
    return TaxfreeError(message, "see its lines outside of kernels")


def function_of(target: str) -> Callable[..., object]:
    """The function that a target names.

    Raises:
        UsageError: there is none.
    """
    file, separator, name = target.partition("::")
    path = Path(file)
    if not separator or not name:
        raise UsageError(f"{target!r} names no function", "FILE::FUNCTION")
    if not path.is_file():
        raise UsageError(f"there is no file {file!r}", "check the path")
    from taxfree_check.checker.conventions import stand_in

    stand_in()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file!r} is no Python file", "its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _importing_from(path.parent):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            message = f"{file} cannot be imported: {type(error).__name__}: {error}"
            raise UsageError(message, "TAXFREE_DEBUG=1 shows where") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [function for function, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"{file} has no function {name!r}", f"one of: {', '.join(names)}")
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        raise UsageError(f"{name} of {file} is no plain function", "give a def that runs kernels")
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))


def show(checks: list[Checked], json: bool) -> None:
    """Print results: a table, coverage, and the reports."""
    if json:
        print_json({"checks": [_as_json(checked) for checked in checks]})
        return
    from taxfree_check.checker import coverage_rows

    columns = ["check", "verdict", "schedules", "seconds", "schedules/s"]
    rows = [
        (check.name, check.verdict, check.schedules, check.seconds, check.speed) for check in checks
    ]
    print_table(columns, rows)
    covered = coverage_rows(checks)
    if covered:
        heading = "synchronising lines, and how many ranks, programs and calls ran them:"
        print_lines(["", *folded([heading])])
        print_table(
            ["line", "text", "ranks", "programs", "calls"],
            covered,
            narrow=(
                text_line
                for line, text, ranks, programs, calls in covered
                for text_line in (
                    f"{line}  ranks {ranks}, programs {programs}, calls {calls}",
                    f"  {text}",
                )
            ),
        )
    is_first = True
    for check in checks:
        if check.verdict in ("violation", "not simulated", "not covered"):
            _, *report = str(check).splitlines()  # the table says the first line
            if is_first and check.violation is not None:
                is_first = False
                report.pop()  # the hint at the end says it
            print_lines(["", f"{check.name}:", *folded(report)])
        elif check.note:
            print_lines(["", f"{check.name}: {check.note}"])


def _as_json(checked: Checked) -> dict[str, Any]:
    from taxfree_check.checker import coverage_rows

    violation = checked.violation
    fields = ("line", "text", "ranks", "programs", "calls")
    return {
        "name": checked.name,
        "verdict": checked.verdict,
        "schedules": checked.schedules,
        "accesses": checked.accesses,
        "seconds": checked.seconds,
        "note": checked.note,
        "coverage": [dict(zip(fields, row, strict=True)) for row in coverage_rows([checked])],
        "violation": violation
        and {
            "reason": violation.reason.title,
            "details": violation.details,
            "lines": violation.lines,
            "replay": violation.replay,
        },
    }


def require_pass(checks: list[Checked]) -> None:
    """Turn verdicts into the exit code.

    Raises:
        WrongResult: there are violations.
        TaxfreeError: nothing was found, but a kernel cannot be simulated, coverage is too low, or
            there was nothing to check.
    """
    wrong = [check for check in checks if check.verdict == "violation"]
    if wrong:
        names = ", ".join(check.name for check in wrong)
        assert wrong[0].violation is not None
        raise WrongResult(f"violations in {names}", f"replay: {wrong[0].violation.replay}")
    refused = [check for check in checks if check.verdict == "not simulated"]
    if refused:
        assert refused[0].violation is not None
        raise TaxfreeError(
            f"what {', '.join(check.name for check in refused)} does is not simulated",
            f"replay: {refused[0].violation.replay}",
        )
    if all(check.verdict == "nothing to check" for check in checks):
        raise TaxfreeError(
            "nothing to check: no kernel was launched on these shapes", "give others by --shapes"
        )
    thin = [check for check in checks if check.verdict == "not covered"]
    if thin:
        names = ", ".join(check.name for check in thin)
        hint = "give more --seeds, or shapes whose ranks and programs execute these lines"
        raise TaxfreeError(f"too little was executed to pass: {names}", hint)
