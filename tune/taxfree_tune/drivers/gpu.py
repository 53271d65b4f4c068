"""GPUs and the processes on them, as the tools of their drivers print them."""

from __future__ import annotations

import re
import subprocess
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


_DEADLINE_S = 15.0  # rocm-smi takes seconds on eight GPUs
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def output(*command: str) -> str:
    """Output of a tool.

    Raises:
        RuntimeError: it failed; with the last line it printed.
        OSError, subprocess.TimeoutExpired: it is not there, or hangs.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, errors="replace"
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {said[-1]}")
    return _ESCAPES.sub("", done.stdout)


def number(text: object) -> float | None:
    """The first number in a cell such as `(132Mhz)`; None in `[N/A]`."""
    match = _NUMBER.search(str(text))
    return float(match[0]) if match else None


def whole(text: object, unit: int = 1) -> int | None:
    """The first number in a cell, times `unit`, as an integer."""
    value = number(text)
    return None if value is None else int(value * unit)


def link_matrix(text: str) -> tuple[tuple[str, ...], ...]:
    """The part between GPUs of a matrix as the tools print it, with a row `GPU0 ...` per GPU."""
    lines = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    rows = [cells[1:] for cells in lines if len(cells) > 1 and not cells[1].startswith("GPU")]
    return tuple(
        tuple("self" if a == b else row[b] for b in range(len(rows))) for a, row in enumerate(rows)
    )
