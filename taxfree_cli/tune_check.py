"""`taxfree tune --check`: problems without a current record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from taxfree.errors import NoRecord, UsageError
from taxfree_cli import options
from taxfree_cli.output import note, print_json, print_table
from taxfree_cli.record_map import typed
from taxfree_cli.record_views import problem_words
from taxfree_kernels.variant import op_of
from taxfree_tune.shapes import expand

if TYPE_CHECKING:
    from taxfree_tune.tuning.verification import Lacking


def check_records(
    shape_options: options.ShapeOptions,
    fabric: str | None,
    name: str | None,
    db: Path | None,
    json: bool,
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
        gpu, world_sizes = options.known_hardware(name).name, options.MODELLED_GPUS
    request = shape_options.request(world_sizes)
    if not (request.shapes or request.model):
        raise UsageError("no problems are given to check", "add --model or --shapes")
    problems = [p for op in shape_options.operations(request) for p in expand(op, request)]
    options.note_left_out(request)
    path = options.database_path(db)
    users = read_table(path) if db is not None or path.exists() else ()
    lacks = lacking(problems, Table(users, shipped_records()), gpu)
    rows = [
        {"op": op_of(lack.problem), "problem": asdict(lack.problem), "reason": lack.reason}
        for lack in lacks
    ]
    if json:
        print_json({"schema": 1, "gpu": gpu, "checked": len(problems), "lacking": rows})
    elif lacks:
        print_table(
            ("lacks a record", "why"),
            ((problem_words(lack.problem), lack.reason) for lack in lacks),
            narrow=_by_reason(lacks),
        )
    if lacks:
        raise NoRecord(
            f"{len(lacks)} of {len(problems)} problems lack a current record of {gpu}",
            "run `taxfree tune` with the same --model or --shapes on that GPU",
        )
    note(f"all {len(problems)} problems have a current record of {gpu}")


def _by_reason(lacks: Sequence[Lacking]) -> Iterator[str]:
    """The problems as one would type them, below what is wrong with them."""
    together = defaultdict(list)
    for lack in lacks:
        together[lack.reason, op_of(lack.problem)].append(lack.problem)
    for (reason, op), problems in together.items():
        yield f"{reason}:"
        yield from (f"  {line}" for line in typed(op, problems))
