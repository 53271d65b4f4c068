"""How the scripts here end: as the command line does, and with their records kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from taxfree.measuring import environment
from taxfree.measuring.results import machine_name, write
from taxfree.workers.group import WorkerGroup
from taxfree_cli.exits import INTERRUPTED, failure
from taxfree_cli.output import print_failure


def positive(text: str) -> int:
    """The integer above 0 that an option's text is; for `argparse`."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def positives(text: str) -> list[int]:
    """Such integers, separated by commas."""
    return [positive(part) for part in text.split(",")]


def exit_code(run: Callable[[], None]) -> int:
    """Run a script; what goes wrong is told in a line, with a hint and an exit code."""
    try:
        run()
    except KeyboardInterrupt:
        told = INTERRUPTED
    except Exception as error:
        told = failure(error)
    else:
        return 0
    print_failure(told)
    return told.exit_code


def keep(
    found: Mapping[str, Any],
    group: WorkerGroup,
    fabric: str,
    folder: Path,
    out: Path | None,
    shared_gpus: int | None = None,
) -> None:
    """Write what a script has found, with the machine that it was found on; says where.

    Args:
        found: the record, as JSON, without what is written with it: ``schema``, ``environment``,
            ``ranks``, and ``shared_gpus`` where GPUs were shared.
        group: the ranks; may have ended.
        folder: for records of GPUs; those of the host are only written where a user wants one.
        out: the file that the user wants.
        shared_gpus: how many GPUs the ranks shared; None where each had its own.
    """
    if out is None and fabric == "host":
        print("not kept, because it is of the host; --out FILE keeps it")
        return
    machine: dict[str, Any] = {"environment": environment.record(fabric, group.hardware)}
    machine["ranks"], suffix = group.world_size, ""
    if shared_gpus is not None:
        machine["shared_gpus"], suffix = shared_gpus, f"-on-{shared_gpus}"
    name = f"{machine_name(group.hardware.name)}-x{group.world_size}{suffix}.json"
    path = out or folder / name
    write(path, json.dumps({"schema": 1, **machine, **found}, indent=1) + "\n")
    print(f"wrote {path}")
