"""Named sets of shapes."""

from __future__ import annotations

from collections.abc import Sequence

from taxfree.problems import require_operation
from taxfree_kernels.variant import operation_shapes

_LISTED_WORLD_SIZES = (1, 2, 4, 8)


def named_sets(op: str) -> dict[str, list[str]]:
    """Return the named sets of an operation, each as the shapes it stands for.

    Raises:
        UsageError: there is no such operation.
    """
    require_operation(op)
    fixed = {name: list(shapes) for name, shapes in operation_shapes(op).sets.items()}
    return fixed | scaling_sets(op, _LISTED_WORLD_SIZES)


def scaling_sets(op: str, world_sizes: Sequence[int]) -> dict[str, list[str]]:
    """The named sets that depend on the number of ranks, for each of `world_sizes`."""
    return {
        name: [f"{shape} world_size={ranks}" for ranks in world_sizes for shape in of_ranks(ranks)]
        for name, of_ranks in operation_shapes(op).scaling.items()
    }
