"""What the fused variants share on the host: their knobs, what cannot run, what kernels are given."""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, Plan, Space, Variant

_NEXT_POWER_OF_2 = [1 << i for i in range(32)]


def _round_up(value: int, least: int) -> int:
    return max(least, next(power for power in _NEXT_POWER_OF_2 if power >= value))


def _tile_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """How tiles are computed, for the device's own limits."""
    waits = (problem.world_size, 1)
    if hardware.backend == "interpreter":  # its time goes by the number of operations, not by size
        return {
            "BLOCK_M": (16, 32), "BLOCK_N": (32, 64), "BLOCK_K": (32, 64), "GROUP_M": (1, 4),
            "SPLIT_K": (1, 2), "SWAP_AB": (False, True), "SOURCES_PER_WAIT": waits,
        }  # fmt: skip
    space: dict[str, tuple[Any, ...]] = {
        "BLOCK_M": tuple(size for size in (16, 32, 64, 128, 256) if size <= _round_up(problem.m, 16)),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": (32, 64, 128, 256),
        "GROUP_M": (1, 4, 8),
        "SPLIT_K": (1, 2, 3, 4, 8),
        "SWAP_AB": (False, True),
        "SOURCES_PER_WAIT": waits,
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5, 6),
    }
    if hardware.backend == "hip":
        space |= {"waves_per_eu": (0, 1, 2), "matrix_instr_nonkdim": (16, 32)}
    return space


def _send_space(problem: AllGatherMatmul, hardware: Hardware) -> Space:
    """How the shard is sent."""
    if hardware.backend == "interpreter":
        return {"CHUNKS": (1, 2), "SEND_BLOCK": (1024,)}
    chunks = tuple(count for count in (1, 2, 4, 8, 16) if count <= problem.shard_rows)
    return {"CHUNKS": chunks, "SEND_BLOCK": (2048, 4096, 8192)}


def _first_configs(
    problem: AllGatherMatmul, hardware: Hardware, space: Space
) -> list[dict[str, Any]]:
    """Configs that won on like shapes, cut down to `space`; the first is the default."""
    rows = _round_up(problem.m, 16)
    if hardware.backend == "interpreter":
        guesses = [{"BLOCK_M": min(rows, 32), "BLOCK_N": 64, "BLOCK_K": 64, "CHUNKS": 1}]
    elif rows <= 64:
        skinny = {"BLOCK_M": rows, "BLOCK_N": 64, "GROUP_M": 1, "SWAP_AB": True, "num_warps": 4}
        guesses = [
            skinny | {"BLOCK_K": 128, "SPLIT_K": 2, "num_stages": 5, "CHUNKS": 1},
            skinny | {"BLOCK_K": 128, "SPLIT_K": 2, "num_stages": 4, "CHUNKS": 4},
            skinny | {"BLOCK_K": 128, "SPLIT_K": 1, "num_stages": 6, "CHUNKS": 1},
            skinny | {"BLOCK_K": 64, "SPLIT_K": 4, "num_stages": 6, "CHUNKS": 2},
        ]
    else:
        wide = {"GROUP_M": 8, "SWAP_AB": False, "BLOCK_K": 64, "SOURCES_PER_WAIT": 1}
        guesses = [
            wide | {"BLOCK_M": 128, "BLOCK_N": 128, "SPLIT_K": 1, "num_warps": 8, "num_stages": 4,
                    "CHUNKS": 8},
            wide | {"BLOCK_M": 128, "BLOCK_N": 256, "SPLIT_K": 1, "num_warps": 8, "num_stages": 3,
                    "CHUNKS": 16},
            wide | {"BLOCK_M": 64, "BLOCK_N": 128, "SPLIT_K": 2, "num_warps": 4, "num_stages": 4,
                    "CHUNKS": 4},
            wide | {"BLOCK_M": 128, "BLOCK_N": 64, "SPLIT_K": 2, "num_warps": 4, "num_stages": 4,
                    "CHUNKS": 8},
        ]  # fmt: skip
    return [_within(space, guess) for guess in guesses]


def _within(space: Space, guess: dict[str, Any]) -> dict[str, Any]:
    """`guess` with each value moved to the nearest that `space` offers; the rest at its first."""
    config = {}
    for knob, values in space.items():
        wanted = guess.get(knob, values[0])
        config[knob] = wanted if wanted in values else min(values, key=lambda v: abs(v - wanted))
    return config


