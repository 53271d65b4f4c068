"""Sizes of partial sums and of their inboxes."""

from __future__ import annotations

from typing import Any

from taxfree_kernels.errors import PlanError

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def require_matmul(problem: Any) -> None:
    """Raise :class:`PlanError` when a partial matmul cannot have a problem's dimensions."""
    for name in ("m", "n", "k", "world_size"):
        value = getattr(problem, name)
        if value < 1:
            raise PlanError(f"{name} is {value}, must be at least 1")
    if problem.dtype not in ("float16", "bfloat16"):
        raise PlanError(f"dtype {problem.dtype} is not one of float16, bfloat16")
    if problem.weight_layout not in ("nk", "kn"):
        raise PlanError(f"weight_layout is {problem.weight_layout!r}, must be 'nk' or 'kn'")


def padded_columns(n: int) -> int:
    """Columns of a row in an inbox: a multiple of 16, so that each row starts at 16 bytes."""
    return -(-n // 16) * 16


def padded_elements(m: int, n: int) -> int:
    """Elements of an inbox for [m, n]: a multiple of 256 bytes in any type."""
    return -(-m * padded_columns(n) // 128) * 128


def tiles_of(m: int, n: int, block_m: int, block_n: int) -> int:
    """Tiles that [m, n] is in, those at its ends as large as the others."""
    return -(-m // block_m) * -(-n // block_n)
