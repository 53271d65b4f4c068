"""Finds races, deadlocks and wrong scopes in kernels that run on several GPUs, on a CPU.

::

    from taxfree.check import World

    def test_my_all_reduce():
        with World(ranks=4, seeds=100) as world:
            x = world.empty((1024,), torch.bfloat16)  # symmetric: one on each rank
            flags = world.zeros((64,), torch.int32)
            world.run(lambda rank: my_kernel[(8,)](x.local(rank), x.bases, flags.bases, rank, 4))

Importing this module also makes ``iris`` and ``triton_dist`` importable where they are not
installed. ``docs/check.md`` says what is found, and how to read a report.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("greenlet") is None:
    raise ImportError("taxfree.check needs greenlet: pip install 'taxfree[check]'")

from taxfree_check.checker import Checked, CheckFailed, Reason, Symmetric, Violation, World
from taxfree_check.checker.conventions import stand_in

if TYPE_CHECKING:
    from taxfree_check.executed.world import ExecutedWorld

stand_in()

__all__ = ["CheckFailed", "Checked", "ExecutedWorld", "Reason", "Symmetric", "Violation", "World"]


def __getattr__(name: str) -> Any:
    """The class that compiles, and needs Numba."""
    if name != "ExecutedWorld":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from taxfree_check.executed.world import ExecutedWorld

    return ExecutedWorld
