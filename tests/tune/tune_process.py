"""Tunes one problem on ranks of the host fabric: a controller that a test can end.

    python -m tests.tune.tune_process '{"db": ..., "trials": 4, ...}'

Prints one JSON line per step of the search, the last one being the record.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from taxfree_check.cross_compile.screen import Screen
from taxfree_kernels.variant import problem_class
from taxfree_tune.tuning import together
from taxfree_tune.tuning.tuner import Budget, Tuner
from taxfree_tune.workers.group import WorkerGroup, Workers
from taxfree_tuning_db import Database

OP = "all_gather_matmul"


def main(options: dict[str, Any]) -> None:
    together.deadline_s = lambda hardware: options["deadline_s"]
    problem = problem_class(OP)(**options["problem"])

    def start() -> WorkerGroup:
        group = WorkerGroup(problem.world_size, "host", 1 << 20, options["timeout_s"])
        say("group", [process.pid for process in group._processes])
        return group

    def progress(event: Any) -> None:
        say("event", {"done": event.done, "note": event.note})

    with Database(options["db"]) as database, Workers(start) as workers:
        hardware = workers.group().hardware
        with Screen(hardware) as screen:
            tuned = Tuner(
                database, workers, hardware, screen,
                seed=options["seed"], only=options["only"], progress=progress,
            )  # fmt: skip
            record = tuned.tune(problem, Budget(options["trials"]))
        trials = [dataclasses.asdict(trial) for trial in database.trials(record.key)]
    say("trials", trials)
    say("record", record.to_json())


def say(kind: str, value: Any) -> None:
    print(json.dumps([kind, value], default=dict), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
