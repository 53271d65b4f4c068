"""`taxfree explain --scale`: where fine-grained signals stop paying, modelled from records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from taxfree.errors import NoRecord, UsageError
from taxfree.problems import heading
from taxfree_cli.options import DEFAULT_OP, ShapeOptions, database_path
from taxfree_cli.output import note, print_json, print_lines, print_table
from taxfree_cli.pictures import require_picture

if TYPE_CHECKING:
    from taxfree_tune.cost.scaling import Link, Recorded, Scaled

_MOST = 1024  # ranks
_MOST_DRAWN = 12  # problems, one below the other
_LARGEST = 8  # ranks that are predicted from fewer, to say how wrong the model is


def explain_scale(
    shape_options: ShapeOptions,
    scale: str,
    link: str | None,
    db: Path | None,
    plot: Path | None,
    json: bool,
) -> None:
    """Print, for each record, the parts of a call on more and more ranks.

    Args:
        scale: "2..64".
        link: between nodes: "50,5" is 50 GB/s and 5 us; None for one node.

    Raises:
        UsageError: an option makes no sense.
        NoRecord: no record is of these problems.
        TaxfreeError: there is nothing to draw with, or the picture cannot be written.
    """
    from taxfree_tune.cost import scaling
    from taxfree_tune.tuning.history import TuningHistory

    ranks, between = _ranks(scale), _link(link)
    if plot is not None:
        require_picture(plot)
    records = TuningHistory.read(database_path(db), required=db is not None).records
    known = scaling.recorded(records)
    is_asked = shape_options.picks()
    op = None if shape_options.op or shape_options.shapes else DEFAULT_OP
    asked = [
        record
        for record in known
        if op in (None, record.op)
        and any(
            is_asked(record.op, {**record.problem, "world_size": size}) for size in record.times
        )
    ]
    scaled = [
        (
            record,
            [call for world_size in ranks for call in scaling.scaled(record, world_size, between)],
        )
        for record in asked
    ]
    calls = [(record, modelled) for record, modelled in scaled if modelled]
    if not calls:
        raise NoRecord(
            f"no record of {scaling.GPU} is of these problems", "`taxfree db list` shows them"
        )
    if plot is not None and len(calls) > _MOST_DRAWN:
        raise UsageError(
            f"{len(calls)} problems are too many for a picture, which takes {_MOST_DRAWN}",
            "choose some with --shapes",
        )
    note("modelled: nothing was measured on these ranks; docs/scaling.md says how")
    said = _errors(scaling.left_out(known, _LARGEST))
    if json:
        documents = [_json(*modelled) for modelled in calls]
        print_json({"schema": 1, "modelled": True, "errors": said, "problems": documents})
    else:
        for modelled in calls:
            _print(*modelled)
        print_lines(said)
    if plot is not None:
        from taxfree_tune.reporting.pictures import save_scaled

        save_scaled(_drawn(calls), plot)


def _ranks(scale: str) -> list[int]:
    match = re.fullmatch(r"(\d{1,4})\.\.(\d{1,4})", scale)
    least, most = map(int, match.groups()) if match else (0, 0)
    if not 2 <= least <= most <= _MOST:
        raise UsageError(f"--scale {scale!r} is no range of ranks", f"such as 2..64, to {_MOST}")
    doubled = [least]
    while 2 * doubled[-1] <= most:
        doubled.append(2 * doubled[-1])
    return doubled


def _link(text: str | None) -> Link | None:
    from taxfree_tune.cost.scaling import Link

    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?),(\d{1,6}(?:\.\d+)?)", text)
    rate, us = map(float, match.groups()) if match else (0.0, 0.0)
    if rate <= 0:
        raise UsageError(f"--link {text!r} is no link", "GB/s of a rank and us one way, as 50,5")
    return Link(rate * 1e9, us)


def _errors(left_out: Sequence[tuple[str, float, float]]) -> list[str]:
    """How wrong the model is where it can be known."""
    lines = []
    for op in dict.fromkeys(op for op, *_ in left_out):
        of_op = [errors for name, *errors in left_out if name == op]
        ours, library = ([abs(error) for error in errors] for errors in zip(*of_op, strict=True))
        lines.append(
            f"{op}: {_LARGEST} ranks modelled from fewer are {median(ours):.0%} off in the median "
            f"of {len(ours)} records, {max(ours):.0%} at worst; the library's {median(library):.0%}"
            f", {max(library):.0%}"
        )
    return lines


def _json(problem: Recorded, calls: Sequence[Scaled]) -> dict[str, object]:
    from taxfree_tune.cost.scaling import crossing

    rows = [asdict(call) | {"us": call.us, "is_modelled": not call.is_recorded} for call in calls]
    return {
        "op": problem.op,
        "problem": dict(problem.problem),
        "crossing": crossing(calls),
        "calls": rows,
    }


def _print(problem: Recorded, calls: Sequence[Scaled]) -> None:
    from taxfree_tune.cost.scaling import LIBRARY, PARTS, crossing

    library = {call.ranks: call.us for call in calls if call.way == LIBRARY}
    rows = [
        (
            call.ranks, call.nodes, call.way, *(call.parts[part] for part in PARTS), call.us,
            library[call.ranks] / call.us, "recorded" if call.is_recorded else "modelled",
        )
        for call in calls
    ]  # fmt: skip
    columns = ["ranks", "nodes", "way", *PARTS, "us", "speed-up", "the sum is"]
    print_table(columns, rows, f"{_title(problem)}, parts modelled")
    print_lines([_crossed(crossing(calls), calls), ""])


def _title(problem: Recorded) -> str:
    return f"{problem.op} {heading(problem.op, problem.problem)}"


def _crossed(ranks: int | None, calls: Sequence[Scaled]) -> str:
    if ranks is None:
        return f"modelled: ours stays ahead of the library up to {calls[-1].ranks} ranks"
    return f"modelled: from {ranks} ranks on the library is as fast"


def _drawn(calls: Sequence[tuple[Recorded, list[Scaled]]]) -> list[dict[str, object]]:
    """The parts of all calls, as a picture takes them."""
    return [
        {
            "panel": f"{_title(problem)}, modelled",
            "ranks": call.ranks,
            "way": call.way,
            "bar": len([other for other in modelled[:index] if other.ranks == call.ranks]),
            "total_us": call.us,
            "part": part,
            "us": us,
            "depth": depth,
        }
        for problem, modelled in calls
        for index, call in enumerate(modelled)
        for depth, (part, us) in enumerate(call.parts.items())
    ]
