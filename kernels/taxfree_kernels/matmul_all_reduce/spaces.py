"""Limits of programs that hold bias and residual, or a row for RMSNorm, in registers."""

from __future__ import annotations

from typing import Any

from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.spaces import power_of_2
from taxfree_kernels.variant import Config

_MOST_OF_A_ROW = 1 << 14  # elements
_MOST_A_THREAD = 64  # float32 elements: a quarter of its registers


def fits_addends(
    problem: MatmulAllReduce, hardware: Hardware, config: Config, pieces: int = 1
) -> bool:
    """Whether a program that adds one of `pieces` of a tile can also hold bias and residual.

    With RMSNorm, programs add rows instead.
    """
    has_addends = (problem.bias or problem.residual) and not problem.rms_norm
    if hardware.backend != "cuda" or not has_addends:
        return True
    threads = pieces * config["num_warps"] * hardware.warp_size
    return int(config["BLOCK_M"] * config["BLOCK_N"]) <= _MOST_A_THREAD * threads


def rows_unsupported_reason(problem: MatmulAllReduce) -> str | None:
    """The reason why no program can hold a row for RMSNorm, or None."""
    if problem.rms_norm and problem.n > _MOST_OF_A_ROW:
        return f"one program normalises a row, of {_MOST_OF_A_ROW} elements at most"
    return None


def warps_illegal_reason(
    problem: MatmulAllReduce, hardware: Hardware, config: Config
) -> str | None:
    """The reason why a config's programs cannot hold a row for RMSNorm, or None."""
    if not problem.rms_norm or hardware.backend == "interpreter":
        return None
    lanes, threads = power_of_2(problem.n, 1), config["num_warps"] * hardware.warp_size
    if lanes > _MOST_A_THREAD * threads:
        return f"{lanes // threads} elements of a row a thread"
    return None


def with_room_for_rows(
    problem: MatmulAllReduce, hardware: Hardware, config: Config
) -> dict[str, Any]:
    """`config` with enough warps to hold a row for RMSNorm."""
    if warps_illegal_reason(problem, hardware, config) is None:
        return dict(config)
    lanes = power_of_2(problem.n, 1)
    return {**config, "num_warps": lanes // (_MOST_A_THREAD * hardware.warp_size)}