def _refuses(problem: AllGatherMatmul, hardware: Hardware, config: Config) -> str | None:
    """Why a config is not worth compiling, or None."""
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    steps = problem.k // block_k
    if config["SPLIT_K"] > max(1, steps):
        return f"SPLIT_K {config['SPLIT_K']} leaves splits without a step of k"
    if config.get("CHUNKS", 1) > problem.shard_rows:
        return f"CHUNKS {config['CHUNKS']} is more than the {problem.shard_rows} rows of a shard"
    if block_k > _round_up(problem.shard_columns, 16):
        return f"BLOCK_K {block_k} is wider than a shard's {problem.shard_columns} columns"
    if hardware.backend == "interpreter":
        return None
    if block_m > _round_up(problem.m, 16):
        return f"BLOCK_M {block_m} is more than twice the {problem.m} rows"
    stages = config["num_stages"] if hardware.backend == "cuda" else config["num_stages"] - 1
    shared = stages * (block_m + block_n) * block_k * 2
    if shared > hardware.shared_memory:
        return f"{shared} bytes of shared memory, {hardware.shared_memory} are there"
    threads = config["num_warps"] * hardware.warp_size
    if block_m * block_n > 160 * threads:
        return f"accumulators of {block_m * block_n // threads} registers a thread"
    if config["SWAP_AB"] and block_m > 64:
        return "SWAP_AB is for few rows"
    if config["SPLIT_K"] > 1 and problem.m * problem.n > 1 << 22:
        return "SPLIT_K is for outputs that leave compute units idle"
    return None


class FusedVariant(Variant):
    """A variant whose tiles are computed by ``gathered_tile``."""

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        return "one rank has no peers" if problem.world_size == 1 else None

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {**_tile_space(problem, hardware), **_send_space(problem, hardware)}

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        return _first_configs(problem, hardware, self.space(problem, hardware))

    def refuses_config(self, problem: Any, hardware: Hardware, config: Config) -> str | None:
        return _refuses(problem, hardware, config)


class FusedPlan(Plan):
    """One launch whose last programs compute tiles.

    Args:
        function: the kernel; its arguments are those of ``_push`` and ``_pull``.
        first_programs: programs of the launch before the tiles'.
        constants: of the kernel, beside those of the tiles.
    """

    def __init__(
        self,
        problem: AllGatherMatmul,
        fabric: Fabric,
        config: Config,
        function: Any,
        first_programs: int,
        constants: Config,
    ) -> None:
        dtype = getattr(torch, problem.dtype)
        split_k = config["SPLIT_K"]
        tiles = -(-problem.m // config["BLOCK_M"]) * -(-problem.n // config["BLOCK_N"])
        partials = split_k * problem.m * problem.n if split_k > 1 else 1
        inbox, slot_elements = fabric.pool.slots(problem.gathered_elements, dtype)
        self._own_rows = problem.rows_of(fabric.rank)
        self._fixed_args = (
            inbox,
            slot_elements,
            fabric.pool.control,
            torch.empty(partials, dtype=torch.float32, device=fabric.device),
            torch.zeros(tiles, dtype=torch.int32, device=fabric.device),
            fabric.heap_bases,
            fabric.rank,
            problem.m,
            problem.n,
            problem.k,
            problem.shard_rows,
            problem.shard_columns,
        )
        knobs = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SPLIT_K", "SWAP_AB")
        self._kernel = Kernel(
            function,
            grid=first_programs + tiles * split_k,
            constants={knob: config[knob] for knob in knobs}
            | {
                "WORLD": problem.world_size,
                "BACKEND": fabric.backend,
                "GATHER_DIM": problem.gather_dim,
                "HAS_BIAS": problem.bias,
                "CHUNKS": config["CHUNKS"],
                "SOURCES_PER_WAIT": config["SOURCES_PER_WAIT"],
                "EVEN_K": problem.shard_columns % config["BLOCK_K"] == 0,
            }
            | dict(constants),
            options=compile_options(fabric.backend, config),
        )

    def __call__(
        self, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        self._kernel(
            a, self._own_rows, weight, weight.stride(0), weight.stride(1),
            out if bias is None else bias, out, *self._fixed_args,
        )  # fmt: skip
        return out


def compile_options(backend: str, config: Config) -> dict[str, Any]:
    """What Triton is told beside the constants; fusing of multiply and add is always explicit."""
    if backend == "interpreter":
        return {}
    names = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
    return {name: config[name] for name in names if name in config} | {"enable_fp_fusion": True}
