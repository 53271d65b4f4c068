"""Compile a recorded launch for a GPU that is not here, exactly as Triton's launcher would there.

The launcher itself does it: only the driver, which it asks for the target, is replaced. So the
specialisation of the arguments, the options and the key of Triton's cache are those of a real
launch, and what is compiled here is found in the cache there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import tempfile
import time
from functools import lru_cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.record import Launch
from taxfree_check.cross_compile.resources import Resources, programs_per_unit
from taxfree_kernels.hardware import Hardware


def target_of(hardware: Hardware) -> GPUTarget:
    """Triton's name of a device."""
    if hardware.backend == "cuda":
        return GPUTarget("cuda", int(hardware.architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", hardware.architecture, hardware.warp_size)


class AbsentDevice:
    """Stands in for Triton's driver: names the target, and can launch nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return repr(self._target)  # Triton keeps one table of compiled kernels per device

    def get_current_stream(self, device: Any) -> int:
        return 0


def warm_up(launch: Launch, hardware: Hardware) -> Any:
    """Triton's binary of a recorded launch; raises whatever the compiler raises.

    Triton's driver of this process is replaced: for processes that do nothing else.
    """
    triton.runtime.driver.set_active(AbsentDevice(target_of(hardware)))
    kernel = launch.kernel
    names = [parameter.name for parameter in kernel.function.params if not parameter.is_constexpr]
    named = dict(zip(names, launch.args, strict=False))  # constants may stand between them
    options = {"enable_fp_fusion": True, **kernel.options}  # the default, of which 3.9 warns
    return kernel.function.warmup(grid=(kernel.grid,), **named, **kernel.constants, **options)


def compile_launch(launch: Launch, hardware: Hardware, to_run: bool = False) -> CompiledKernel:
    """Compile one recorded launch, as :func:`warm_up` does.

    Args:
        to_run: also build what a process needs to launch it, into Triton's cache.
    """
    begin = time.monotonic()
    binary = warm_up(launch, hardware)
    if to_run:
        _build_launcher(binary, hardware)
    resources = _resources(binary, hardware, time.monotonic() - begin)
    return CompiledKernel(
        text=binary.asm["ptx" if hardware.backend == "cuda" else "amdgcn"],
        # Gluon has no TTIR, whose types have no layouts
        ttir=binary.asm.get("ttir") or re.sub(r", #\w+>", ">", binary.asm["ttgir"]),
        ttgir=binary.asm["ttgir"],
        num_warps=binary.metadata.num_warps,
        num_stages=binary.metadata.num_stages,
        resources=resources,
        name=launch.name,
        cache_key=binary.hash,
        launched_early=launch.kernel.options.get("launch_pdl", False),
        static=launch.kernel.static,
        programs=launch.kernel.grid,
        resident_programs=hardware.compute_units * resources.programs_per_unit,
        is_cooperative=getattr(binary.metadata, "launch_cooperative_grid", False),
    )


def _build_launcher(binary: Any, hardware: Hardware) -> None:
    """Build the module of C by which Triton 3.6 launches kernels of a signature; later ones none.

    It takes half a second, which ranks would spend one kernel after the other.
    """
    vendor, launcher = (
        ("nvidia", "CudaLauncher") if hardware.backend == "cuda" else ("amd", "HIPLauncher")
    )
    driver = importlib.import_module(f"triton.backends.{vendor}.driver")
    if hasattr(driver, "make_launcher"):
        with contextlib.suppress(Exception):  # the ranks' own attempt says why
            getattr(driver, launcher)(binary.src, binary.metadata)


@lru_cache(64)  # kernels of several problems or steps are the same
def matrix_remarks(text: str) -> list[str]:
    """Remarks of ptxas about matrix instructions (wgmma) that it serialises.

    It does so, without an error, where anything else may have written their accumulators on any
    path; the loop over K then takes up to a quarter longer.

    Args:
        text: PTX or amdgcn.
    """
    target = re.search(r"^\.target (sm_(\d+)\w*)", text, re.MULTILINE)
    if target is None or "wgmma.mma_async" not in text:
        return []
    from triton.backends.nvidia.compiler import get_ptxas  # Triton of ROCm may be without

    ptxas = get_ptxas(int(target[2])).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        said = subprocess.run(
            [ptxas, "-v", f"--gpu-name={target[1]}", file.name, "-o", os.devnull],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
    return re.findall(r"\(C75\d\d\) (.*)", said)


def _resources(binary: Any, hardware: Hardware, seconds: float) -> Resources:
    if hardware.backend == "cuda":
        registers, spill_bytes = _sm_usage(binary.asm["cubin"])
    else:
        registers, spill_bytes = _cdna_usage(binary.asm["amdgcn"])
    shared, warps = int(binary.metadata.shared), int(binary.metadata.num_warps)
    return Resources(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_memory=shared,
        programs_per_unit=programs_per_unit(hardware, registers, shared, warps),
        seconds=round(seconds, 2),
    )


def _sm_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread; these kernels have nothing but spills on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    return _number(r"REG:(\d+)", report), _number(r"STACK:(\d+)", report)


def _cdna_usage(text: str) -> tuple[int, int]:
    """Vector registers, with accumulators, and bytes of spills a lane."""
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", text)
    scratch = _number(r"\.private_segment_fixed_size:\s*(\d+)", text)
    return _number(r"\.vgpr_count:\s*(\d+)", text), max(4 * spilled, scratch)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0
