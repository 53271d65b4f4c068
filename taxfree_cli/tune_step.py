"""`taxfree tune --op decode_step --model MODEL`: tunes a decode step of a whole model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from taxfree.errors import UsageError
from taxfree_cli.bench_views import us
from taxfree_cli.options import ShapeOptions, database_path
from taxfree_cli.output import note, print_json, print_table

STEP = "decode_step"
_TRIALS = 16


def tune_step(
    given: ShapeOptions,
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
    from taxfree_tune import devices
    from taxfree_tune.benching.model import model_to_bench
    from taxfree_tune.tuning.steps import StepToTune, tune
    from taxfree_tuning_db import Database

    if given.model is None or given.shapes:
        raise UsageError("a decode step is of a model", "--op decode_step --model qwen3-8b")
    fabric = devices.fabric_for(fabric)
    ranks, *others = given.request(devices.world_sizes(fabric)).world_sizes
    if others:
        raise UsageError(f"--gpus {given.gpus}: a model is split over one number", "--gpus 2")
    devices.require(fabric, ranks)
    model, dtype = model_to_bench(given.model, ranks, layers, given.dtype)
    path = database_path(db)
    with Database(path) as database:
        asked = StepToTune(model, dtype, ranks, batch, context)
        record = tune(asked, fabric, database, trials or _TRIALS, seconds, seed, note)
    baseline = record.baseline
    mode = next(iter(baseline.median_us))
    ways = [each for each in (record.winner, *record.runners_up) if each is not baseline]
    if json:
        print_json(
            {
                "schema": 1,
                "model": given.model,
                "problem": record.problem,
                "mode": mode,
                "library_us": baseline.median_us[mode],
                "ways": [asdict(each) for each in ways],
            }
        )
        return
    print_table(
        ["way", "config", "us", "library us / us"],
        [
            [
                "library" if each is baseline else each.variant,
                " ".join(f"{name}={value}" for name, value in each.config.items()),
                us(each.median_us[mode]),
                f"{baseline.median_us[mode] / each.median_us[mode]:.2f}",
            ]
            for each in (*ways, baseline)
        ],
    )
    note(f"stored in {path}")
