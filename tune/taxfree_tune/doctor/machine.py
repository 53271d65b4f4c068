"""GPUs, what else runs on them, how they are linked, and the environment."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace

from taxfree_tune.doctor.report import ExaminedMachine, Guard
from taxfree_tune.drivers import amd, nvidia
from taxfree_tune.drivers.gpu import GpuProcess
from taxfree_tune.measuring.environment import cpu_name

_TOOLS = {"nvidia": nvidia, "amd": amd}
_VARIABLES = re.compile(
    r"(TAXFREE|TRITON|NCCL|RCCL|TORCH_(NCCL|SYMM|DISTRIBUTED)|GLOO|HSA|HIP|ROCR)_\w+"
    r"|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER)"
    r"|AMD_SERIALIZE_\w+|GPU_MAX_HW_QUEUES|PYTORCH_\w*ALLOC_CONF|OMP_NUM_THREADS"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


def look(guard: Guard) -> ExaminedMachine:
    """Describe this machine, by what its drivers' own tools say."""
    system: dict[str, str] = guard("system", _system, {})
    machine = ExaminedMachine(system=system, vendors=vendors(), environment=environment())
    for vendor in machine.vendors:
        machine = _with_gpus(guard, machine, vendor)
    return machine


def vendors() -> tuple[str, ...]:
    """Whose GPUs have a driver here."""
    return tuple(
        vendor
        for vendor, module in _TOOLS.items()
        if module.DRIVER.exists() or shutil.which(module.TOOL)
    )


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that change what is loaded or measured, and are set."""
    return {name: environ[name] for name in sorted(environ) if _VARIABLES.fullmatch(name)}


def _with_gpus(guard: Guard, machine: ExaminedMachine, vendor: str) -> ExaminedMachine:
    module = _TOOLS[vendor]
    driver = guard(f"{vendor} driver", module.driver_version, "unknown")
    processes: tuple[GpuProcess, ...] = guard(f"{vendor} processes", module.processes, ())
    return replace(
        machine,
        system={**machine.system, f"{vendor} driver": driver},
        gpus=machine.gpus + guard(f"{vendor} GPUs", module.gpus, ()),
        processes=machine.processes
        + tuple(process for process in processes if process.pid != os.getpid()),
        links=machine.links or guard(f"{vendor} links", module.links, ()),
    )


def _system() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores to use",
        "memory": f"{memory / (1 << 30):.0f} GiB",
    }
