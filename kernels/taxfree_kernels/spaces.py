"""Small helpers for the search spaces of all operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.problem import Sharded
from taxfree_kernels.variant import Config, Problem, Space


def power_of_2(value: int, least: int) -> int:
    """The smallest power of two that is not below `value`, nor below `least`, itself one."""
    return max(least, 1 << (value - 1).bit_length())


def up_to(limit: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """The values that are not above `limit`; the first where none is."""
    return tuple(value for value in values if value <= limit) or values[:1]


def nearest_first(values: tuple[int, ...], wanted: int) -> tuple[int, ...]:
    """Of ascending `values` the nearest to `wanted`, then the next larger, the next smaller."""
    at = min(range(len(values)), key=lambda index: abs(values[index] - wanted))
    return (values[at], *values[at + 1 : at + 2], *values[max(0, at - 1) : at])


def within(space: Space, guess: Config) -> dict[str, Any]:
    """`guess`, each value moved to the nearest in `space`; others have their first value."""
    config = {}
    for knob, values in space.items():
        wanted = guess.get(knob, values[0])
        config[knob] = wanted if wanted in values else min(values, key=lambda v: abs(v - wanted))
    return config


def cdna_space(hardware: Hardware) -> Space:
    """Meta-parameters of every kernel on CDNA: chiplets to swizzle for, and an occupancy hint."""
    return {
        "XCDS": tuple(dict.fromkeys((hardware.num_xcds, 1))),
        "waves_per_eu": (0, 1, 2),
    }


def pdl_space(hardware: Hardware) -> Space:
    """Whether a kernel is launched before the one before it has ended, on NVIDIA."""
    return {"launch_pdl": (True, False)} if hardware.backend == "cuda" else {}


def allowed(
    problem: Problem,
    hardware: Hardware,
    space: Space,
    guesses: Sequence[Config],
    prune_reason: Callable[[Any, Hardware, Config], str | None],
) -> list[dict[str, Any]]:
    """The guesses that can run; where K is too short to be split, the first one unsplit."""
    configs = distinct([within(space, guess) for guess in guesses])
    found = [config for config in configs if prune_reason(problem, hardware, config) is None]
    return found or [within(space, {**guesses[0], "SPLIT_K": 1})]


def distinct(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Configs without those that come again."""
    found: list[dict[str, Any]] = []
    for config in configs:
        if config not in found:
            found.append(dict(config))
    return found


def accumulators(hardware: Hardware) -> int:
    """The most float32 accumulators a thread can hold besides what else it needs."""
    return 160 * hardware.registers // 255


def tile_prune_reason(
    hardware: Hardware, config: Config, k: int, outputs: int, swappable_rows: int
) -> str | None:
    """Why a matmul's tiles cannot run, or are not worth compiling, or None.

    Args:
        k: of one loop over K, before it is split.
        outputs: elements of the whole result.
        swappable_rows: most rows of a tile whose operands may be swapped.
    """
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if config["SPLIT_K"] > max(1, k // block_k):
        return f"SPLIT_K {config['SPLIT_K']} leaves splits without a step of k"
    if hardware.backend == "interpreter":
        return None
    stages = config["num_stages"] if hardware.backend == "cuda" else config["num_stages"] - 1
    shared = stages * (block_m + block_n) * block_k * 2
    if shared > hardware.shared_memory:
        return f"{shared} bytes of shared memory, {hardware.shared_memory} are there"
    threads = config["num_warps"] * hardware.warp_size
    if block_m * block_n > accumulators(hardware) * threads:
        return f"accumulators of {block_m * block_n // threads} registers a thread"
    if config["SWAP_AB"] and block_m > swappable_rows:
        return "SWAP_AB is for few rows"
    if config["SPLIT_K"] > 1 and outputs > 1 << 22:
        return "SPLIT_K is for outputs that leave compute units idle"
    return None


def copy_space(problem: Sharded, hardware: Hardware) -> Space:
    """In what pieces copy engines move a rank's shard, and what is multiplied at once.

    Args:
        problem: with `shard_rows` of `world_size` ranks.
    """
    most = 2 if hardware.backend == "interpreter" else 4
    copies = most * max(1, problem.world_size - 1)
    return {
        "CHUNKS": up_to(min(most, problem.shard_rows), (1, 2, 4)),
        "CHUNKS_PER_WAIT": up_to(copies, (1, 2, 4, 8)),
        "STREAMS": up_to(copies, (1, 2, 4, 8)),
    }


def first_copies(problem: Sharded, space: Space, rows_at_once: int) -> list[dict[str, Any]]:
    """Configs for copies of a problem's shards; the first is the default.

    The second stream fills the gap between two copies on the first, in which a kernel announces
    the copied data: some 20 us, and more if it has to find room beside a matmul. With one stream
    per peer these gaps overlap, but no peer's first chunk then goes alone.

    Args:
        space: of :func:`copy_space`.
        rows_at_once: below this many rows the vendor's matmul gets slow.
    """
    shards = nearest_first(space["CHUNKS_PER_WAIT"], -(-rows_at_once // problem.shard_rows))
    whole = [{"CHUNKS": 1, "CHUNKS_PER_WAIT": count, "STREAMS": 2} for count in shards]
    if problem.shard_rows < 128:  # takes longer to begin a copy than to move it
        return whole[:1]
    to_each = [count for count in space["STREAMS"] if count >= problem.world_size - 1][:1]
    return [
        whole[0],
        *(whole[0] | {"STREAMS": count} for count in to_each if count > 2),
        *whole[1:2],
        whole[0] | {"STREAMS": 1},
        whole[0] | {"CHUNKS": space["CHUNKS"][-1]},
    ]
