"""`taxfree tune`: search the configs of problems on this machine, and store the winners."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from taxfree.errors import UsageError
from taxfree.settings import duration
from taxfree_cli import options
from taxfree_cli.output import place
from taxfree_cli.tune_check import check_records
from taxfree_cli.tune_dry_run import list_candidates
from taxfree_cli.tune_search import search
from taxfree_cli.tune_step import is_for_step, tune_step

Trials: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--trials", metavar="COUNT", min=1, help="Candidates measured per problem; 32 by default."
    ),
]
BudgetText: TypeAlias = Annotated[
    str | None,
    typer.Option("--budget", metavar="TIME", help="For all problems together: 90s, 10m or 1h."),
]
Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", metavar="NUMBER", min=0, max=2**32 - 1, help="Search seed.")
]
From: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FILE", help="Problems that a run met: the YAML file of TAXFREE_LOG."
    ),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="List what would be tried and refused; measure nothing.")
]
Check: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Fail if a problem lacks a current record; measure nothing. --db may be an export.",
    ),
]
HardwareName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME",
        help="With --dry-run, a GPU that is not here: mi300x, ...; with --check, that of the "
        "records.",
    ),
]

_TRIALS = 32


def tune(
    op: options.OpOfShapes = None,
    shapes: options.Shapes = None,
    from_file: From = None,
    model: options.Model = None,
    tp: options.Tp = None,
    path: options.Paths = None,
    training: options.Training = False,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    fabric: options.FabricIfMeasured = None,
    db: options.Db = None,
    trials: Trials = None,
    budget: BudgetText = None,
    seed: Seed = 0,
    variant: options.OnlyVariants = None,
    dry_run: DryRun = False,
    check: Check = False,
    hardware: HardwareName = None,
    layers: options.Layers = None,
    batch: options.Batch = None,
    context: options.Context = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Find the fastest config for each problem and store it in the tuning database.

    With --op decode_step and --model: the kernel of a whole step, beside the library's compiled
    code in a graph and beside the operations.

    Under torchrun, srun or Kubernetes, the launcher's processes are the ranks; each node tunes a
    part of the problems for its own group.
    """
    if place().node and (check or dry_run):
        return  # what measures nothing is done once
    seconds = None if budget is None else duration("--budget", budget)
    if from_file is not None:
        shapes = [*(shapes or ()), _problems_file(from_file)]
    shape_options = options.ShapeOptions(op, shapes, gpus, dtype, model, tp, path, training)
    of_step = {"--layers": layers, "--batch": batch, "--context": context}
    of_others = {"--tp": tp, "--path": path, "--training": training, "--variant": variant,
                 "--dry-run": dry_run, "--check": check, "--hardware": hardware}  # fmt: skip
    if is_for_step(op, of_others, of_step):
        sizes = layers, batch or 1, context or 1024
        tune_step(shape_options, *sizes, fabric or "auto", db, trials, seconds, seed, json)
        return
    if hardware is not None and not (check or dry_run):
        raise UsageError(
            "--hardware is for --dry-run and --check", "what is not here cannot be measured"
        )
    if "baseline" in (variant or ()):
        raise UsageError("--variant baseline cannot be tuned", "it is always measured")
    if check:
        _refuse_beside_check(dry_run or None, budget, variant)
        check_records(shape_options, fabric, hardware, db, json)
    elif dry_run:
        hardware = hardware or ("cpu" if fabric == "host" else "h200")
        list_candidates(shape_options, hardware, trials or _TRIALS, seed, variant, json)
    else:
        from taxfree_tune.tuning.session import Effort  # loads torch

        effort = Effort(trials or _TRIALS, seconds, seed, variant)
        search(shape_options, fabric or "auto", db, effort, all, json)


def _refuse_beside_check(*others: object) -> None:
    if any(option is not None for option in others):
        raise UsageError(
            "--check takes neither --dry-run, --budget nor --variant",
            "it measures nothing",
        )


def _problems_file(path: Path) -> str:
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise UsageError(
            f"--from {path} is no YAML file",
            "run with TAXFREE_LOG=problems.yaml, and give that file",
        )
    return str(path)
