"""Conventions of the field, simulated: how kernels and hosts reach the memory of their peers.

Modules that are not installed here, and that need GPUs where they are, have stand-ins with the same
names and signatures: :mod:`.iris`, :mod:`.triton_dist`. PyTorch's symmetric memory is patched while
a world's ``with`` block runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from taxfree_check.checker.conventions import symm_mem
from taxfree_check.checker.ranks import Ranks


@contextlib.contextmanager
def installed(world: Ranks) -> Iterator[None]:
    """Within the context, hosts find a world's symmetric memory through PyTorch's functions."""
    with symm_mem.patched(world):
        yield


def stand_in() -> None:
    """Make modules that are not installed importable, by their stand-ins; idempotent."""
    if "iris" not in sys.modules and importlib.util.find_spec("iris") is None:
        from taxfree_check.checker.conventions import iris

        # in which modules others find its functions and classes: of today, and before
        for name in ("", ".mem", ".mem.triton", ".mem.triton.ops", ".mem.triton.context"):
            sys.modules[f"iris{name}"] = iris
    if "triton_dist" not in sys.modules and importlib.util.find_spec("triton_dist") is None:
        from taxfree_check.checker.conventions import triton_dist

        sys.modules.update(triton_dist.modules())
