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

import torch

from taxfree_check.checker.conventions import symm_mem
from taxfree_check.checker.ranks import Ranks

#: in which modules others find the functions and classes of the stand-in: of today, and before
_OF_IRIS = (
    "", ".mem", ".mem.triton", ".mem.triton.ops", ".mem.triton.context", ".mem.triton.types", ".x",
    ".host.tracing", ".host.tracing.events", ".host.tracing.kernel_artifacts",
)  # fmt: skip


@contextlib.contextmanager
def installed(world: Ranks) -> Iterator[None]:
    """Within the context, hosts find a world's symmetric memory through PyTorch's functions."""
    with symm_mem.patched(world):
        yield


def stand_in() -> None:
    """Make modules that are not installed importable, by their stand-ins; idempotent.

    Iris, which imports a GPU's libraries, has a stand-in wherever there is no GPU. What the
    stand-in has no module for, such as ``iris.ops``, is imported from where Iris is installed.
    """
    if "iris" not in sys.modules:
        spec = importlib.util.find_spec("iris")
        if spec is None or not torch.cuda.is_available():
            from taxfree_check.checker.conventions import iris

            iris.__path__ = [] if spec is None else [*(spec.submodule_search_locations or ())]
            for name in _OF_IRIS:
                sys.modules[f"iris{name}"] = iris
    if "triton_dist" not in sys.modules and importlib.util.find_spec("triton_dist") is None:
        from taxfree_check.checker.conventions import triton_dist

        sys.modules.update(triton_dist.modules())
