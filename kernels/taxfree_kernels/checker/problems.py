"""Tiny problems of each operation that, together, execute every synchronising line.

They are ragged where that matters: shards without rows, more than one tile either way, K that is no
multiple of a block.
"""

from __future__ import annotations

from typing import Any

from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import problem_class

WORLD_SIZES = (2, 3)


def tiny_problems(op: str, world_size: int) -> list[Any]:
    """The problems that a check of `op` runs on when none are given.

    Raises:
        PlanError: none are known.
    """
    make = problem_class(op)
    if op not in _FIELDS:
        raise PlanError(f"no problems to check {op} on are known", "give some with --shapes")
    return [make(world_size=world_size, **fields) for fields in _FIELDS[op](world_size)]


def _all_gather_matmul(world_size: int) -> list[dict[str, Any]]:
    smallest: list[dict[str, Any]] = [
        {"m": 5, "n": 32, "k": 16 * world_size, "gather_dim": 1, "bias": True},
        {"m": 4, "n": 32, "k": 32, "gather_dim": 0},  # with 3 ranks, the last has no rows
    ]
    if world_size > 2:
        every_chunk_has_rows = {"m": 4 * world_size - 1, "n": 32, "k": 16, "gather_dim": 0}
        return [*smallest, every_chunk_has_rows]
    return [
        *smallest,
        {"m": 17, "n": 32, "k": 24 * world_size, "gather_dim": 1},
        # tiles of 16 rows that share exactly one row with the peer's shard, their last or first
        {"m": 29, "n": 32, "k": 32, "gather_dim": 0},
        {"m": 17, "n": 40, "k": 32, "gather_dim": 0, "dtype": "bfloat16", "weight_layout": "kn"},
        {"m": 31, "n": 32, "k": 32, "gather_dim": 0},  # each rank's rows are whole tiles
    ]


def _matmul_all_reduce(world_size: int) -> list[dict[str, Any]]:
    smallest: dict[str, Any] = {"m": 3, "n": 48, "k": 40, "bias": True, "residual": True}
    # rows that share a tile, and of which one is in two chunks
    normalised = {"m": 3, "n": 48, "k": 40, "residual": True, "rms_norm": True}
    if world_size > 2:
        # as many as copy engines fetch, and not more than Lamport words in one shot are for
        rows_for_each = {"m": min(4 * world_size + 1, 32), "n": 16}
        return [smallest | rows_for_each, normalised]
    return [
        smallest,
        normalised,
        {"m": 1, "n": 16, "k": 16, "dtype": "bfloat16"},  # too few elements for two chunks
        {"m": 17, "n": 96, "k": 32, "weight_layout": "kn"},
    ]


def _matmul_reduce_scatter(world_size: int) -> list[dict[str, Any]]:
    smallest: list[dict[str, Any]] = [
        {"m": 4, "n": 48, "k": 40, "dtype": "bfloat16"},  # with 3 ranks, the last has no rows
        {"m": 33, "n": 16 * world_size, "k": 16, "scatter_dim": 1},
    ]
    if world_size > 2:
        each_has_rows = {"m": 3 * world_size - 1, "n": 24, "k": 16}
        return [*smallest, each_has_rows]
    # a tile of rows that two shards share
    return [*smallest, {"m": 39, "n": 24, "k": 32, "weight_layout": "kn"}]


def _flash_decode(world_size: int) -> list[dict[str, Any]]:
    small = {"batch": 1, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 20}
    if world_size > 2:
        return [small | {"q_heads": 2}]
    # chunks of 3 rows share tiles of the output; splits are dealt out to sequences by their lengths
    paged = {"batch": 2, "page_size": 3, "window": 25, "dtype": "bfloat16"}
    return [small | {"q_heads": 3}, small | paged | {"q_heads": 3}]


_FIELDS = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "flash_decode": _flash_decode,
}
