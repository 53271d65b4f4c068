"""The notice shown before kernels are interpreted on the host fabric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from taxfree.problems import format_problem
from taxfree_cli.output import note, warn
from taxfree_kernels.variant import op_of

_FLOPS_PER_S = 4e8  # of an interpreted matmul, on the cores of a laptop
_LONG_S = 5.0
_DEMO = "--shapes demo"


def announce(
    problems: Sequence[Any], repeated: str = "a candidate several calls", small: str = _DEMO
) -> None:
    """Say that times are not those of a GPU, and how long the largest problem takes.

    Args:
        repeated: how often it is called.
        small: options that take less time.
    """
    note("host fabric: times are of interpreted kernels on a CPU, not of a GPU, and not compared")
    largest = max(problems, key=lambda problem: problem.cost.flops)
    seconds = largest.cost.flops / _FLOPS_PER_S
    if seconds > _LONG_S:
        minutes = f"{seconds / 60:.0f} minutes" if seconds < 86400 else "more than a day"
        times = f"{seconds:.0f} s" if seconds < 120 else minutes
        shape = format_problem(op_of(largest), asdict(largest))
        warn(f"an interpreted call of {shape} takes about {times}, {repeated}; {small} is small")
