"""Compile a recorded launch for a GPU that is not here, exactly as Triton's launcher would there."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from taxfree_kernels.compiled.record import Launch
from taxfree_kernels.hardware import Hardware


def target_of(hardware: Hardware) -> GPUTarget:
    """Triton's name of a device."""
    if hardware.backend == "cuda":
        return GPUTarget("cuda", int(hardware.architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", hardware.architecture, hardware.warp_size)


class _AbsentDevice:
    """Stands in for Triton's driver: names the target, and can launch nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return repr(self._target)  # Triton keeps one table of compiled kernels per device

    def get_current_stream(self, device: Any) -> int:
        return 0


def jit(launch: Launch, hardware: Hardware):
    triton.runtime.driver.set_active(_AbsentDevice(target_of(hardware)))
    kernel = launch.kernel
    return kernel.function.warmup(
        *launch.args, grid=(kernel.grid,), **kernel.constants, **kernel.options
    )
