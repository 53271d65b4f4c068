"""The scripts' common parts: options, exit codes, records of results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from taxfree.errors import Interrupted
from taxfree.files import write
from taxfree_cli.exits import failure
from taxfree_cli.output import print_failure
from taxfree_tune.measuring import environment
from taxfree_tune.measuring.results import machine_name
from taxfree_tune.workers.group import WorkerGroup


def positive(text: str) -> int:
    """Parse an integer above 0; a type for `argparse`."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the first line of a script's docstring, and --fabric and --out."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--fabric", default="auto")
    made.add_argument("--out", type=Path, help="file of the record")
    return made


def exit_code(run: Callable[[], None]) -> int:
    """Run a script; an error becomes a line, a hint and an exit code."""
    try:
        run()
    except KeyboardInterrupt:
        told = failure(Interrupted("interrupted"))
    except Exception as error:
        told = failure(error)
    else:
        return 0
    print_failure(told)
    return told.exit_code


def keep(
    result: Mapping[str, Any],
    group: WorkerGroup,
    fabric: str,
    folder: Path,
    out: Path | None,
    shared_gpus: int | None = None,
) -> None:
    """Write a script's record with its machine, and print the path.

    Args:
        result: the record, as JSON; ``schema``, ``environment``, ``ranks``, and ``shared_gpus`` if
            GPUs were shared, are added.
        group: the ranks; it may have ended.
        folder: for records of GPUs; those of the host fabric need `out`.
        out: the file that the user asks for.
        shared_gpus: the number of GPUs that the ranks shared; None if each had its own.
    """
    if out is None and fabric == "host":
        print("not kept: times of the host fabric; --out FILE keeps them")
        return
    machine: dict[str, Any] = {"environment": environment.record(fabric, group.hardware)}
    machine["ranks"], suffix = group.world_size, ""
    if shared_gpus is not None:
        machine["shared_gpus"], suffix = shared_gpus, f"-on-{shared_gpus}"
    name = f"{machine_name(group.hardware.name)}-x{group.world_size}{suffix}.json"
    path = out or folder / name
    write(path, json.dumps({"schema": 1, **machine, **result}, indent=1) + "\n")
    print(f"wrote {path}")
