"""`taxfree tune`: search the configs of problems on this machine, and store the winners."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.live import Live
from rich.text import Text

from taxfree.errors import TaxfreeError, UsageError
from taxfree.shapes import choose, format_problem
from taxfree_cli import interpreting, options
from taxfree_cli.output import messages, note, print_json, print_table, rank, warn
from taxfree_cli.record_views import words
from taxfree_kernels.variant import op_of

if TYPE_CHECKING:
    from taxfree.tuning.tuner import Event, Tuner
    from taxfree_kernels.cross_compile.screen import Verdict
    from taxfree_tuning_db import Database, Record

Trials: TypeAlias = Annotated[
    int, typer.Option("--trials", metavar="COUNT", min=1, help="Candidates measured per problem.")
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

DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="List what would be tried and refused; measure nothing.")
]
HardwareName: TypeAlias = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME", help="With --dry-run: h100, h200, mi300x, ..."),
]

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_REFUSED, _NOT_TRIED = "refused", "not tried"  # states of what is skipped


def tune(
    op: options.OpOfShapes = None,
    shapes: options.Shapes = None,
    model: options.Model = None,
    tp: options.Tp = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    fabric: options.FabricIfMeasured = None,
    db: options.Db = None,
    trials: Trials = 32,
    budget: BudgetText = None,
    seed: Seed = 0,
    variant: OnlyVariants = None,
    dry_run: DryRun = False,
    hardware: HardwareName = None,
    json: options.Json = False,
) -> None:
    """Find the fastest config for each problem and store it in the tuning database."""
    if rank() != 0:  # under torchrun: the first rank starts the workers, on its node
        return
    from taxfree import devices
    from taxfree_tuning_db import Database

    seconds = None if budget is None else _seconds(budget)
    ops = options.operations_of(op, shapes, variant or ())
    if "baseline" in (variant or ()):
        raise UsageError("--variant baseline cannot be tuned", "it is always measured")
    if hardware is not None and not dry_run:
        raise UsageError("--hardware is for --dry-run", "tuning measures what is here")
    if dry_run:
        if any(option is not None for option in (fabric, db, budget)):
            raise UsageError(
                "--dry-run takes neither --fabric, --db nor --budget",
                "it measures nothing, and looks nothing up",
            )
        counts = options.MODELLED_GPUS
    else:
        chosen = devices.fabric_for(fabric or "auto")
        counts = devices.world_sizes(chosen)
    request = options.shape_request(
        shapes, model, tp, gpus, dtype, default_gpus=counts, op=op or options.DEFAULT_OP
    )
    if dry_run:
        problems = [p for each in ops for p in choose(each, request, lambda: ()).problems]
        _dry_run(problems, hardware or "h200", trials, seed, variant, json)
        return
    path = options.database_path(db)
    gpu, default = devices.gpu_name(chosen), devices.default_shapes(chosen)
    problems = []
    for each in ops:
        choice = choose(each, request, functools.partial(_recorded, path, each, gpu), default)
        problems += choice.problems
        if choice.note:
            note(choice.note)
    devices.require(chosen, max(problem.world_size for problem in problems))
    if chosen == "host":
        interpreting.announce(problems)
    rows: list[dict[str, Any]] = []
    with Database(path) as database:
        database.require_writable()  # before hours of measuring
        with _alone(path):
            session = _Session(database, chosen, trials, seconds, seed, variant)
            session.remaining = len(problems)
            for world_size in dict.fromkeys(problem.world_size for problem in problems):
                rows += session.tune([p for p in problems if p.world_size == world_size])
    _print(rows, session.skipped, json)
    untried = sum(each["state"] == _NOT_TRIED for each in session.skipped)
    if untried:
        warn(f"{untried} problems were not tried: out of budget; rerun to continue")
    note(f"stored in {path}")


def _recorded(path: Path, op: str, gpu: str | None) -> list[dict[str, Any]]:
    """The problems that were tuned on these devices; none where there is no database yet."""
    from taxfree_tuning_db import Database, DatabaseMissing

    try:
        with Database(path, read_only=True) as database:
            known = list(database.records())
    except DatabaseMissing:
        return []
    return [record.problem for record in known if (record.op, record.hardware.gpu) == (op, gpu)]


def _dry_run(
    problems: Sequence[Any],
    name: str,
    trials: int,
    seed: int,
    only: Sequence[str] | None,
    json: bool,
) -> None:
    from taxfree.tuning import tuner
    from taxfree_kernels.cross_compile.screen import Screen
    from taxfree_kernels.hardware import KNOWN

    if name not in KNOWN:
        raise UsageError(f"unknown hardware {name!r}", f"one of: {', '.join(KNOWN)}")
    rows = []
    with Screen(KNOWN[name]) as screen:
        for problem in problems:
            op = op_of(problem)
            verdicts = tuner.dry_run(op, problem, screen, KNOWN[name], trials, seed, only)
            rows += [_verdict_row(op, problem, verdict) for verdict in verdicts]
    if json:
        print_json({"schema": 1, "hardware": name, "rows": rows})
        return
    headings = ("op", "problem", "variant", "config", "registers", "spilled", "shared", "refused")
    shown = [
        row | {"problem": format_problem(row["op"], row["problem"]), "config": words(row["config"])}
        for row in rows
    ]
    print_table(headings, [[row[heading] for heading in headings] for row in shown])


def _verdict_row(op: str, problem: Any, verdict: Verdict) -> dict[str, Any]:
    resources = list(verdict.kernels.values())
    return {
        "op": op,
        "problem": asdict(problem),
        "variant": verdict.variant,
        "config": dict(verdict.config),
        "registers": max((each.registers for each in resources), default=None),
        "spilled": max((each.spill_bytes for each in resources), default=None),
        "shared": max((each.shared_memory for each in resources), default=None),
        "refused": verdict.refused,
    }


@dataclass
class _Session:
    """All the tuning of one command, one world size after another; keeps what is left out."""

    database: Database
    fabric: str
    trials: int
    seconds: float | None
    seed: int
    only: Sequence[str] | None
    remaining: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def tune(self, problems: Sequence[Any]) -> list[dict[str, Any]]:
        """Tune problems of one world size on one group of workers."""
        from taxfree import devices
        from taxfree.settings import Settings
        from taxfree.tuning.tuner import Tuner
        from taxfree.workers.group import WorkerGroup, Workers
        from taxfree_kernels.cross_compile.screen import Screen

        world_size, heap_bytes = problems[0].world_size, devices.heap_bytes(problems)
        timeout_s = Settings.from_environment().timeout_s

        def start() -> WorkerGroup:
            return WorkerGroup(world_size, self.fabric, heap_bytes, timeout_s)

        with Workers(start) as workers, _Progress() as progress:
            hardware = workers.group().hardware
            with Screen(hardware, heap_bytes=heap_bytes) as screen:
                tuner = Tuner(
                    self.database, workers, hardware, screen, self.seed, self.only, progress
                )
                rows = [self._tune(tuner, problem) for problem in problems]
        return [row for row in rows if row is not None]

    def _tune(self, tuner: Tuner, problem: Any) -> dict[str, Any] | None:
        from taxfree.tuning.candidates import refusals, variants_for
        from taxfree.tuning.tuner import Budget

        if not variants_for(problem, tuner.hardware, self.only):
            reasons = refusals(problem, tuner.hardware, self.only)
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            warn(f"{_text(problem)} is left to the library: {why}")
            self._skip(problem, _REFUSED, why)
            return None
        share = None
        if self.seconds is not None:
            share = (self.begun + self.seconds - time.monotonic()) / self.remaining
        record = tuner.tune(op_of(problem), problem, Budget(self.trials, share))
        if record is None:
            self._skip(problem, _NOT_TRIED, "out of budget")
            return None
        self.remaining -= 1
        return _row(record, tuner)

    def _skip(self, problem: Any, state: str, reason: str) -> None:
        self.remaining -= 1
        self.skipped.append(
            {"op": op_of(problem), "problem": asdict(problem), "state": state, "reason": reason}
        )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from tuning into a database; released when this process ends.

    Two searches would mark each other's trials as failed, and disturb each other's timings. This is
    not SQLite's lock, so other processes may still read and write.

    Raises:
        TaxfreeError: another process is tuning into it.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TaxfreeError(
                f"another taxfree tune writes into {path}", "wait for it, or give another --db"
            ) from None
        yield


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--budget {text!r} is no time", "for example 90s, 10m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def _row(record: Record, tuner: Tuner) -> dict[str, Any]:
    mode = tuner.mode
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
        "not_measured": tuner.not_measured,
        "seconds": record.seconds_spent,
    }


def _print(rows: Sequence[dict[str, Any]], skipped: Sequence[dict[str, Any]], json: bool) -> None:
    if json:
        print_json({"schema": 1, "rows": rows, "skipped": skipped})
        return
    headings = ("op", "problem", "winner", "us", "baseline", "speed-up", "measured", "not measured")
    print_table(
        headings,
        [
            (
                row["op"],
                format_problem(row["op"], row["problem"]),
                row["winner"],
                row["median_us"],
                row["baseline_us"],
                row["speedup"],
                row["measured"],
                ", ".join(f"{count} {state}" for state, count in row["not_measured"].items()),
            )
            for row in rows
        ],
    )


def _text(problem: Any) -> str:
    return f"{op_of(problem)} {format_problem(op_of(problem), asdict(problem))}"


class _Progress:
    """The search as it goes: one live line where somebody watches, else a line per problem."""

    def __init__(self) -> None:
        self._current: Any = None
        self._console = messages()
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)

    def __enter__(self) -> _Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        if event.problem != self._current:
            self._current = event.problem
            if not self._console.is_terminal:
                note(f"tuning {_text(event.problem)}")
        self._live.update(self._line(event))

    def _line(self, event: Event) -> Text:
        line = Text(f"{_text(event.problem)}  {event.done}/{event.wanted}  ")
        if event.best is not None and event.best_us is not None:
            line.append(f"best {event.best_us:.4g} us {event.best.variant}", style="bold")
        if event.baseline_us is not None and event.best_us is not None:
            line.append(f"  baseline {event.baseline_us:.4g} us", style="dim")
            line.append(f"  {event.baseline_us / event.best_us:.2f}x")
        if event.note:
            line.append(f"\n{event.note}", style="dim")
        return line
