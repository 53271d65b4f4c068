"""Worker groups for measuring problems: one per world size, with a heap for the largest problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from taxfree._runtime.plans import rows_of
from taxfree.fingerprints import rows_field
from taxfree.settings import Settings
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import op_of, resized
from taxfree_tune import devices
from taxfree_tune.measuring.bounds import slot_bytes
from taxfree_tune.workers.group import WorkerGroup

_GPU_DEADLINE_S, _HOST_DEADLINE_S = 600.0, 3600.0  # of a problem


def on_groups(
    problems: Sequence[Any], fabric: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[WorkerGroup, Any]]:
    """Each problem with an open group of workers of its world size.

    Args:
        variables: environment variables of the workers, added to this process's.

    Raises:
        TaskFailed: the fabric cannot be opened.
    """
    for world_size in dict.fromkeys(problem.world_size for problem in problems):
        alike = [problem for problem in problems if problem.world_size == world_size]
        with group_for(alike, fabric, variables) as group:
            for problem in alike:
                yield group, problem


def group_for(
    problems: Sequence[Any], fabric: str, variables: Mapping[str, str] | None = None
) -> WorkerGroup:
    """A group of workers for problems of one world size; arguments and errors as of `on_groups`."""
    timeout_s = Settings.from_environment().timeout_s
    return WorkerGroup(
        problems[0].world_size, fabric, heap_bytes(fabric, problems), timeout_s, variables
    )


def deadline_s(hardware: Hardware) -> float:
    """Seconds after which a task on one problem counts as hung."""
    return _HOST_DEADLINE_S if hardware.backend == "interpreter" else _GPU_DEADLINE_S


def heap_bytes(fabric: str, problems: Sequence[Any]) -> int:
    """Symmetric memory for problems, and for measuring the rates of the fabric.

    A record serves half as many rows as its own, too, and what runs there is planned for all.
    """
    planned = [resized(each, **{rows_field(op_of(each)): 2 * rows_of(each)}) for each in problems]
    return max(devices.heap_bytes(planned), arena_bytes(slot_bytes(fabric)))
