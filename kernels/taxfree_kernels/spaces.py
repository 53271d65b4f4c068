"""Helpers for the search spaces of all operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import (
    BLOCK,
    ITEM_BYTES,
    Config,
    MatmulProblem,
    Problem,
    Sharded,
    Space,
)


def power_of_2(value: int, least: int) -> int:
    """The smallest power of two that is at least `value` and `least`; `least` is one itself."""
    return max(least, 1 << (value - 1).bit_length())


def up_to(limit: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """The values up to `limit`; the first value if all are larger."""
    return tuple(value for value in values if value <= limit) or values[:1]


def nearest_first(values: tuple[int, ...], wanted: int) -> tuple[int, ...]:
    """The value nearest to `wanted`, the next larger and the next smaller; `values` ascend."""
    nearest = min(range(len(values)), key=lambda index: abs(values[index] - wanted))
    return (
        values[nearest],
        *values[nearest + 1 : nearest + 2],
        *values[max(0, nearest - 1) : nearest],
    )


def within(space: Space, guess: Config) -> dict[str, Any]:
    """A config of `space`: the values nearest to `guess`, else the first value of a parameter."""
    config = {}
    for name, values in space.items():
        wanted = guess.get(name, values[0])
        config[name] = wanted if wanted in values else min(values, key=lambda v: abs(v - wanted))
    return config


def cdna_space(hardware: Hardware) -> Space:
    """Meta-parameters of every kernel on CDNA: XCDs to swizzle for, and an occupancy hint."""
    return {"XCDS": tuple(dict.fromkeys((hardware.num_xcds, 1))), "waves_per_eu": (0, 1, 2)}


#: GROUP_M: more rows of tiles than any problem has. With XCDS, each chiplet walks down its columns.
ALL_ROWS = 1 << 12


def xcd_signals_space(hardware: Hardware) -> Space:
    """Whether programs signal together with the others of their chiplet, where there are several.

    The interpreter has two chiplets, so that checks and tests run such signals.
    """
    xcds = 2 if hardware.backend == "interpreter" else hardware.num_xcds
    return {"XCD_SIGNALS": (0, xcds)} if xcds > 1 else {}


def xcd_signals_illegal_reason(hardware: Hardware, config: Config, senders: int) -> str | None:
    """The reason why programs need not signal together, or None."""
    xcds = config.get("XCD_SIGNALS", 0)
    if hardware.backend != "interpreter" and xcds and senders <= xcds:
        return f"{senders} programs that signal, on {xcds} chiplets"
    return None


def pdl_space(hardware: Hardware) -> Space:
    """Programmatic dependent launch, on NVIDIA."""
    return {"launch_pdl": (True, False)} if hardware.backend == "cuda" else {}


def allowed(
    problem: Problem,
    hardware: Hardware,
    space: Space,
    guesses: Sequence[Config],
    illegal_reason: Callable[[Any, Hardware, Config], str | None],
) -> list[dict[str, Any]]:
    """The guesses that can run; if none can, the first one with SPLIT_K = 1."""
    configs = distinct([within(space, guess) for guess in guesses])
    legal = [config for config in configs if illegal_reason(problem, hardware, config) is None]
    return legal or [within(space, {**guesses[0], "SPLIT_K": 1})]


def distinct(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Configs without duplicates, in their order."""
    kept: list[dict[str, Any]] = []
    for config in configs:
        if config not in kept:
            kept.append(dict(config))
    return kept


def accumulators(hardware: Hardware) -> int:
    """The most float32 accumulators per thread that leave enough registers for other values."""
    return 160 * hardware.registers // 255


def matmul_space(
    hardware: Hardware, m: int, k: int, group_m: tuple[int, ...], splits: tuple[int, ...],
    others: Space,
) -> Space:  # fmt: skip
    """Meta-parameters of a matmul's tiles, within the device's limits.

    Args:
        k: length of one loop over K, before it is split.
        group_m, splits: values of GROUP_M on a GPU, and of SPLIT_K.
        others: further meta-parameters of the operation's tiles.
    """
    widest_k = power_of_2(k, 16)
    if hardware.backend == "interpreter":  # its time depends on the number of operations
        return {
            "BLOCK_M": (16, 32), "BLOCK_N": (32, 64), "BLOCK_K": up_to(widest_k, (16, 32, 64)),
            "GROUP_M": (1, 4), "SPLIT_K": splits, "SWAP_AB": (False, True), **others,
        }  # fmt: skip
    space: dict[str, tuple[Any, ...]] = {
        "BLOCK_M": up_to(power_of_2(m, 16), (16, 32, 64, 128, 256)),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": up_to(widest_k, (32, 64, 128, 256)),
        "GROUP_M": (*group_m, ALL_ROWS) if hardware.backend == "hip" else group_m,
        "SPLIT_K": splits,
        "SWAP_AB": (False, True),
        **others,
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5, 6),
        **pdl_space(hardware),
    }
    if hardware.backend == "hip":
        space |= {**cdna_space(hardware), "matrix_instr_nonkdim": (16, 32)}
    return space


