"""The scripts' common parts: options, exit codes, records of results, runtimes with one winner."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from taxfree import fingerprints
from taxfree._runtime.runtime import Runtime
from taxfree.errors import Interrupted
from taxfree.files import write
from taxfree_cli.exits import failure
from taxfree_cli.output import print_failure
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import op_of, variants
from taxfree_tune.measuring import environment
from taxfree_tune.measuring.results import machine_name
from taxfree_tune.workers.group import WorkerGroup
from taxfree_tuning_db import Measurement, Record


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


def record_of(problem: Any, variant: str, hardware: Hardware, mode: str) -> Record:
    """Return a record by which a variant at its default config wins over the baseline."""
    op = op_of(problem)

    def measured(name: str, config: dict[str, Any], us: float) -> Measurement:
        version = fingerprints.versions(op)[name]
        return Measurement(name, config, version, {mode: us}, {mode: 0.0}, 1, None)

    config = variants(op)[variant].seed_configs(problem, hardware)[0]
    return Record(
        op, dataclasses.asdict(problem), fingerprints.hardware_fingerprint(hardware),
        fingerprints.software_fingerprint(), measured(variant, config, 1.0),
        measured("baseline", {}, 2.0), (), 1, 0.0, {"source": "user"},
    )  # fmt: skip


def call_of(runtime: Runtime, problem: Any, inputs: Any, **options: Any) -> Callable[[], Any]:
    """Return a call of the runtime's method on the inputs that an operation makes."""
    op = op_of(problem)
    taken = {"matmul_all_reduce": 4, "flash_decode": 5, "matmul_reduce_scatter": 2}.get(op, 3)
    arguments = inputs[:taken]
    if op == "all_gather_matmul":
        options["gather_dim"] = problem.gather_dim
    if op == "attention":
        options |= {"causal": problem.causal, "cu_seqlens": inputs[3]}
    if getattr(problem, "rms_norm", False):
        x, weight, bias, residual, norm_weight, eps = inputs
        arguments = (x, weight, norm_weight, bias, residual, float(eps))
        op = "matmul_all_reduce_rms_norm"
    return partial(getattr(runtime, op), *arguments, **options)
