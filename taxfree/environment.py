"""What a result was measured on, for result files: every probe is guarded, the record is made.

Asks the driver's own tool, never CUDA, so that the controller may call it while workers measure.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from taxfree import identity

_PREFIXES = (
    "CUDA_", "HIP_", "HSA_", "NCCL_", "OMP_", "PYTORCH_", "RCCL_", "ROCR_", "TAXFREE_", "TORCH_",
    "TRITON_",
)  # fmt: skip
_PROBE_S = 20.0
_SMI_FIELDS = {
    "name": "name",
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "throttled": "clocks_event_reasons.active",
}
# Bits of NVML's clock event reasons: idle, set by applications and display settings do no harm.
_THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "hardware temperature",
    0x80: "power brake",
}


def record(fabric: str, hardware: Any) -> dict[str, Any]:
    """Everything about this machine that a time may depend on, as JSON.

    Args:
        fabric: the fabric that ranks use.
        hardware: of one rank's device.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "fabric": fabric,
        "hardware": dataclasses.asdict(identity.hardware_fingerprint(hardware)),
        "software": dataclasses.asdict(identity.software_fingerprint()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "gpus": [] if fabric == "host" else gpus(),
        "topology": [] if fabric == "host" else _topology(),
        "variables": variables(os.environ),
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that steer what is measured; none that holds a path."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) and os.sep not in value
    }


def gpus(uuid: str | None = None) -> list[dict[str, Any]]:
    """Name, clocks (MHz), power (W), temperature and throttling of GPUs, as they are now.

    Empty where the driver's tool is not there.

    Args:
        uuid: of one GPU; else all of the machine, also those that CUDA_VISIBLE_DEVICES hides.
    """
    query = ",".join(_SMI_FIELDS.values())
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    text = _said(*command, *([] if uuid is None else ["--id", uuid]))
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    return [_gpu(row) for row in rows if len(row) == len(_SMI_FIELDS)]


def _gpu(row: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(zip(_SMI_FIELDS, row, strict=True))
    for name in found.keys() - {"name", "throttled"}:
        found[name] = _number(found[name])
    found["throttled"] = _throttling(found["throttled"])
    return found


def _throttling(bits: str) -> list[str]:
    try:
        active = int(bits, 16)
    except ValueError:
        return []
    return [reason for bit, reason in _THROTTLE_REASONS.items() if active & bit]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _topology() -> list[str]:
    text = re.sub(r"\x1b\[\d*m", "", _said("nvidia-smi", "topo", "-m"))  # headings are underlined
    return [line.rstrip() for line in text.partition("Legend")[0].splitlines() if line.strip()]


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(names, platform.machine())
    except OSError:
        return platform.machine()


def _said(*command: str) -> str:
    """What a tool prints; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