def tile_illegal_reason(
    hardware: Hardware,
    config: Config,
    k: int,
    outputs: int,
    swappable_rows: int,
    factor_bytes: int = 2,
) -> str | None:
    """The reason why a matmul's tiles cannot run or are certainly slow; None if there is none.

    Args:
        k: length of one loop over K, before it is split.
        outputs: number of elements of the result.
        swappable_rows: largest BLOCK_M with which SWAP_AB is allowed.
        factor_bytes: of an element of either operand.
    """
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if config["SPLIT_K"] > max(1, k // block_k):
        return f"SPLIT_K {config['SPLIT_K']} leaves splits without a step of k"
    if hardware.backend == "interpreter":
        return None
    stages = config["num_stages"] if hardware.backend == "cuda" else config["num_stages"] - 1
    shared = stages * (block_m + block_n) * block_k * factor_bytes
    if shared > hardware.shared_memory:
        return f"{shared} bytes of shared memory, the device has {hardware.shared_memory}"
    threads = config["num_warps"] * hardware.warp_size
    if block_m * block_n > accumulators(hardware) * threads:
        return f"accumulators of {block_m * block_n // threads} registers a thread"
    if config["SWAP_AB"] and block_m > swappable_rows:
        return "SWAP_AB is for few rows"
    if config["SPLIT_K"] > 1 and outputs > 1 << 22:
        return "SPLIT_K is for outputs that leave compute units idle"
    return None


def space_of_fp8(problem: MatmulProblem, space: Space) -> Space:
    """`space`; for fp8 with steps that cross no block, of fewer bytes, so more are in flight."""
    if not problem.is_fp8:
        return space
    most_columns = BLOCK if problem.scales == "block" else max(space["BLOCK_N"])
    changed = {"BLOCK_K": up_to(BLOCK, space["BLOCK_K"])}
    changed["BLOCK_N"] = up_to(most_columns, space["BLOCK_N"])
    if "num_stages" in space:
        changed["num_stages"] = tuple(dict.fromkeys((*space["num_stages"], 8, 10)))
    return {**space, **changed}


def for_fp8(problem: MatmulProblem, guesses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Configs; for fp8 with as many bytes in flight, and room for a step's product."""
    return [_for_fp8(problem, guess) for guess in guesses] if problem.is_fp8 else guesses


def _for_fp8(problem: MatmulProblem, guess: dict[str, Any]) -> dict[str, Any]:
    bytes_of_steps = guess.get("num_stages", 2) * guess["BLOCK_K"] * ITEM_BYTES[problem.dtype]
    stages = max(2, bytes_of_steps // (BLOCK * problem.factor_bytes))
    is_wide = guess["BLOCK_M"] * guess["BLOCK_N"] >= 128 * 128
    return guess | {
        "BLOCK_K": BLOCK,
        "BLOCK_N": min(guess["BLOCK_N"], BLOCK),
        "num_stages": stages,
        "num_warps": 8 if is_wide else guess.get("num_warps", 4),
    }


def fp8_illegal_reason(problem: MatmulProblem, hardware: Hardware, config: Config) -> str | None:
    """The reason why fp8 factors cannot be multiplied so, or not well; None if there is none."""
    if not problem.is_fp8:
        return None
    columns = config["BLOCK_N"] if problem.scales == "block" else 1
    if BLOCK % config["BLOCK_K"] or BLOCK % columns:
        return f"a step crosses blocks of {BLOCK}"
    if hardware.backend == "interpreter":
        return None
    if config["BLOCK_K"] < min(BLOCK, problem.k) and problem.scales == "block":
        return "a block would be scaled in several steps"
    products = 1 if problem.fast_accumulation else 2  # the sum, and the product of a step
    accumulated = products * config["BLOCK_M"] * config["BLOCK_N"]
    threads = config["num_warps"] * hardware.warp_size
    if hardware.backend == "cuda" and accumulated > accumulators(hardware) * threads:
        return f"accumulators of {accumulated // threads} registers a thread"
    return None


def per_copy_space(problem: Sharded) -> tuple[int, ...]:
    """Numbers of copy streams, or of shards at once; more than there are peers are as many."""
    return up_to(4 * max(1, problem.world_size - 1), (1, 2, 4, 8))


def first_streams(problem: Sharded) -> list[int]:
    """Numbers of copy streams, the most promising first.

    Between two copies on a stream, a kernel signals the first one: some 20 us, and more if it has
    to wait for a free SM beside a matmul. A second stream copies during this gap. With one stream
    per peer all gaps overlap, but the first shards of all peers then share the link.
    """
    peers = problem.world_size - 1
    if peers == 1 or problem.shard_rows < 128:  # starting a copy takes longer than moving the data
        return [2]
    to_each = [count for count in per_copy_space(problem) if count >= peers][:1]
    return [2, *(count for count in to_each if count > 2), 1]
