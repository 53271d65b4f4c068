"""Times the MLP block of a model end to end: dispatched by taxfree, by NCCL, by PyTorch's own ops.

    python -m benchmarks.block --gpus 8 --hidden 8192 --intermediate 28672 --rows 1,16,64,512,2048

All paths of a block are timed together, eagerly and in a graph, on rotated weights. The dispatcher
uses the tuning database. The record is written to ``benchmarks/results/block``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import block_ranks
from benchmarks.block_ranks import Block, PathTime
from benchmarks.commands import exit_code, keep, parser, positive, positives
from taxfree.errors import UsageError, WrongResult
from taxfree.settings import Settings
from taxfree_tune import devices
from taxfree_tune.measuring.trial import ERROR_ALLOWANCE
from taxfree_tune.tuning.history import TuningHistory
from taxfree_tune.workers.group import WorkerGroup
from taxfree_tuning_db import default_path

FOLDER = Path(__file__).parent / "results" / "block"
DEADLINE_S = 600.0


def time_block(
    group: WorkerGroup, block: Block, history: TuningHistory, repetitions: int
) -> Iterator[dict[str, Any]]:
    """Time one block; yields rows of a record.

    Raises:
        WrongResult: a path is less exact than the library may be.
        TaskFailed: a rank could not run it.
    """
    arguments = {"block": block, "records": history.records, "repetitions": repetitions}
    measured: list[PathTime] = group.call(block_ranks.measure, DEADLINE_S, **arguments)[0]
    library = {each.mode: each for each in measured if each.path == "library"}
    for each in measured:
        worst = ERROR_ALLOWANCE * library[each.mode].relative_error
        if not each.relative_error <= worst:
            raise WrongResult(
                f"{each.path} on {block}: relative error {each.relative_error:.3g}, "
                f"{worst:.3g} is allowed",
                f"it ran {dict(each.choices)}",
            )
        yield {
            "block": dataclasses.asdict(block),
            "path": each.path,
            "mode": each.mode,
            "choices": dict(each.choices),
            "median_us": each.timing.median_us,
            "iqr_us": each.timing.iqr_us,
            "skew_us": each.timing.skew_us,
            "speedup": library[each.mode].timing.median_us / each.timing.median_us,
            "relative_error": each.relative_error,
            "samples_us": each.timing.samples_us,
        }


def blocks(options: argparse.Namespace, world_size: int) -> list[Block]:
    """The blocks of the options; sharded ones only where rows divide over the ranks.

    Raises:
        UsageError: the intermediate size does not divide over the ranks.
    """
    if options.intermediate % world_size:
        raise UsageError(
            f"{options.intermediate} columns do not divide over {world_size} ranks",
            "give another --intermediate",
        )
    common = (options.hidden, options.intermediate)
    ends = (options.dtype, world_size)
    return [
        *(Block(m, *common, "replicated", *ends) for m in options.rows),
        *(Block(m, *common, "sharded", *ends) for m in options.rows if m % world_size == 0),
    ]


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--gpus", type=positive, help="ranks; all GPUs by default")
    made.add_argument("--hidden", type=positive, default=8192)
    made.add_argument("--intermediate", type=positive, default=28672)
    made.add_argument("--rows", type=positives, default="1,16,64,512,2048")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--repetitions", type=positive, default=25)
    made.add_argument("--db", type=Path, help="tuning database; the user's by default")
    options = made.parse_args()
    return exit_code(lambda: _time_all(options))


def _time_all(options: argparse.Namespace) -> None:
    fabric, settings = devices.fabric_for(options.fabric), Settings.from_environment()
    world_size = options.gpus or devices.world_sizes(fabric)[0]
    devices.require(fabric, world_size)
    wanted = blocks(options, world_size)
    path = options.db or default_path()
    history = TuningHistory.read(path, required=options.db is not None)
    heap_bytes = devices.heap_bytes([each for block in wanted for each in block.problems])
    rows: list[dict[str, Any]] = []
    with WorkerGroup(world_size, fabric, heap_bytes, settings.timeout_s) as group:
        try:
            for block in wanted:
                for row in time_block(group, block, history, options.repetitions):
                    rows.append(row)
                    print(
                        f"m={block.m} {block.activations:11}{row['path']:9}{row['mode']:6}"
                        f"{row['median_us']:9.1f} us  x{row['speedup']:.2f}  "
                        f"{' + '.join(row['choices'].values())}",
                        flush=True,
                    )
        finally:  # finished blocks are kept if a later one fails
            if rows:
                keep({"rows": rows}, group, fabric, FOLDER, options.out)


if __name__ == "__main__":
    sys.exit(main())
