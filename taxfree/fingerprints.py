"""Fingerprints of hardware and software, versions of variants, and roles of fields."""

from __future__ import annotations

import dataclasses
import subprocess
from functools import cache
from pathlib import Path

from taxfree._version import __version__
from taxfree_kernels.decode_step.tuned import STEP, VERSIONS
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, operation, variants
from taxfree_tuning_db import HardwareFingerprint, Measurement, Record, SoftwareFingerprint

NEIGHBOUR_OCTAVES = 1.0  # beyond a factor of two another tile shape wins


def hardware_fingerprint(hardware: Hardware) -> HardwareFingerprint:
    """The properties of a device that affect tuning; backend and nodes imply the link.

    Ranks of several nodes have another fingerprint: no record of one node is theirs, nor lent.
    """
    links = {"cuda": "nvlink", "hip": "xgmi", "interpreter": "shared memory"}
    several = f", {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return HardwareFingerprint(
        gpu=hardware.name + several,
        architecture=hardware.architecture,
        compute_units=hardware.compute_units,
        memory_bytes=_whole_gib(hardware.memory_bytes),
        link=links[hardware.backend] + several,
        num_xcds=hardware.num_xcds,
    )


def _whole_gib(size: int) -> int:
    # Drivers report a little less than the part has, and not always the same.
    return round(size / (1 << 30)) << 30


@cache
def software_fingerprint() -> SoftwareFingerprint:
    """The versions that are loaded."""
    import torch
    import triton

    collectives = "gloo"
    runtime, driver = "cpu", ""
    if torch.version.hip is not None:
        runtime = f"rocm {torch.version.hip}"
    elif torch.version.cuda is not None:
        runtime = f"cuda {torch.version.cuda}"
    if torch.cuda.is_available():
        collectives = "nccl " + ".".join(map(str, torch.cuda.nccl.version()))
        driver = _driver_version()
    return SoftwareFingerprint(
        taxfree=__version__,
        triton=triton.__version__,
        torch=str(torch.__version__),
        driver=driver,
        runtime=runtime,
        collectives=collectives,
    )


def _driver_version() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no library, or a driver that does not answer: the version is only shown
        return "unknown"


@cache
def versions(op: str) -> dict[str, int]:
    """Variant -> its current version."""
    if op == STEP:
        return VERSIONS
    return {name: variant.version for name, variant in variants(op).items()}


@cache
def source_commit() -> str | None:
    """The commit of the sources that run, with "-dirty" after changes; None outside of git."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def interpolated_fields(op: str) -> tuple[str, ...]:
    """Problem fields in which a record whose config is transferred may differ."""
    return operation(op).interpolated_fields


def size_field(op: str) -> str:
    """The interpolated field that tables and pictures vary."""
    return interpolated_fields(op)[-1]


def rows_field(op: str) -> str:
    """The interpolated field in which calls of one plan may differ: rows, or sequences."""
    return interpolated_fields(op)[0]


def capacity_field(op: str) -> str | None:
    """The other interpolated field, if there is one: keys that there is room for."""
    return next(iter(interpolated_fields(op)[1:]), None)


def ignored_fields(op: str) -> tuple[str, ...]:
    """Other fields in which it may differ, because they hardly affect what is fastest."""
    return operation(op).ignored_fields


def transferred(record: Record, problem: Problem) -> Record:
    """A neighbour's record, with its dtype in configs replaced by this problem's."""

    def translated(measured: Measurement) -> Measurement:
        config = {
            parameter: problem.dtype if value == record.problem["dtype"] else value
            for parameter, value in measured.config.items()
        }
        return dataclasses.replace(measured, config=config)

    return dataclasses.replace(
        record,
        winner=translated(record.winner),
        runners_up=tuple(translated(runner_up) for runner_up in record.runners_up),
    )
