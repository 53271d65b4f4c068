"""The search of `taxfree tune`: measures candidates, stores the winners, and prints them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

from taxfree.errors import WorkerLost
from taxfree.problems import format_problem
from taxfree_cli import options
from taxfree_cli.asked import problems_here
from taxfree_cli.bench_views import us
from taxfree_cli.output import messages, note, place, print_json, print_table, warn
from taxfree_cli.record_map import Cell, print_map, winner_text
from taxfree_cli.record_views import problem_words
from taxfree_kernels.variant import Problem, op_of

if TYPE_CHECKING:
    from taxfree_tune.tuning.nodes import Nodes
    from taxfree_tune.tuning.session import Effort, NotTuned, Tuned
    from taxfree_tune.tuning.tuner import Event, Progress
    from taxfree_tuning_db import Database


def search(
    shape_options: options.ShapeOptions,
    fabric: str,
    db: Path | None,
    effort: Effort,
    shows_all: bool,
    json: bool,
) -> None:
    """Tune the problems on this machine; of several nodes, a part of them on each.

    Raises:
        UsageError: the shapes or counts are invalid.
        HardwareError: the fabric or the GPUs are not there.
        DatabaseError: the database cannot be written.
    """
    from taxfree_tune import devices
    from taxfree_tune.tuning import session

    path, fabric = options.database_path(db), devices.fabric_for(fabric)
    launch = place()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as opened:
        nodes = None
        if launch.nodes > 1:
            from taxfree_tune.tuning.nodes import Nodes

            note(f"waiting for {launch.nodes} nodes")
            nodes = opened.enter_context(Nodes(launch, rows.append))
            path = nodes.copy_of(path)
        problems = _problems(shape_options, fabric, path, effort)
        if nodes is not None:
            problems = nodes.share_of(devices.gpu_name(fabric), problems)
        database = opened.enter_context(_database(path, nodes))
        progress = opened.enter_context(_progress(nodes, fabric == "host"))
        for result in session.run(problems, fabric, database, effort, progress):
            row = _row(result) if isinstance(result, session.Tuned) else _skipped(result)
            if launch.nodes > 1:
                row["node"] = launch.node
            rows.append(row)
            if launch.node and nodes is not None:
                nodes.send(row)
            if isinstance(result, session.NotTuned):
                _warn_of(result)
        if nodes is not None:
            nodes.gather()
    if not launch.node:
        _print(rows, shows_all, fabric == "host", json)
        if any("winner" in row for row in rows):
            note(f"stored in {path}")
        _fail_if_all_hung(rows)


def _problems(
    shape_options: options.ShapeOptions, fabric: str, path: Path, effort: Effort
) -> list[Problem]:
    asked = problems_here(
        shape_options, fabric, functools.partial(_recorded, path), effort.only or ()
    )
    return [problem for problems in asked.values() for problem in problems]


def _database(path: Path, nodes: Nodes | None) -> AbstractContextManager[Database]:
    from taxfree_tuning_db import Database

    return Database(path) if nodes is None else nodes.database(path)


def _recorded(path: Path, op: str, gpu: str | None) -> list[dict[str, Any]]:
    """The problems that were tuned on these devices; none where there is no database yet."""
    from taxfree_tuning_db import Database, DatabaseMissing

    try:
        with Database(path, read_only=True) as database:
            records = list(database.records())
    except DatabaseMissing:
        return []
    return [record.problem for record in records if (record.op, record.hardware.gpu) == (op, gpu)]


# -- results --


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
        "is_library_alone": winner.variant == "baseline" and not record.runners_up,
        "seconds": record.seconds_spent,
    }


def _skipped(left: NotTuned) -> dict[str, Any]:
    problem = {"op": op_of(left.problem), "problem": asdict(left.problem)}
    return problem | {"state": left.state, "reason": left.reason}


def _warn_of(left: NotTuned) -> None:
    if left.state == "refused":
        warn(f"{problem_words(left.problem)} is left to the library: {left.reason}")
    if left.state == "disturbed":
        warn(f"{problem_words(left.problem)} is not decided: {left.reason}; rerun to continue")


def _print(
    results: Sequence[dict[str, Any]], shows_all: bool, is_interpreted: bool, json: bool
) -> None:
    rows = [row for row in results if "winner" in row]
    skipped = [row for row in results if "state" in row]
    if json:
        print_json({"schema": 1, "rows": rows, "skipped": skipped})
    elif rows and shows_all:
        _print_rows(rows, is_interpreted)
    elif rows:
        print_map(_cell(row, is_interpreted) for row in rows)
    if rows and not json:
        _note_counts(rows)
    untried = sum(row["state"] == "not tried" for row in skipped)
    if untried:
        warn(f"{untried} problems were not tried: out of budget; rerun to continue")


def _note_counts(rows: Sequence[dict[str, Any]]) -> None:
    timed = sum(row["measured"] for row in rows)
    others = sum((Counter(row["not_measured"]) for row in rows), Counter())
    counts = [f"{timed} right on all ranks and timed", *(f"{n} {how}" for how, n in others.items())]
    note(f"candidates: {', '.join(counts)}")


def _fail_if_all_hung(rows: Sequence[dict[str, Any]]) -> None:
    """Stop where candidates hung and none but the library was timed.

    Raises:
        WorkerLost: naming the first such problem.
    """
    for row in rows:
        hung = row.get("not_measured", {}).get("hung")
        if hung and row["is_library_alone"]:
            raise WorkerLost(
                f"{row['op']} {format_problem(row['op'], row['problem'])}: "
                f"{hung} candidates hung, and none was timed beside the library",
                f"`taxfree check --op {row['op']} --variant NAME` says which wait has no signal",
            )


def _cell(row: dict[str, Any], is_interpreted: bool) -> Cell:
    text = winner_text(row["winner"], None if is_interpreted else row["speedup"])
    time = "" if is_interpreted else f", {us(row['median_us'])} us"
    return Cell(row["op"], row["problem"], "", f"{text}{time}")


def _print_rows(rows: Sequence[dict[str, Any]], is_interpreted: bool) -> None:
    node = ["node"] if any("node" in row for row in rows) else []
    times = ("us", "library us", "speed-up")
    print_table(
        ["op", "problem", "winner", *times, "measured", "not measured", *node],
        [
            [
                row["op"],
                format_problem(row["op"], row["problem"]),
                row["winner"],
                row["median_us"],
                row["baseline_us"],
                None if is_interpreted else f"{row['speedup']:.2f}x",
                row["measured"],
                ", ".join(f"{count} {state}" for state, count in row["not_measured"].items()),
                *(row[column] for column in node),
            ]
            for row in rows
        ],
    )


# -- progress --


@contextlib.contextmanager
def _progress(nodes: Nodes | None, is_interpreted: bool) -> Iterator[Progress]:
    """Show the search as it goes: one live line on a terminal, else a line per problem."""
    console = messages()
    is_live = console.is_terminal and not place().name
    current = None
    with Live(console=console, transient=True, refresh_per_second=4) as live:

        def show(event: Event) -> None:
            nonlocal current
            if event.problem != current and not is_live:
                note(f"tuning {problem_words(event.problem)}", every_node=True)
            current = event.problem
            live.update(_line(event, is_interpreted))
            if nodes is not None:
                nodes.collect()

        yield show


def _line(event: Event, is_interpreted: bool) -> Text:
    line = Text(f"{problem_words(event.problem)}  {event.done}/{event.wanted}")
    if event.best is not None and event.best_us is not None and not is_interpreted:
        line.append(f"  best {us(event.best_us)} us {event.best.variant}", style="bold")
        if event.baseline_us is not None:
            line.append(f"  library {us(event.baseline_us)} us", style="dim")
            line.append(f"  {event.baseline_us / event.best_us:.2f}x")
    if event.note:
        line.append(f"\n{event.note}", style="dim")
    return line
