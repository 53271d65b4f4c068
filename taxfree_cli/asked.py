"""The problems that a measuring command is asked for, on the devices of this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taxfree.problems import format_problem
from taxfree_cli.options import ShapeOptions, database_path, note_left_out
from taxfree_cli.output import note, warn
from taxfree_kernels.variant import op_of
from taxfree_tune.shapes import choose

if TYPE_CHECKING:
    from taxfree_tune.tuning.history import TuningHistory


@dataclass(frozen=True)
class Asked:
    """Problems to measure.

    Args:
        problems: of any operations and world sizes.
        fabric: "host", "cuda" or "rocm".
        history: earlier tuning.
        only: variants, or None for all.
    """

    problems: list[Any]
    fabric: str
    history: TuningHistory
    only: Sequence[str] | None


def what_is_asked(
    shape_options: ShapeOptions, fabric: str, db: Path | None, only: Sequence[str] | None
) -> Asked:
    """Find the problems to measure and the fabric; prints choices that the user did not make.

    Raises:
        UsageError: the shapes or counts are invalid.
        HardwareError: the fabric or the GPUs are not there.
        DatabaseError: the database that `--db` names cannot be read.
    """
    from taxfree_tune import devices
    from taxfree_tune.tuning.history import TuningHistory

    fabric = devices.fabric_for(fabric)
    history = TuningHistory.read(database_path(db), required=db is not None)
    problems = problems_here(shape_options, fabric, history.problems, only or ())
    return Asked(
        [problem for group in problems.values() for problem in group], fabric, history, only
    )


def problems_here(
    shape_options: ShapeOptions,
    fabric: str,
    recorded: Callable[[str, str | None], list[dict[str, Any]]],
    only: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Problems by operation; prints choices that the user did not make.

    Args:
        fabric: "host", "cuda" or "rocm".
        recorded: gives the problems of an operation on record for a kind of GPU, which are taken
            without `--shapes`.
        only: variants that each operation must have.

    Raises:
        UsageError: the shapes or counts are invalid.
        HardwareError: the GPUs are not there.
    """
    from taxfree_tune import devices

    request = shape_options.request(devices.world_sizes(fabric))
    gpu, default = devices.gpu_name(fabric), devices.default_shapes(fabric)
    problems_of = {}
    for op in shape_options.operations(request, only):
        choice = choose(op, request, functools.partial(recorded, op, gpu), default)
        if choice.note:
            note(choice.note)
        problems_of[op] = choice.problems
    note_left_out(request)
    problems = [problem for group in problems_of.values() for problem in group]
    devices.require(fabric, max(problem.world_size for problem in problems))
    if fabric == "host":
        announce(problems)
    return problems_of


_FLOPS_PER_S = 4e8  # of an interpreted matmul, on the cores of a laptop
_LONG_S = 5.0
_DEMO = "--shapes demo"


def announce(
    problems: Sequence[Any],
    repeated: str = "a candidate several calls",
    small: str = _DEMO,
    flops_per_s: float = _FLOPS_PER_S,
) -> None:
    """Say that times are not those of a GPU, and how long the largest problem takes.

    Args:
        repeated: how often it is called.
        small: options that take less time.
        flops_per_s: of what is interpreted.
    """
    note("host fabric: times are of interpreted kernels on a CPU, not of a GPU, and not compared")
    largest = max(problems, key=lambda problem: problem.cost.flops)
    seconds = largest.cost.flops / flops_per_s
    if seconds > _LONG_S:
        minutes = f"{seconds / 60:.0f} minutes" if seconds < 86400 else "more than a day"
        times = f"{seconds:.0f} s" if seconds < 120 else minutes
        shape = format_problem(op_of(largest), asdict(largest))
        warn(f"an interpreted call of {shape} takes about {times}, {repeated}; {small} is small")
