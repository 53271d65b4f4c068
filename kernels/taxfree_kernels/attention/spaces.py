"""The meta-parameters: what is worth trying, what to try first, what cannot run."""

from __future__ import annotations

from typing import Any

from taxfree_kernels.attention.constants import REGISTERS, ROWS
from taxfree_kernels.attention.problem import ITEM_BYTES, Attention
from taxfree_kernels.device.schedules import ATTENTION_MAPPINGS
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.spaces import cdna_space, distinct, power_of_2, up_to, within
from taxfree_kernels.variant import Config, Space


def space(problem: Attention, hardware: Hardware) -> Space:
    """Meta-parameter -> values worth trying."""
    if hardware.backend == "interpreter":
        return {
            "BLOCK_M": (16, 32),
            "BLOCK_N": (16, 32),
            "TMA": (False, True) if problem.is_aligned else (False,),
            "MAPPING": ATTENTION_MAPPINGS,
        }
    has_tma = hardware.architecture == "sm_90" and problem.is_aligned
    found: dict[str, tuple[Any, ...]] = {
        "BLOCK_M": up_to(power_of_2(problem.length, 64), (64, 128, 256)),
        "BLOCK_N": (16, 32, 64, 128),
        "TMA": (True, False) if has_tma else (False,),
        "MAPPING": _mappings(problem, hardware),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    }
    if hardware.backend == "hip":
        found |= cdna_space(hardware)
        found["num_stages"] = (1, 2)
    return found


def _mappings(problem: Attention, hardware: Hardware) -> tuple[str, ...]:
    """Orders of programs; on one chiplet, swizzled ones are the same as naive ones."""
    if hardware.num_xcds > 1:
        return ATTENTION_MAPPINGS
    return tuple(each for each in ATTENTION_MAPPINGS if each.startswith("naive"))


def seed_configs(problem: Attention, hardware: Hardware) -> list[dict[str, Any]]:
    """Configs to try first; the first is the default."""
    values, wide = space(problem, hardware), power_of_2(problem.head_dim, 16)
    mapping = "naive_head_first"
    if hardware.num_xcds > 1:
        mapping = "balanced_head_first" if problem.causal else "swizzled_head_first"
    common = {"MAPPING": mapping, "XCDS": hardware.num_xcds, "waves_per_eu": 0}
    guesses = [within(values, each | common) for each in _tiles(problem, hardware, wide)]
    found = distinct(guesses)
    return [each for each in found if illegal_reason(problem, hardware, each) is None]


def _tiles(problem: Attention, hardware: Hardware, head_dim: int) -> list[dict[str, Any]]:
    def tile(m: int, n: int, warps: int, stages: int, **others: Any) -> dict[str, Any]:
        return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages} | others

    if hardware.backend == "interpreter":
        return [tile(16, 16, 4, 1, TMA=False), tile(32, 16, 4, 1, TMA=True)]
    if hardware.backend == "hip":
        if head_dim > 128:
            return [tile(64, 32, 4, 1), tile(64, 32, 8, 1)]
        return [tile(128, 32, 4, 2), tile(128, 64, 4, 1), tile(64, 64, 4, 1)]
    if not problem.is_aligned:  # loads of 2 bytes, each with an address
        return [tile(128, 32 if head_dim <= 128 else 16, 8, 1), tile(64, 16, 4, 1)]
    if head_dim > 128:
        return [tile(128, 64, 8, 2, TMA=True), tile(64, 32, 4, 2, TMA=True)]
    small, large = tile(64, 64, 4, 3, TMA=True), tile(128, 64, 8, 3, TMA=True)
    if head_dim > 64:
        return [small, large]
    return [tile(128, 64, 4, 3, TMA=True), small, large]


def illegal_reason(problem: Attention, hardware: Hardware, config: Config) -> str | None:
    """Why a config cannot run, or is not worth compiling, or None."""
    if hardware.backend == "interpreter":
        return None
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    head_dim = power_of_2(problem.head_dim, 16)
    stages = config["num_stages"]
    if hardware.backend == "cuda":
        shared = ITEM_BYTES * head_dim * (block_m + 2 * stages * block_n)
    else:
        shared = ITEM_BYTES * head_dim * max(block_m, 2 * (stages - 1) * block_n)
    if shared > hardware.shared_memory:
        return f"{shared} bytes of shared memory, {hardware.shared_memory} are there"
    threads = config["num_warps"] * hardware.warp_size
    # the output's accumulators, the logits, and these again as 16-bit weights
    held = block_m * (2 * head_dim + 3 * block_n) // 2
    most = hardware.registers * 7 // 8
    if held > most * threads:
        return f"an output and logits of {held // threads} registers a thread"
    if hardware.backend == "cuda" and block_m < 16 * config["num_warps"]:
        return "fewer than 16 queries for each warp"
    return None


# -- of warps with roles, on Hopper ------------------------------------------------------------

_OTHER_REGISTERS = 32  # that hold no matrices
_BARRIER_BYTES = 1024


def specialized_space(problem: Attention, hardware: Hardware) -> Space:
    """Meta-parameter -> values worth trying."""
    return {
        "BLOCK_N": (128, 64, 32),
        "CONSUMERS": tuple(REGISTERS),
        "MAPPING": _mappings(problem, hardware),
        "num_stages": (2, 3, 4),
    }


def specialized_seed_configs(problem: Attention, hardware: Hardware) -> list[dict[str, Any]]:
    """Configs to try first; the first is the default."""
    by_head_dim = {64: [(128, 3, 3), (128, 3, 4)], 128: [(128, 2, 2), (64, 3, 4)]}
    tiles = by_head_dim.get(power_of_2(problem.head_dim, 64), [(64, 2, 2)])
    names = ("BLOCK_N", "CONSUMERS", "num_stages")
    return [{"MAPPING": "naive_head_first"} | dict(zip(names, each, strict=True)) for each in tiles]


def specialized_illegal_reason(
    problem: Attention, hardware: Hardware, config: Config
) -> str | None:
    """Why a config cannot run, or is not worth compiling, or None."""
    head_dim, block_n = power_of_2(problem.head_dim, 16), config["BLOCK_N"]
    rows = config["CONSUMERS"] * ROWS + 2 * config["num_stages"] * block_n
    shared = ITEM_BYTES * head_dim * rows
    if shared > hardware.shared_memory - _BARRIER_BYTES:
        return f"{shared} bytes of shared memory, {hardware.shared_memory} are there"
    # of a row's four threads: the output, the logits, and these again as 16-bit weights
    held = (head_dim + block_n + block_n // 2) // 2
    if held > REGISTERS[config["CONSUMERS"]] - _OTHER_REGISTERS:
        return f"an output and logits of {held} registers a thread"
    return None
