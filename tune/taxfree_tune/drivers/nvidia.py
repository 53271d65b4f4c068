"""GPUs and processes as nvidia-smi reports them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from taxfree_tune.drivers.gpu import Gpu, GpuProcess, link_matrix, number, output, whole

TOOL = "nvidia-smi"
DRIVER = Path("/proc/driver/nvidia/version")

_MIB = 1 << 20
_FIELDS = (
    "index,name,uuid,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,"
    "temperature.gpu,power.draw,power.limit"
)
_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}  # 0x1 is an idle GPU

#: reasons for a lower clock that somebody chose
CHOSEN = ("application clocks", "sync boost", "display clocks")


def gpus(uuid: str | None = None) -> tuple[Gpu, ...]:
    """The GPUs, whether or not this process may use them; or one of them."""
    which = () if uuid is None else ("--id", uuid)
    try:
        rows = _query("gpu", f"{_FIELDS},clocks_event_reasons.active", *which)
    except RuntimeError:  # drivers before 535 know another name
        rows = _query("gpu", f"{_FIELDS},clocks_throttle_reasons.active", *which)
    return tuple(map(_gpu, rows))


def utilization(uuid: str) -> float | None:
    """Percent of the driver's last sampling period in which a GPU computed; None if not known."""
    return number(_query("gpu", "utilization.gpu", "--id", uuid)[0][0])


def processes(uuid: str | None = None) -> tuple[GpuProcess, ...]:
    """Processes that compute on a GPU; or those on one of them, whose index is not looked up."""
    indices = {}
    if uuid is None:
        indices = {uuid: int(index) for index, uuid in _query("gpu", "index,uuid")}
    rows = _query("compute-apps", "gpu_uuid,pid,process_name,used_memory")
    return tuple(
        GpuProcess(indices.get(gpu), int(pid), name, whole(used, _MIB))
        for gpu, pid, name, used in rows
        if uuid in (None, gpu)
    )


def links() -> tuple[tuple[str, ...], ...]:
    """[gpu][gpu]: NV18 is 18 NVLinks; PIX, PXB, PHB, NODE and SYS are ever longer ways by PCIe."""
    return link_matrix(topology())


def topology() -> str:
    """How GPUs, processors and network cards are joined, as the tool prints it."""
    return output(TOOL, "topo", "-m")


def driver_version() -> str:
    """Version of the driver."""
    return _query("gpu", "driver_version")[0][0]


def _query(what: str, fields: str, *which: str) -> list[list[str]]:
    text = output(TOOL, f"--query-{what}={fields}", "--format=csv,noheader,nounits", *which)
    return [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]


def _gpu(row: Sequence[str]) -> Gpu:
    index, name, _, memory, used, *rest, reasons = row
    compute, compute_max, clock, clock_max, temperature, power, limit = map(number, rest)
    return Gpu(
        index=int(index),
        name=name,
        memory_bytes=whole(memory, _MIB),
        used_bytes=whole(used, _MIB),
        compute_mhz=compute,
        compute_max_mhz=compute_max,
        memory_mhz=clock,
        memory_max_mhz=clock_max,
        temperature_c=temperature,
        power_w=power,
        power_limit_w=limit,
        slowed_by=_decoded(reasons),
    )


def _decoded(active: str) -> tuple[str, ...]:
    bits = int(active, 16) if active.startswith("0x") else 0
    return tuple(name for bit, name in _REASONS.items() if bits & bit)
