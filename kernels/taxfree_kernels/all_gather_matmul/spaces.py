"""The knobs of the fused variants: what is worth trying, what to try first, what cannot run."""

from __future__ import annotations

from typing import Any

from taxfree_kernels.all_gather_matmul.problem import ITEM_BYTES, AllGatherMatmul
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, Space

_NEXT_POWER_OF_2 = [1 << i for i in range(32)]


def _round_up(value: int, least: int) -> int:
    return max(least, next(power for power in _NEXT_POWER_OF_2 if power >= value))


def _up_to(limit: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """The values that are not above `limit`; the smallest where all are."""
    return tuple(value for value in values if value <= limit) or values[:1]


def tile_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """How tiles are computed, for the device's own limits."""
    waits = (problem.world_size, 1)
    widest_k = _round_up(problem.shard_columns, 16)
    if hardware.backend == "interpreter":  # its time goes by the number of operations, not by size
        return {
            "BLOCK_M": (16, 32), "BLOCK_N": (32, 64), "BLOCK_K": _up_to(widest_k, (16, 32, 64)),
            "GROUP_M": (1, 4), "SPLIT_K": (1, 2, 4, 8), "SWAP_AB": (False, True),
            "SOURCES_PER_WAIT": waits,
        }  # fmt: skip
    space: dict[str, tuple[Any, ...]] = {
        "BLOCK_M": _up_to(_round_up(problem.m, 16), (16, 32, 64, 128, 256)),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": _up_to(widest_k, (32, 64, 128, 256)),
        "GROUP_M": (1, 4, 8),
        "SPLIT_K": (1, 2, 3, 4, 8),
        "SWAP_AB": (False, True),
        "SOURCES_PER_WAIT": waits,
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5, 6),
    }
    if hardware.backend == "cuda" and problem.weight_layout == "nk":
        space |= {"PREFETCH": (False, True)}  # of weights, before the wait
    if hardware.backend == "hip":
        space |= {"waves_per_eu": (0, 1, 2), "matrix_instr_nonkdim": (16, 32)}
    return space


def send_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """How the shard is sent."""
    if hardware.backend == "interpreter":
        return {"CHUNKS": _up_to(problem.shard_rows, (1, 2)), "SEND_BLOCK": (1024,)}
    chunks = _up_to(problem.shard_rows, (1, 2, 4, 8, 16, 32, 64))
    return {"CHUNKS": chunks, "SEND_BLOCK": (2048, 4096, 8192)}


