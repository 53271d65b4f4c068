"""`taxfree check`: finds races and deadlocks of fused kernels on a CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from taxfree.errors import TaxfreeError, UsageError, WrongResult
from taxfree.problems import DTYPE_ALIASES, require_operation
from taxfree_cli import options
from taxfree_cli.check_executed import execute_function, require_compiled, show_executed
from taxfree_cli.check_function import check_function, require_pass, show
from taxfree_cli.output import note, print_json, print_lines
from taxfree_kernels.variant import operation_names, operation_shapes, variants
from taxfree_tune.shapes import expand, parse_counts

_DEFAULT_GPUS = (2, 3)
_DEFAULT_SEEDS = 100
_DEFAULT_EXECUTED_SEEDS = 3
_ARCHITECTURES = ("gfx942", "gfx950")

_Target = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE::FUNCTION",
        help="Check any kernels: a function that runs them in a taxfree.check.World.",
    ),
]
_Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="COUNT",
        min=1,
        show_default="the function's, or 4",
        help="With FILE::FUNCTION: how many ranks are simulated.",
    ),
]
_Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME",
        help="Only this variant, repeatable; `mixed` draws one for each call.",
    ),
]
_Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        metavar="COUNT",
        min=1,
        show_default=str(_DEFAULT_SEEDS),
        help="Schedules per variant; with --executed, runs per problem, and 3 by default.",
    ),
]
_Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled", help="Instead, compile for sm_90, gfx942 and gfx950 and check the assembly."
    ),
]
_Executed = Annotated[
    bool,
    typer.Option(
        "--executed", help="Instead, compile for an AMD GPU and execute the machine code on a CPU."
    ),
]
_Architecture = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="NAME",
        show_default=_ARCHITECTURES[0],
        help=f"With --executed: {' or '.join(_ARCHITECTURES)}.",
    ),
]
_OtherTriton = Annotated[
    Path | None,
    typer.Option(
        "--triton",
        metavar="FOLDER",
        help="With --compiled: another Triton's, beside the installed.",
    ),
]
_FirstSeed = Annotated[
    int | None,
    typer.Option(
        "--first-seed",
        metavar="SEED",
        min=0,
        show_default="0",
        help="Seed of the first schedule.",
    ),
]
_Program = Annotated[
    str | None,
    typer.Option(
        "--program",
        metavar="ARGUMENTS",
        help="FILE::FUNCTION is the main function of a program that torchrun would start on each "
        'rank, with these arguments ("" for none): an example of Iris, as it is.',
    ),
]


def check(
    target: _Target = None,
    op: options.OnlyOp = None,
    shapes: options.Shapes = None,
    variant: _Variants = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    seeds: _Seeds = None,
    first_seed: _FirstSeed = None,
    program: _Program = None,
    ranks: _Ranks = None,
    compiled: _Compiled = False,
    triton: _OtherTriton = None,
    executed: _Executed = False,
    arch: _Architecture = None,
    json: options.Json = False,
) -> None:
    """Search kernels for races, deadlocks and wrong results under many schedules, on a CPU.

    All ranks are simulated in this process: keep shapes tiny. Without --shapes, tiny problems that
    execute every synchronising line. With FILE::FUNCTION, kernels of anybody. Exit code 4 on a
    violation.
    """
    if target is not None:
        others = (op, shapes, variant, gpus, dtype, triton, program if executed else arch)
        if compiled or any(option is not None for option in others):
            only = "--arch" if executed else "--program"
            raise UsageError(
                f"FILE::FUNCTION takes --ranks, --seeds, --first-seed, {only} and --json only",
                "the other options are for the variants of operations",
            )
        _require("greenlet")
        if executed:
            _require("numba")
            _require_compilers(compiled, triton, executed, arch)
            first = first_seed or 0
            chosen = range(first, first + (seeds or _DEFAULT_EXECUTED_SEEDS))
            execute_function(target, ranks, chosen, arch or _ARCHITECTURES[0], json)
            return
        check_function(target, ranks, seeds, first_seed, json, program)
        return
    if ranks is not None or program is not None:
        name = "--ranks" if program is None else "--program"
        raise UsageError(f"{name} needs FILE::FUNCTION", "for variants: --gpus")
    of_schedules = (shapes, gpus, dtype, seeds, first_seed)
    if compiled and any(option is not None for option in of_schedules):
        raise UsageError(
            "--compiled takes neither --shapes, --gpus, --dtype, --seeds nor --first-seed",
            "it compiles the default configs of built-in problems",
        )
    _require_compilers(compiled, triton, executed, arch)
    is_step = op == options.STEP and not (compiled or executed or shapes or dtype)
    if op is not None and not is_step:
        require_operation(op)
    ops = operation_names() if op is None else [op]
    if compiled:
        _check_compiled(ops, variant, triton, json)
        return
    first = first_seed or 0
    if executed:
        require_compiled()
        _require("numba")
        from taxfree_check.executed.check import check as checked_problems
        from taxfree_check.executed.check import tiny_problems

        names = [name for op in ops for name in variants(op)]
        _require_variants(ops, names, variant)
        drawn = range(first, first + (seeds or _DEFAULT_EXECUTED_SEEDS))
        of_ops = {op: _problems(op, shapes, gpus, dtype, (2,), tiny_problems) for op in ops}
        show_executed(checked_problems(of_ops, variant, drawn, arch or _ARCHITECTURES[0]), json)
        return
    schedules = range(first, first + (seeds or _DEFAULT_SEEDS))
    of_ops = {} if is_step else {op: _problems(op, shapes, gpus, dtype) for op in ops}
    of_step: Sequence[int] = ()
    if is_step or (op is None and not (shapes or dtype)):
        of_step = _DEFAULT_GPUS if gpus is None else parse_counts(gpus)
    _check_schedules(of_ops, of_step, variant, schedules, json)


def _require_compilers(
    compiled: bool, triton: Path | None, executed: bool, arch: str | None
) -> None:
    """Require options of compilation that fit together.

    Raises:
        UsageError: they do not, or there is no Triton in a folder.
    """
    if compiled and executed:
        raise UsageError("--compiled and --executed are two checks", "run one after the other")
    if triton is not None and not compiled:
        raise UsageError("--triton needs --compiled", "schedules are interpreted, not compiled")
    if triton is not None and not (triton / "triton").is_dir():
        raise UsageError(
            f"there is no Triton in {str(triton)!r}",
            f"pip install --no-deps --target {triton} triton",
        )
    if arch is not None and (not executed or arch not in _ARCHITECTURES):
        raise UsageError(
            f"unknown architecture {arch!r}" if executed else "--arch is for --executed",
            f"--executed --arch {' or '.join(_ARCHITECTURES)}",
        )


def _check_schedules(
    problems: dict[str, list[Any]],
    ranks_of_step: Sequence[int],
    names: list[str] | None,
    schedules: range,
    json: bool,
) -> None:
    """Run the happens-before checker on variants, on all that launch our kernels by default.

    Args:
        ranks_of_step: numbers of ranks on which the twin of a decode step is checked as well.
    """
    _require("greenlet")
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
    from taxfree_check.checker import STEP, check_variant, checkable_variants, tiny_problems

    if ranks_of_step:
        problems[STEP] = [
            problem for ranks in ranks_of_step for problem in tiny_problems(STEP, ranks)
        ]
    variants_of = {op: checkable_variants(op) for op in problems}
    _require_variants(
        list(problems), [name for group in variants_of.values() for name in group], names
    )
    checked = []
    for op, group in problems.items():
        for name in variants_of[op]:
            if not names or name in names:
                note(f"{op} {name}")
                checked.append(check_variant(op, name, group, schedules))
    show(checked, json)
    require_pass(checked)


def _require(package: str) -> None:
    """Require a package that a check needs.

    Raises:
        TaxfreeError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise TaxfreeError(f"{package} is not installed", "pip install 'taxfree[check]'")


