"""Device limits that search spaces and the compile screen use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One GPU model, or the CPU.

    Args:
        name: as the driver prints it.
        backend: "cuda", "hip" or "interpreter".
        architecture: the compiler's name: "sm_90", "gfx942", ...; "cpu" for the interpreter.
        compute_units: SMs or CUs.
        warp_size: threads per warp or wavefront.
        shared_memory: bytes of shared memory (LDS) a program may use.
        registers: 32-bit registers a thread may use.
        memory_bytes: of the device.
        num_xcds: chiplets to which programs are assigned round-robin.
        nodes: on which the ranks are.
    """

    name: str
    backend: str
    architecture: str
    compute_units: int
    warp_size: int
    shared_memory: int
    registers: int
    memory_bytes: int
    num_xcds: int = 1
    nodes: int = 1


def fp8_of(architecture: str) -> str:
    """The e4m3 that an architecture multiplies, as torch names it."""
    return "float8_e4m3fnuz" if architecture == "gfx942" else "float8_e4m3fn"


GIB = 1 << 30
KNOWN = {
    "h100": Hardware("NVIDIA H100 80GB HBM3", "cuda", "sm_90", 132, 32, 227 * 1024, 255, 80 * GIB),
    "h200": Hardware("NVIDIA H200", "cuda", "sm_90", 132, 32, 227 * 1024, 255, 141 * GIB),
    "mi300x": Hardware(
        "AMD Instinct MI300X", "hip", "gfx942", 304, 64, 64 * 1024, 512, 192 * GIB, 8
    ),
    "mi325x": Hardware(
        "AMD Instinct MI325X", "hip", "gfx942", 304, 64, 64 * 1024, 512, 256 * GIB, 8
    ),
    "mi350x": Hardware(
        "AMD Instinct MI350X", "hip", "gfx950", 256, 64, 160 * 1024, 512, 288 * GIB, 8
    ),
    "cpu": Hardware("CPU", "interpreter", "cpu", 1, 1, 1 << 30, 1 << 20, 16 * GIB),
}
