"""Records the launches of a plan without a device.

A plan is made on a :class:`GhostFabric`, whose tensors have shapes and no memory, and run on such
inputs, without peers that it could connect; its launches go to a list instead of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from taxfree_check.groupless import GrouplessFabric, NoGroup
from taxfree_kernels import variant as registry
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap, arena_bytes
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, launching_through
from taxfree_kernels.meta import META, meta_tensors
from taxfree_kernels.variant import Config, Problem


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments of one call."""

    kernel: Kernel
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.function.fn.__name__).lstrip("_")


def flat(args: Iterable[Any]) -> Iterator[Any]:
    """The arguments in order, with the elements of tuples in place of these."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from flat(arg)
        else:
            yield arg


class GhostFabric(GrouplessFabric):
    """One rank of a group that does not exist.

    Args:
        world_size: ranks of the group.
        hardware: the device that plans are made for.
        heap_bytes: of the arena. AMD's compiler asks whether a tensor's memory ends below 2 GiB, so
            this should be what the real fabric will have.
    """

    name = "ghost"
    has_graphs = True

    def __init__(self, world_size: int, hardware: Hardware, heap_bytes: int) -> None:
        self.backend = hardware.backend
        self.rank, self.world_size = 0, world_size
        self.device, self.hardware = META, hardware
        self._arena = torch.empty(heap_bytes, dtype=torch.uint8, device=META)
        self.heap = SymmetricHeap(self._arena)
        self.heap_bases = torch.empty(world_size, dtype=torch.int64, device=META)
        self.pool = Pool(self)

    def _arena_of(self, peer: int) -> torch.Tensor:
        return self._arena

    def ticks(self, seconds: float) -> int:
        return 1


def record(
    op: str,
    variant: str,
    problem: Problem,
    config: Config,
    hardware: Hardware,
    heap_bytes: int | None = None,
) -> list[Launch]:
    """The launches of one call of a variant, in order; empty when it is all library calls.

    Raises:
        PlanError: the variant refuses.
    """
    if heap_bytes is None:
        heap_bytes = arena_bytes(problem.slot_bytes)
    ghost = GhostFabric(problem.world_size, hardware, heap_bytes)
    try:
        plan = registry.variants(op)[variant].plan(problem, ghost, config)
    except NoGroup:
        return []
    launches: list[Launch] = []
    with launching_through(lambda kernel, args: launches.append(Launch(kernel, args))):
        plan.run(*meta_tensors(problem, ghost.rank, hardware.architecture))
    return launches
