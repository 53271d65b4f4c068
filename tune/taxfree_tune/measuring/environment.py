"""The machine that a result was measured on, for result files; probes that fail leave gaps.

GPUs are queried by the driver's own tool, without a CUDA context, so that the controller may call
this while workers measure.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from taxfree import fingerprints
from taxfree_tune.drivers import nvidia

_PREFIXES = (
    "CUDA_", "HIP_", "HSA_", "NCCL_", "OMP_", "PYTORCH_", "RCCL_", "ROCR_", "TAXFREE_", "TORCH_",
    "TRITON_",
)  # fmt: skip


def record(fabric: str, hardware: Any) -> dict[str, Any]:
    """Everything about this machine that a time may depend on, as JSON.

    Args:
        fabric: the fabric that ranks use.
        hardware: of one rank's device.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "fabric": fabric,
        "hardware": dataclasses.asdict(fingerprints.hardware_fingerprint(hardware)),
        "software": dataclasses.asdict(fingerprints.software_fingerprint()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
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
    try:
        gpus = nvidia.gpus(uuid)
    except Exception:
        return []
    return [
        {
            "name": gpu.name,
            "sm_mhz": gpu.compute_mhz,
            "sm_max_mhz": gpu.compute_max_mhz,
            "memory_mhz": gpu.memory_mhz,
            "power_w": gpu.power_w,
            "power_limit_w": gpu.power_limit_w,
            "temperature_c": gpu.temperature_c,
            "throttled": [reason for reason in gpu.slowed_by if reason not in nvidia.CHOSEN],
        }
        for gpu in gpus
    ]


def _topology() -> list[str]:
    try:
        text = nvidia.topology()
    except Exception:
        return []
    return [line.rstrip() for line in text.partition("Legend")[0].splitlines() if line.strip()]


def cpu_name() -> str:
    """Model of the CPU; its architecture where Linux does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(names, platform.machine())
    except OSError:
        return platform.machine()
