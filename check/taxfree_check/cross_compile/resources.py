"""The share of a compute unit that a kernel takes, and whether that is too much."""

from __future__ import annotations

from dataclasses import dataclass

from taxfree_kernels.hardware import Hardware

_SM_REGISTERS, _SM_WARPS, _SM_PROGRAMS, _SM_RESERVED = 65536, 64, 32, 1024
_CU_SIMDS, _SIMD_REGISTERS, _SIMD_WAVES, _CU_PROGRAMS = 4, 512, 8, 16


@dataclass(frozen=True)
class Resources:
    """Resources of one program.

    Args:
        registers: per thread; on CDNA vector registers with accumulators.
        spill_bytes: per thread, in memory.
        shared_memory: bytes (LDS).
        programs_per_unit: how many fit a compute unit at once; 0: not even one.
        seconds: that compiling took; next to nothing when it was in Triton's cache.
    """

    registers: int
    spill_bytes: int
    shared_memory: int
    programs_per_unit: int
    seconds: float = 0.0


def programs_per_unit(hardware: Hardware, registers: int, shared: int, warps: int) -> int:
    """The number of programs of a kernel that an SM or CU holds at once."""
    if shared > hardware.shared_memory:
        return 0
    if hardware.backend == "cuda":
        per_thread = -(-max(registers, 1) // 8) * 8
        by_shared = (hardware.shared_memory + _SM_RESERVED) // (shared + _SM_RESERVED)
        by_registers = _SM_REGISTERS // (per_thread * 32 * warps)
        return min(by_shared, by_registers, _SM_WARPS // warps, _SM_PROGRAMS)
    waves = min(_SIMD_REGISTERS // (-(-max(registers, 1) // 8) * 8), _SIMD_WAVES)
    by_shared = hardware.shared_memory // shared if shared else _CU_PROGRAMS
    return min(by_shared, waves * _CU_SIMDS // warps, _CU_PROGRAMS)


def illegal_reason(resources: Resources, hardware: Hardware, spill_limit: int) -> str | None:
    """Why a kernel is not worth launching, or None."""
    if resources.shared_memory > hardware.shared_memory:
        return (
            f"{resources.shared_memory} bytes of shared memory, {hardware.shared_memory} are there"
        )
    if resources.spill_bytes > spill_limit:
        return f"spills {resources.spill_bytes} bytes a thread"
    if resources.programs_per_unit == 0:
        return f"{resources.registers} registers a thread do not fit a compute unit"
    return None
