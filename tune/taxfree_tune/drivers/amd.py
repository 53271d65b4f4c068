"""GPUs and processes as rocm-smi reports them, which comes with every ROCm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taxfree_tune.drivers.gpu import Gpu, GpuProcess, link_matrix, number, output, whole

TOOL = "rocm-smi"
DRIVER = Path("/dev/kfd")

_SHOW = ("--showproductname", "--showmeminfo", "vram", "--showclocks", "--showtemp", "--showpower")


def gpus() -> tuple[Gpu, ...]:
    """The GPUs, whether or not this process may use them."""
    cards = json.loads(output(TOOL, *_SHOW, "--json"))
    return tuple(_gpu(name, cells) for name, cells in cards.items() if name.startswith("card"))


def processes() -> tuple[GpuProcess, ...]:
    """Processes that compute on a GPU; which GPU, rocm-smi does not say."""
    text = output(TOOL, "--showpids", "--json")
    if not text.strip().startswith("{"):  # no process, no JSON
        return ()
    listed = json.loads(text).get("system", {})
    return tuple(
        GpuProcess(None, int(pid.removeprefix("PID")), *_name_and_memory(said))
        for pid, said in listed.items()
        if pid.startswith("PID")
    )


def links() -> tuple[tuple[str, ...], ...]:
    """[gpu][gpu]: XGMI or PCIE."""
    return link_matrix(output(TOOL, "--showtopotype"))


def driver_version() -> str:
    """Version of the kernel's driver."""
    listed = json.loads(output(TOOL, "--showdriverversion", "--json"))
    return str(listed["system"]["Driver version"])


def _gpu(name: str, cells: Mapping[str, Any]) -> Gpu:
    def first(*words: str) -> Any:
        """The value of the first label with these words; labels vary between versions."""
        return next(
            (cells[cell] for cell in cells if all(word in cell.lower() for word in words)), ""
        )

    return Gpu(
        index=int(name.removeprefix("card")),
        name=str(first("card", "series") or first("card", "model") or "AMD GPU"),
        memory_bytes=whole(first("vram total memory")),
        used_bytes=whole(first("vram total used")),
        compute_mhz=number(first("sclk clock speed")),
        memory_mhz=number(first("mclk clock speed")),
        temperature_c=number(first("temperature", "junction")),
        power_w=number(first("power (w)")),
    )


def _name_and_memory(said: str) -> tuple[str, int | None]:
    """Of `python, 1, 4096, 0, 12`: name, GPUs, bytes of memory, bytes by copy engines, CUs."""
    name, _, memory, *_ = [*said.split(", "), "", ""]
    return name, whole(memory)
