"""GPUs and the processes on them, as their drivers see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver sees it now; None is what the driver does not say.

    Args:
        index: as the driver counts them.
        memory_bytes, used_bytes: of device memory.
        compute_mhz, compute_max_mhz: clock of the SMs or CUs.
        memory_mhz, memory_max_mhz: clock of the memory.
        temperature_c: degrees Celsius.
        power_w, power_limit_w: watts.
        slowed_by: reasons why its clock is below the maximum.
    """

    index: int
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    compute_mhz: float | None = None
    compute_max_mhz: float | None = None
    memory_mhz: float | None = None
    memory_max_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    slowed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuProcess:
    """A process of somebody's on a GPU.

    Args:
        gpu: index of the GPU, or None where the driver does not say.
        memory_bytes: of device memory, or None.
    """

    gpu: int | None
    pid: int
    name: str
    memory_bytes: int | None
