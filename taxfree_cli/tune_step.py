"""`--op decode_step --model MODEL` of `taxfree tune` and `taxfree explain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from taxfree.errors import UsageError
from taxfree.problems import require_operation
from taxfree_cli.asked import announce
from taxfree_cli.bench_views import us
from taxfree_cli.options import STEP, ShapeOptions, database_path, refuse
from taxfree_cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from taxfree_tune.tuning.steps import StepToTune

_TRIALS = 16
_FLOPS_PER_S = 2e7  # of the interpreted twin with one sequence, on the cores of a laptop


def is_for_step(
    op: str | None, of_others: Mapping[str, object], of_step: Mapping[str, object]
) -> bool:
    """Whether a step is asked for; what was given must be for it, or for what else is.

    Raises:
        UsageError: an option is not, or there is nothing of that name.
    """
    if op is not None:
        require_operation(op, STEP)
    if op == STEP:
        refuse(of_others, f"is not for --op {STEP}", "give --model, --layers, --batch, --context")
    else:
        refuse(of_step, "is for a step of a whole model", f"add --op {STEP} --model MODEL")
    return op == STEP


def tune_step(
    shape_options: ShapeOptions,
    layers: int | None,
    batch: int,
    context: int,
    fabric: str,
    db: Path | None,
    trials: int | None,
    seconds: float | None,
    seed: int,
    json: bool,
) -> None:
    """Tune a step, and print its ways beside the library's graph.

    Raises:
        UsageError: there is no model, or it has no step.
        WrongResult, WorkerLost, DatabaseError: as of the search.
    """
    from taxfree_tune.tuning.steps import tune
    from taxfree_tuning_db import Database

    asked, fabric = step_asked(shape_options, layers, batch, context, fabric)
    is_interpreted = fabric == "host"
    if is_interpreted:
        announce([asked.problem], "a candidate several", "a small config.json", _FLOPS_PER_S)
    path = database_path(db)
    with Database(path) as database:
        record = tune(asked, fabric, database, trials or _TRIALS, seconds, seed, note)
    baseline = record.baseline
    mode = next(iter(baseline.median_us))
    ways = [
        measurement
        for measurement in (record.winner, *record.runners_up)
        if measurement is not baseline
    ]
    if json:
        print_json(
            {
                "schema": 1,
                "model": shape_options.model,
                "problem": record.problem,
                "mode": mode,
                "library_us": baseline.median_us[mode],
                "ways": [asdict(way) for way in ways],
            }
        )
        return
    print_table(
        ["way", "config", "us", "library us / us"],
        [
            [
                "library" if way is baseline else way.variant,
                " ".join(f"{name}={value}" for name, value in way.config.items()),
                us(way.median_us[mode]),
                "" if is_interpreted else f"{baseline.median_us[mode] / way.median_us[mode]:.2f}",
            ]
            for way in (*ways, baseline)
        ],
    )
    note(f"stored in {path}")


def explain_step(
    shape_options: ShapeOptions,
    layers: int | None,
    batch: int,
    context: int,
    fabric: str,
    db: Path | None,
    json: bool,
) -> None:
    """Print the account of a step: what its time is, by the clocks of its programs.

    Raises:
        UsageError: there is no model, or it has no step.
        TaxfreeError: operations run the step.
    """
    from taxfree_tune.tuning.history import TuningHistory
    from taxfree_tune.tuning.steps import explain

    asked, fabric = step_asked(shape_options, layers, batch, context, fabric)
    history = TuningHistory.read(database_path(db), required=db is not None)
    explanation = explain(asked, fabric, history.records)
    if json:
        print_json(
            {
                "schema": 1,
                "model": shape_options.model,
                **asdict(explanation),
                "rest_us": explanation.rest_us,
            }
        )
        return
    rows = [("memory, at its measured rate", explanation.bytes_us), ("step", explanation.total_us)]
    rows += [(f"  {name}", time) for name, time in explanation.phases.items()]
    rows += [("  hand-offs", explanation.hand_offs_us), ("  tails of phases", explanation.tails_us)]
    rows += [("  before and after", explanation.rest_us)]
    print_table(["part", "us"], [[name, us(time)] for name, time in rows])


def step_asked(
    shape_options: ShapeOptions, layers: int | None, batch: int, context: int, fabric: str
) -> tuple[StepToTune, str]:
    """The step of a command's options, and the fabric."""
    from taxfree_tune import devices
    from taxfree_tune.benching.model import model_to_bench
    from taxfree_tune.tuning.steps import StepToTune

    if shape_options.model is None or shape_options.shapes:
        raise UsageError("a decode step is of a model", "--op decode_step --model qwen3-8b")
    fabric = devices.fabric_for(fabric)
    ranks = shape_options.ranks_of_model(devices.world_sizes(fabric))
    devices.require(fabric, ranks)
    model, dtype = model_to_bench(
        shape_options.model, ranks, layers, shape_options.dtype, in_fp8=True
    )
    return StepToTune(model, dtype, ranks, batch, context), fabric