def _check_compiled(
    ops: list[str], names: list[str] | None, triton: Path | None, json: bool
) -> None:
    """Run the assembly checks on the default configs of variants, of all without `names`."""
    from taxfree_check.cross_compile.coverage import DEVICES, cases
    from taxfree_check.cross_compile.report import check as reports_of
    from taxfree_check.cross_compile.report import format_report, summary, triton_version
    from taxfree_kernels.launch import assuming

    reports = []
    for compiler in (None, triton) if triton else (None,):
        with assuming(triton_version(compiler)):
            every = [case for op in ops for device in DEVICES for case in cases(op, device)]
        _require_variants(ops, [case.variant for case in every], names)
        every = [case for case in every if not names or case.variant in names]
        for report in reports_of(every, compiler):
            reports.append(report)
            if not json:
                print_lines(format_report(report).splitlines())
    if json:
        print_json({"reports": [report.as_json() for report in reports]})
    note(summary(reports))
    bad = sum(not report.is_good for report in reports)
    if bad:
        raise WrongResult(
            f"{bad} kernel{' fails' if bad == 1 else 's fail'} assembly checks",
            "see the reports above",
        )


def _tiny_problems(op: str, world_size: int) -> Sequence[Any]:
    return operation_shapes(op).tiny(world_size)


def _problems(
    op: str,
    shapes: list[str] | None,
    gpus: str | None,
    dtype: str | None,
    default_gpus: tuple[int, ...] = _DEFAULT_GPUS,
    tiny: Callable[[str, int], Sequence[Any]] = _tiny_problems,
) -> list[Any]:
    request = options.ShapeOptions(op, shapes, gpus, dtype).request(default_gpus)
    if request.shapes:
        return expand(op, request)
    problems = [problem for world in request.world_sizes for problem in tiny(op, world)]
    if request.dtype is None:
        return problems
    dtype = DTYPE_ALIASES.get(request.dtype, request.dtype)
    return list(dict.fromkeys(replace(problem, dtype=dtype) for problem in problems))


def _require_variants(ops: list[str], known: Iterable[str], names: list[str] | None) -> None:
    """Require that each name is a variant of some operation.

    Raises:
        UsageError: one is not.
    """
    known = dict.fromkeys(known)
    for name in names or ():
        if name not in known:
            raise UsageError(
                f"{', '.join(ops)} has no variant {name!r}", f"one of: {', '.join(known)}"
            )
