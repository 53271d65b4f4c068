"""Examines software, machine and fabrics, and measures: the data behind `taxfree doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from taxfree.errors import one_line
from taxfree_tune import devices
from taxfree_tune.doctor import advice, fabrics, machine, measuring, software
from taxfree_tune.doctor.report import Guard, MachineReport, ProbeResults

__all__ = ["MachineReport", "examine"]


def examine(
    fabric: str = "auto", gpus: int | None = None, tell: Callable[[str], None] = lambda _: None
) -> MachineReport:
    """Look at everything; what fails becomes a part of the report, and is never raised.

    Args:
        fabric: on which to measure: "host", "cuda", "rocm", or "auto" for the first that serves.
        gpus: ranks; by default all GPUs, or two ranks of the host fabric.
        tell: told what is being done, as all of it takes some ten seconds.
    """
    guard = Guard()
    tell("looking at the machine")
    machine_seen = machine.look(guard)  # before this process itself may be on a GPU
    tell("loading torch and triton")
    versions = software.look(guard)
    reasons = fabrics.reasons(guard)
    measured = None
    for name in fabrics.ORDER if fabric == "auto" else (fabric,):
        if measured is None and reasons[name] is None:
            measured, reasons[name] = _measure(guard, name, gpus, tell)
    report = MachineReport(fabric, versions, machine_seen, reasons, measured, guard.problems)
    return replace(report, advice=advice.advice(report))


def _measure(
    guard: Guard, fabric: str, gpus: int | None, tell: Callable[[str], None]
) -> tuple[ProbeResults | None, str | None]:
    """Results of the probes; else the reason that the fabric does not open."""
    try:
        world_size = gpus or devices.world_sizes(fabric)[0]
        devices.require(fabric, world_size)
        return measuring.measure(guard, fabric, world_size, tell), None
    except Exception as error:
        return None, f"does not open: {one_line(error)}"
