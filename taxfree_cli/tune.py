"""`taxfree tune`: search the configs of problems on this machine, and store the winners."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.live import Live
from rich.text import Text

from taxfree.errors import Interrupted, NoRecord, UsageError
from taxfree.settings import duration
from taxfree.shapes import choose, expand, format_problem
from taxfree_cli import options
from taxfree_cli.asked import problems_here
from taxfree_cli.output import messages, note, place, print_json, print_table, warn
from taxfree_cli.record_views import words
from taxfree_kernels.variant import Problem, op_of

if TYPE_CHECKING:
    from taxfree_check.cross_compile.screen import ScreenVerdict
    from taxfree_kernels.hardware import Hardware
    from taxfree_tune.tuning.fleet import Fleet
    from taxfree_tune.tuning.nodes import Nodes
    from taxfree_tune.tuning.session import NotTuned, Tuned
    from taxfree_tune.tuning.tuner import Event, Progress

Trials: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--trials", metavar="COUNT", min=1, help="Candidates measured per problem; 32 by default."
    ),
]
Exhaustive: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--exhaustive",
        help="Measure every config that no variant refuses, or --trials of them, drawn; no search.",
    ),
]
BudgetText: TypeAlias = Annotated[
    str | None,
    typer.Option("--budget", metavar="TIME", help="For all problems together: 90s, 10m or 1h."),
]
Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", metavar="NUMBER", min=0, max=2**32 - 1, help="Search seed.")
]
OnlyVariants: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--variant", metavar="NAME", help="Only this variant; repeatable."),
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
Storage: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        help="Share trials with other nodes: postgresql://user:password@host/database.",
    ),
]

_TRIALS = 32


def tune(
    op: options.OpOfShapes = None,
    shapes: options.Shapes = None,
    from_file: From = None,
    model: options.Model = None,
    tp: options.Tp = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    fabric: options.FabricIfMeasured = None,
    db: options.Db = None,
    trials: Trials = None,
    exhaustive: Exhaustive = False,
    budget: BudgetText = None,
    seed: Seed = 0,
    variant: OnlyVariants = None,
    dry_run: DryRun = False,
    check: Check = False,
    hardware: HardwareName = None,
    storage: Storage = None,
    json: options.Json = False,
) -> None:
    """Find the fastest config for each problem and store it in the tuning database.

    Under torchrun, srun or Kubernetes, the launcher's processes are the ranks; each node tunes a
    part of the problems for its own group.
    """
    if place().node and (check or dry_run):
        return  # what measures nothing is done once
    seconds = None if budget is None else duration("--budget", budget)
    if from_file is not None:
        shapes = [*(shapes or ()), _problems_file(from_file)]
    given = options.ShapeOptions(op, shapes, gpus, dtype, model, tp)
    if hardware is not None and not (check or dry_run):
        raise UsageError(
            "--hardware is for --dry-run and --check", "what is not here cannot be measured"
        )
    if exhaustive and (check or dry_run):
        raise UsageError("--exhaustive takes neither --check nor --dry-run", "it measures")
    trials = trials or (sys.maxsize if exhaustive else _TRIALS)
    if "baseline" in (variant or ()):
        raise UsageError("--variant baseline cannot be tuned", "it is always measured")
    if check:
        if dry_run or any(option is not None for option in (budget, variant, storage)):
            raise UsageError(
                "--check takes neither --dry-run, --budget, --variant nor --storage",
                "it measures nothing",
            )
        _check(given, fabric, hardware, db, json)
        return
    if dry_run:
        if any(option is not None for option in (fabric, db, budget, storage)):
            raise UsageError(
                "--dry-run takes neither --fabric, --db, --budget nor --storage",
                "it measures nothing, and looks nothing up",
            )
        request = given.request(options.MODELLED_GPUS)
        ops = given.operations(request, variant or ())
        problems = [p for each in ops for p in choose(each, request, lambda: ()).problems]
        options.note_left_out(request)
        try:
            _dry_run(problems, hardware or "h200", trials, seed, variant, json)
        except KeyboardInterrupt:
            raise Interrupted("interrupted", "nothing is stored") from None
        return
    _measure(given, fabric or "auto", db, trials, seconds, seed, variant, storage, exhaustive, json)


def _measure(
    given: options.ShapeOptions,
    fabric: str,
    db: Path | None,
    trials: int,
    seconds: float | None,
    seed: int,
    only: Sequence[str] | None,
    storage: str | None,
    exhaustive: bool,
    json: bool,
) -> None:
    from taxfree_tune import devices
    from taxfree_tune.tuning import session
    from taxfree_tuning_db import Database

    path, fabric = options.database_path(db), devices.fabric_for(fabric)
    rows: list[dict[str, Any]] = []
    launch = place()
    with contextlib.ExitStack() as opened:
        nodes = None
        if launch.nodes > 1:
            from taxfree_tune.tuning.nodes import Nodes

            note(f"waiting for {launch.nodes} nodes")
            nodes = opened.enter_context(Nodes(launch, rows.append))
            path = nodes.copy_of(path)
        asked = problems_here(given, fabric, functools.partial(_recorded, path), only or ())
        problems = [problem for own in asked.values() for problem in own]
        fleet = opened.enter_context(_fleet(storage))
        if nodes is not None and fleet is None:
            problems = nodes.share_of(devices.gpu_name(fabric), problems)
        opening = Database(path) if nodes is None else nodes.database(path)
        database, progress = opened.enter_context(opening), opened.enter_context(_progress(nodes))
        for each in session.run(
            problems, fabric, database, trials, seconds, seed, only, progress, fleet, exhaustive
        ):
            row = _row(each) if isinstance(each, session.Tuned) else _skipped(each)
            if launch.nodes > 1:
                row["node"] = launch.node
            rows.append(row)
            if launch.node and nodes is not None:
                nodes.send(row)
            if isinstance(each, session.NotTuned) and each.state == "refused":
                warn(f"{_text(each.problem)} is left to the library: {each.reason}")
            if isinstance(each, session.NotTuned) and each.state == "disturbed":
                warn(f"{_text(each.problem)} is not decided: {each.reason}; rerun to continue")
        if nodes is not None:
            nodes.gather()
    if launch.node:
        return
    _print([row for row in rows if "winner" in row], [row for row in rows if "state" in row], json)
    untried = sum(row.get("state") == "not tried" for row in rows)
    if untried:
        warn(f"{untried} problems were not tried: out of budget; rerun to continue")
    note(f"stored in {path}")


def _fleet(storage: str | None) -> AbstractContextManager[Fleet | None]:
    if storage is None:
        return contextlib.nullcontext()
    from taxfree_tune.tuning.fleet import Fleet

    return Fleet(storage)


def _problems_file(path: Path) -> str:
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise UsageError(
            f"--from {path} is no YAML file",
            "run with TAXFREE_LOG=problems.yaml, and give that file",
        )
    return str(path)


def _recorded(path: Path, op: str, gpu: str | None) -> list[dict[str, Any]]:
    """The problems that were tuned on these devices; none where there is no database yet."""
    from taxfree_tuning_db import Database, DatabaseMissing

    try:
        with Database(path, read_only=True) as database:
            known = list(database.records())
    except DatabaseMissing:
        return []
    return [record.problem for record in known if (record.op, record.hardware.gpu) == (op, gpu)]


def _check(
    given: options.ShapeOptions, fabric: str | None, name: str | None, db: Path | None, json: bool
) -> None:
    """Print the problems without a current record, on this machine's GPU or a known one.

    Raises:
        NoRecord: there is one.
    """
    from taxfree_tune import devices
    from taxfree_tune.tuning.verification import lacking
    from taxfree_tuning_db import Table, read_table, shipped_records

    if name is not None and fabric is not None:
        raise UsageError("--hardware and --fabric are given", "give one of them")
    if name is None:
        chosen = devices.fabric_for(fabric or "auto")
        gpu, world_sizes = devices.gpu_name(chosen), devices.world_sizes(chosen)
    else:
        gpu, world_sizes = _known_hardware(name).name, options.MODELLED_GPUS
    request = given.request(world_sizes)
    if not (request.shapes or request.model):
        raise UsageError("no problems are given to check", "add --model or --shapes")
    problems = [p for op in given.operations(request) for p in expand(op, request)]
    options.note_left_out(request)
    path = options.database_path(db)
    own = read_table(path) if db is not None or path.exists() else ()
    found = lacking(problems, Table(own, shipped_records()), gpu)
    rows = [
        {"op": op_of(each.problem), "problem": asdict(each.problem), "reason": each.reason}
        for each in found
    ]
    if json:
        print_json({"schema": 1, "gpu": gpu, "checked": len(problems), "lacking": rows})
    elif found:
        print_table(("lacks a record", "why"), ((_text(p.problem), p.reason) for p in found))
    if found:
        raise NoRecord(
            f"{len(found)} of {len(problems)} problems lack a current record of {gpu}",
            "run `taxfree tune` with the same --model or --shapes on that GPU",
        )
    note(f"all {len(problems)} problems have a current record of {gpu}")


def _known_hardware(name: str) -> Hardware:
    from taxfree_kernels.hardware import KNOWN

    if name not in KNOWN:
        raise UsageError(f"unknown hardware {name!r}", f"one of: {', '.join(KNOWN)}")
    return KNOWN[name]


def _dry_run(
    problems: Sequence[Any],
    name: str,
    trials: int,
    seed: int,
    only: Sequence[str] | None,
    json: bool,
) -> None:
    from taxfree_check.cross_compile.screen import Screen
    from taxfree_tune.tuning import session

    rows, hardware = [], _known_hardware(name)
    with Screen(hardware) as screen:
        for problem in problems:
            verdicts = session.dry_run(problem, screen, hardware, trials, seed, only)
            rows += [_verdict_row(problem, verdict) for verdict in verdicts]
    if json:
        print_json({"schema": 1, "hardware": name, "rows": rows})
        return
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


def _row(tuned: Tuned) -> dict[str, Any]:
    record, mode = tuned.record, tuned.mode
    winner, baseline = record.winner, record.baseline
    return {
        "op": record.op,
        "problem": record.problem,
        "winner": winner.variant,
        "config": winner.config,
        "mode": mode,
        "median_us": winner.median_us[mode],
        "baseline_us": baseline.median_us[mode],
        "speedup": baseline.median_us[mode] / winner.median_us[mode],
        "measured": record.trials,
        "not_measured": tuned.not_measured,
        "seconds": record.seconds_spent,
    }


def _skipped(left: NotTuned) -> dict[str, Any]:
    problem = {"op": op_of(left.problem), "problem": asdict(left.problem)}
    return problem | {"state": left.state, "reason": left.reason}


def _print(rows: Sequence[dict[str, Any]], skipped: Sequence[dict[str, Any]], json: bool) -> None:
    if json:
        print_json({"schema": 1, "rows": rows, "skipped": skipped})
        return
    node = ["node"] if any("node" in row for row in rows) else []
    headings = ("op", "problem", "winner", "us", "baseline", "speed-up", "measured", "not measured")
    print_table(
        [*headings, *node],
        [
            [
                row["op"],
                format_problem(row["op"], row["problem"]),
                row["winner"],
                row["median_us"],
                row["baseline_us"],
                row["speedup"],
                row["measured"],
                ", ".join(f"{count} {state}" for state, count in row["not_measured"].items()),
                *(row[each] for each in node),
            ]
            for row in rows
        ],
    )


def _text(problem: Problem) -> str:
    return f"{op_of(problem)} {format_problem(op_of(problem), asdict(problem))}"


@contextlib.contextmanager
def _progress(nodes: Nodes | None) -> Iterator[Progress]:
    """Show the search as it goes: one live line on a terminal, else a line per problem."""
    console = messages()
    is_live = console.is_terminal and not place().name
    current = None
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def show(event: Event) -> None:
            nonlocal current
            if event.problem != current and not is_live:
                note(f"tuning {_text(event.problem)}", every_node=True)
            current = event.problem
            live.update(_line(event))
            if nodes is not None:
                nodes.collect()

        yield show


def _line(event: Event) -> Text:
    line = Text(f"{_text(event.problem)}  {event.done}/{event.wanted}  ")
    if event.best is not None and event.best_us is not None:
        line.append(f"best {event.best_us:.4g} us {event.best.variant}", style="bold")
    if event.baseline_us is not None and event.best_us is not None:
        line.append(f"  baseline {event.baseline_us:.4g} us", style="dim")
        line.append(f"  {event.baseline_us / event.best_us:.2f}x")
    if event.note:
        line.append(f"\n{event.note}", style="dim")
    return line
