"""The CPU as a fabric: kernels interpreted, one process per rank, heaps in shared memory.

Slow and complete: it runs every kernel as it is, so that the whole product can be tried and
tested without a GPU. Arenas are anonymous memory files that peers map through /proc, so nothing
is left behind however a process ends.
"""

from __future__ import annotations

import atexit
import mmap
import os

import torch
import torch.distributed as dist

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import SymmetricHeap
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.interpreter import correct_types, hasten, is_interpreting


def unsupported_reason() -> str | None:
    """Why this fabric cannot serve in this process, or None."""
    if not hasattr(os, "memfd_create"):
        return "anonymous shared memory (memfd) needs Linux"
    if not is_interpreting():
        return "kernels are not interpreted: TRITON_INTERPRET=1 must be set before they are loaded"
    return None


class HostFabric(Fabric):
    """Ranks as processes of one machine.

    Args:
        group: a process group whose backend serves CPU tensors; None for the default group.
        heap_bytes: size of each rank's arena.
    """

    name = "host"
    backend = "interpreter"
    has_graphs = False

    def __init__(self, group: dist.ProcessGroup | None, heap_bytes: int) -> None:
        correct_types()
        hasten()
        atexit.unregister(_destroy_groups)
        atexit.register(_destroy_groups, os.getpid())
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device("cpu")
        self.hardware = KNOWN["cpu"]
        self._arenas = self._map_arenas(heap_bytes)
        self.heap = SymmetricHeap(self._arenas[self.rank])
        self.heap_bases = torch.tensor([arena.data_ptr() for arena in self._arenas])

    def _map_arenas(self, heap_bytes: int) -> list[torch.Tensor]:
        own_file = os.memfd_create("taxfree-heap")
        os.ftruncate(own_file, heap_bytes)
        paths: list[str] = [""] * self.world_size
        dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{own_file}", self.group)
        arenas = []
        for path in paths:
            file = os.open(path, os.O_RDWR)
            arenas.append(torch.frombuffer(mmap.mmap(file, heap_bytes), dtype=torch.uint8))
            os.close(file)
        dist.barrier(self.group)  # every peer has opened this rank's file
        os.close(own_file)
        return arenas

    def _arena_of(self, peer: int) -> torch.Tensor:
        return self._arenas[peer]

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def ticks(self, seconds: float) -> int:
        return int(seconds * 1e6)  # interpreted waits count microseconds

    def synchronize(self) -> None:
        """Interpreted kernels have ended when their launch returns."""


def _destroy_groups(process: int) -> None:
    """Destroy the process groups of this process when it ends, if nobody has.

    A thread of gloo needs the interpreter to free a collective's tensors, which aborts the process
    once the interpreter has begun to end. Destroying the groups waits for these threads. A fork has
    none of them, and would wait forever.
    """
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()
