"""A fabric whose ranks are GPUs that this process executes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taxfree_kernels.cross_compile.record import NoGroup
from taxfree_kernels.executed.caches import Memory
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.fabric.layout import ALIGNMENT
from taxfree_kernels.hardware import Hardware

_SPARE = 1 << 15  # bytes of an arena for control words and alignment


class ExecutedFabric(Fabric):
    """One rank.

    Args:
        rank: in the group.
        arenas: of all ranks, in the executor's memory.
        memory: the executor's.
        hardware: the GPU that plans believe to be on.
        slot_bytes: of a payload slot of the pool.
        patience: polls until a wait gives up.
    """

    name = "executed"
    has_graphs = False
    backend = "hip"

    def __init__(
        self,
        rank: int,
        arenas: Sequence[torch.Tensor],
        memory: Memory,
        hardware: Hardware,
        slot_bytes: int,
        patience: int,
    ) -> None:
        self.rank, self.world_size = rank, len(arenas)
        self.device, self.hardware = torch.device("cpu"), hardware
        self._arenas, self._memory, self._patience = arenas, memory, patience
        self.heap = SymmetricHeap(arenas[rank])
        self.heap_bases = memory.empty(len(arenas), torch.int64)
        self.heap_bases.copy_(torch.tensor([arena.data_ptr() for arena in arenas]))
        slot = _aligned(slot_bytes)
        self.pool = Pool(self, slot, 2 * slot, 4 * slot)

    @property
    def group(self) -> Any:
        raise NoGroup("the collective library is not executed")

    def _arena_of(self, peer: int) -> torch.Tensor:
        return self._arenas[peer]

    def host_words(self, count: int) -> torch.Tensor:
        return self._memory.empty(count, torch.int64).zero_()

    def ticks(self, seconds: float) -> int:
        return self._patience

    def synchronize(self) -> None:
        """Kernels have ended when their launch returns."""

    def barrier(self) -> None:
        """Pools are reset before anything runs."""


def arena_bytes(world_size: int, slot_bytes: int) -> int:
    """What a rank's arena needs."""
    return 18 * _aligned(slot_bytes) + 8 * Pool.CHANNELS * world_size + _SPARE


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
