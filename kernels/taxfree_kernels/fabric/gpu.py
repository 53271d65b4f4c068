"""GPUs of both vendors as fabrics: one process per GPU, one arena, polls as a clock."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from taxfree_kernels.device import peers, sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.errors import FabricUnavailable
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import SymmetricHeap
from taxfree_kernels.hardware import Hardware

#: torch's variable that lets ranks share a GPU. They take turns of milliseconds: fit for tests of
#: protocols, all of which a machine with one GPU can then run; unfit for any timing.
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_POLLS = 20_000  # some 15 ms


class GpuFabric(Fabric):
    """Ranks as GPUs that are linked directly.

    Args:
        group: a process group with NCCL or RCCL; None for the default group.
        heap_bytes: size of each rank's arena.

    Raises:
        FabricUnavailable: two ranks on one GPU, and ``SHARING`` is not set; or no access between
            the GPUs.
    """

    has_graphs = True
    _handle: Any = None  # of torch's symmetric memory, where the heaps are in it

    def __init__(self, group: dist.ProcessGroup | None, heap_bytes: int) -> None:
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = current_device()
        self.hardware = self.hardware_of(self.device)
        self._refuse_shared_gpus()
        self._arena, bases = self._map_arenas(heap_bytes)
        self.heap = SymmetricHeap(self._arena)
        self.heap_bases = torch.tensor(bases, dtype=torch.int64, device=self.device)
        self._polls_per_second = _polls_per_second(self)

    @staticmethod
    @abstractmethod
    def hardware_of(device: torch.device) -> Hardware:
        """Limits of a GPU."""

    def _refuse_shared_gpus(self) -> None:
        uuids: list[str] = [""] * self.world_size
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        dist.all_gather_object(uuids, uuid, self.group)
        if len(set(uuids)) < self.world_size and os.environ.get(SHARING) != "1":
            raise FabricUnavailable(
                "two ranks share one GPU",
                f"set the device of each rank before taxfree.init; for tests alone, {SHARING}=1",
            )

    def _map_arenas(self, heap_bytes: int) -> tuple[torch.Tensor, list[int]]:
        """This rank's arena, and the address of each rank's arena on this rank."""
        if self.world_size == 1:  # nothing to exchange, and torch refuses a group of one
            arena = torch.zeros(heap_bytes, dtype=torch.uint8, device=self.device)
            return arena, [arena.data_ptr()]
        import torch.distributed._symmetric_memory as symm_mem

        try:
            arena = symm_mem.empty(heap_bytes, dtype=torch.uint8, device=self.device)
            self._handle = symm_mem.rendezvous(arena, self.group.group_name)
        except RuntimeError as error:
            raise FabricUnavailable(
                f"torch symmetric memory failed: {str(error).splitlines()[0]}",
                "are all GPUs in one NVLink or XGMI domain, with peer access?",
            ) from error
        return arena, [int(base) for base in self._handle.buffer_ptrs]

    def _arena_of(self, peer: int) -> torch.Tensor:
        if self._handle is None:
            return super()._arena_of(peer)
        arena: torch.Tensor = self._handle.get_buffer(peer, self._arena.shape, torch.uint8)
        return arena

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def ticks(self, seconds: float) -> int:
        return int(seconds * self._polls_per_second)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def current_device() -> torch.device:
    """The current GPU of this process."""
    return torch.device("cuda", torch.cuda.current_device())


@triton.jit
def _wait_for_nobody(control_ptr, heap_bases, GROUP: tl.constexpr):
    sync.wait(Peers(control_ptr, heap_bases, 0, 1), 0, 0, GROUP)


def _polls_per_second(fabric: Fabric) -> float:
    """Polls of one waiting program in a second: it times out on a word of its own."""
    report = fabric.host_words(peers.REPORT_WORDS)
    block = torch.zeros(peers.SIGNALS.value + 1, dtype=torch.int64, device=fabric.device)
    block[peers.LIMIT.value] = _POLLS
    block[peers.STATUS.value] = report.data_ptr()
    bases = block.new_tensor([block.data_ptr()])
    group = Group(1, fabric.backend)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _wait_for_nobody[(1,)](block, bases, GROUP=group)  # compiles, and raises the clocks
    block[peers.ABORT.value] = 0
    begin.record()
    _wait_for_nobody[(1,)](block, bases, GROUP=group)
    end.record()
    torch.cuda.synchronize(fabric.device)
    return _POLLS / (begin.elapsed_time(end) * 1e-3)