def first_configs(
    problem: AllGatherMatmul, hardware: Hardware, space: Space
) -> list[dict[str, Any]]:
    """Configs that won on like shapes, cut down to `space`; the first is the default."""
    rows = _round_up(problem.m, 16)
    if hardware.backend == "interpreter":
        guesses = [{"BLOCK_M": min(rows, 32), "BLOCK_N": 64, "BLOCK_K": 64, "CHUNKS": 1}]
    elif problem.shard_columns % 8:  # rows are not aligned: nothing is loaded 16 bytes at a time
        guesses = [{"BLOCK_M": min(rows, 64), "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 8}]
    elif hardware.backend == "hip":
        guesses = _first_on_cdna(rows)
    else:
        guesses = _first_on_hopper(rows, sending_chunks(problem))
    configs = [_within(space, guess) for guess in guesses]
    return [config for config in configs if refuses(problem, hardware, config) is None]


def sending_chunks(problem: AllGatherMatmul) -> int:
    """Chunks of some 32 KiB: what one sender program moves in a few microseconds."""
    shard_bytes = problem.shard_rows * problem.shard_columns * ITEM_BYTES[problem.dtype]
    return max(1, min(64, shard_bytes >> 15))


def _first_on_hopper(rows: int, chunks: int) -> list[dict[str, Any]]:
    if rows <= 64:
        skinny = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "SWAP_AB": True,
                  "num_warps": 4, "SEND_BLOCK": 8192}  # fmt: skip
        return [
            skinny | {"SPLIT_K": 4, "num_stages": 5, "CHUNKS": 2 * chunks},
            skinny | {"SPLIT_K": 4, "num_stages": 5, "CHUNKS": 2 * chunks, "PREFETCH": True},
            skinny | {"SPLIT_K": 4, "num_stages": 3, "CHUNKS": 4 * chunks},
            skinny | {"SPLIT_K": 4, "num_stages": 3, "CHUNKS": 2 * chunks, "PREFETCH": True},
            skinny | {"SPLIT_K": 2, "num_stages": 5, "CHUNKS": 4 * chunks, "PREFETCH": True},
        ]
    wide = {"GROUP_M": 8, "BLOCK_K": 64, "CHUNKS": chunks}
    eight = wide | {"BLOCK_M": 128, "SPLIT_K": 1, "num_warps": 8}
    four = wide | {"SPLIT_K": 2, "num_warps": 4, "num_stages": 4}
    return [
        eight | {"BLOCK_N": 128, "num_stages": 4},
        eight | {"BLOCK_N": 256, "num_stages": 3},
        four | {"BLOCK_M": 64, "BLOCK_N": 128},
        four | {"BLOCK_M": 128, "BLOCK_N": 64},
    ]


def _first_on_cdna(rows: int) -> list[dict[str, Any]]:
    """From the field's experience on MI300X: two stages, and 64 of K where tiles are wide."""
    common = {"BLOCK_K": 64, "num_stages": 2, "matrix_instr_nonkdim": 16}
    if rows <= 64:
        skinny = common | {"BLOCK_M": rows, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4}
        return [
            skinny | {"BLOCK_N": 64, "SPLIT_K": 4, "CHUNKS": 1},
            skinny | {"BLOCK_N": 32, "SPLIT_K": 2, "CHUNKS": 4},
        ]
    wide = common | {"BLOCK_M": 128, "SOURCES_PER_WAIT": 1, "num_warps": 8}
    return [
        wide | {"BLOCK_N": 256, "GROUP_M": 8, "CHUNKS": 8},
        wide | {"BLOCK_N": 128, "GROUP_M": 4, "CHUNKS": 4},
        wide | {"BLOCK_M": 256, "BLOCK_N": 256, "GROUP_M": 8, "CHUNKS": 16},
    ]


def _within(space: Space, guess: dict[str, Any]) -> dict[str, Any]:
    """`guess` with each value moved to the nearest that `space` offers; the rest at its first."""
    config = {}
    for knob, values in space.items():
        wanted = guess.get(knob, values[0])
        config[knob] = wanted if wanted in values else min(values, key=lambda v: abs(v - wanted))
    return config


def refuses(problem: AllGatherMatmul, hardware: Hardware, config: Config) -> str | None:
    """Why a config is not worth compiling, or None."""
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    steps = problem.k // block_k
    if config["SPLIT_K"] > max(1, steps):
        return f"SPLIT_K {config['SPLIT_K']} leaves splits without a step of k"
    if hardware.backend == "interpreter":
        return None
    stages = config["num_stages"] if hardware.backend == "cuda" else config["num_stages"] - 1
    shared = stages * (block_m + block_n) * block_k * 2
    if shared > hardware.shared_memory:
        return f"{shared} bytes of shared memory, {hardware.shared_memory} are there"
    threads = config["num_warps"] * hardware.warp_size
    if block_m * block_n > 160 * threads:
        return f"accumulators of {block_m * block_n // threads} registers a thread"
    if config["SWAP_AB"] and block_m > 64:
        return "SWAP_AB is for few rows"
    if config.get("PREFETCH") and problem.shard_columns % block_k:
        return "PREFETCH takes whole steps of k"
    if config["SPLIT_K"] > 1 and problem.m * problem.n > 1 << 22:
        return "SPLIT_K is for outputs that leave compute units idle"
    return None
