"""Other processes and slow clocks on the ranks' GPUs, which spoil measurements.

A power cap does not count: it is how a GPU runs under load, and candidates are timed in turn under
the same one. NVIDIA only; a driver that does not answer tells nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection

import torch

from taxfree._runtime.collectives import vote
from taxfree_kernels.fabric.base import Fabric
from taxfree_tune.drivers import nvidia

SPOILING = ("hardware slowdown", "heat (software)", "heat (hardware)", "power brake")
_MOST_IDLE_PERCENT = 5.0
_QUIET_S = 2.0  # the driver averages utilization over up to a second


class DisturbanceWatch:
    """Watches the GPUs of all ranks from construction until `reasons`; both are collective."""

    def __init__(self, fabric: Fabric) -> None:
        self._group, self._uuid = fabric.group, _uuid(fabric.device)
        everyone = vote(self._group, (self._uuid, os.getpid()))
        self._own = [pid for uuid, pid in everyone if uuid == self._uuid]
        self._found = [busy_reason(self._uuid)] if self._uuid and _is_quiet() else []

    def reasons(self) -> str:
        """Why measurements since construction cannot be trusted, on any rank; empty if they can."""
        worked()
        if self._uuid:
            self._found += _reasons_now(self._uuid, self._own)
        reasons = [
            reason
            for reasons_of_rank in vote(self._group, self._found)
            for reason in reasons_of_rank
            if reason
        ]
        return "; ".join(dict.fromkeys(reasons))


_last_work = -_QUIET_S


def worked() -> None:
    """Note that this process has used its GPU until now."""
    global _last_work
    _last_work = time.monotonic()


def _is_quiet() -> bool:
    """Whether all use that the driver still sees is somebody else's."""
    return time.monotonic() - _last_work >= _QUIET_S


def _uuid(device: torch.device) -> str:
    """The name by which NVIDIA's driver knows a device; empty for others."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def busy_reason(uuid: str) -> str:
    """Reason that a GPU is in use, where this process has used none for a while, or empty."""
    try:
        percent = nvidia.utilization(uuid)
        index = nvidia.gpus(uuid)[0].index
    except Exception:
        return ""
    if percent is None or percent <= _MOST_IDLE_PERCENT:
        return ""
    return f"GPU {index} is in use by {percent:.0f} %"


def _reasons_now(uuid: str, own_pids: Collection[int]) -> list[str]:
    """Reasons that other processes are on a GPU, or that it has lowered its clocks.

    Processes are counted, because in a container the driver may give other process ids than ours. A
    power cap is no reason. The driver's tool starts for each question: it is asked two.

    Args:
        own_pids: ids of the ranks on this GPU.
    """
    try:
        (gpu,) = nvidia.gpus(uuid)
        there = nvidia.processes(uuid)
    except Exception:
        return []
    reasons = []
    if len(there) > len(own_pids):
        others = [
            f"{process.name} ({process.pid})" for process in there if process.pid not in own_pids
        ]
        reasons.append(f"GPU {gpu.index} is shared with {', '.join(others[:3])}")
    slow = [reason for reason in gpu.slowed_by if reason in SPOILING]
    if slow:
        reasons.append(f"GPU {gpu.index} is slowed by {', '.join(slow)}")
    return reasons
