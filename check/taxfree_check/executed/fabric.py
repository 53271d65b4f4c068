"""A fabric whose ranks are GPUs that this process executes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from taxfree_check.executed.caches import DeviceMemory
from taxfree_check.groupless import GrouplessFabric
from taxfree_kernels.device.peers import CHANNELS
from taxfree_kernels.fabric.base import aligned
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.hardware import Hardware

_SPARE = 1 << 15  # bytes of an arena for control words and alignment


class ExecutedFabric(GrouplessFabric):
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
        memory: DeviceMemory,
        hardware: Hardware,
        slot_bytes: int,
        patience: int,
    ) -> None:
        self.rank, self.world_size = rank, len(arenas)
        self.device, self.hardware = torch.device("cpu"), hardware
        self._arenas, self._memory, self._patience = arenas, memory, patience
        self.heap = SymmetricHeap(arenas[rank])
        self.heap_bases = memory.empty(len(arenas), torch.int64, rank)
        self.heap_bases.copy_(torch.tensor([arena.data_ptr() for arena in arenas]))
        slot = aligned(slot_bytes)
        self.pool = Pool(self, slot, 2 * slot, 4 * slot)

    def _arena_of(self, peer: int) -> torch.Tensor:
        return self._arenas[peer]

    def host_words(self, count: int) -> torch.Tensor:
        return self._memory.empty(count, torch.int64).zero_()

    def ticks(self, seconds: float) -> int:
        return self._patience


def arena_bytes(world_size: int, slot_bytes: int) -> int:
    """The interface that a rank's arena needs."""
    return 18 * aligned(slot_bytes) + 8 * CHANNELS * world_size + _SPARE
