"""The interface of fabrics: a rank, its symmetric heap, and the addresses of its peers' heaps."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from taxfree_kernels.cache_keys import find_constants_of_callees_first
from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.fabric.side_stream import SideStream
from taxfree_kernels.fabric.workspace import Workspace

if TYPE_CHECKING:
    from taxfree_kernels.fabric.barrier import DeviceBarrier
    from taxfree_kernels.hardware import Hardware

find_constants_of_callees_first()  # before any kernel is compiled


class NoGroup(PlanError):
    """A plan calls the collective library on a fabric without a process group."""


class Fabric(ABC):
    """A group of ranks that load from and store to each other's symmetric heaps.

    Attributes:
        group: the process group, for exchanges between hosts and for library collectives.
        rank, world_size: in `group`, which may be part of a bigger world.
        device: of this rank's tensors.
        hardware: limits of the device.
        heap: this rank's arena.
        heap_bases: int64 [world_size] on the device: addresses of each rank's arena on this rank.
        pool: the inboxes that plans share.
        device_barrier: aligns all ranks' streams.
        workspace: scratch memory of the plans.
        static_weights: whether the caller promises what :func:`taxfree.init` says; plans that are
            made afterwards may load weights before the preceding kernel has ended.
        static_cache: whether the caller promises what :func:`taxfree.init` says; plans that are
            made afterwards may load keys before the preceding kernel has ended.
    """

    name: ClassVar[str]
    backend: ClassVar[str]  # the kernels' BACKEND: "interpreter", "cuda" or "hip"
    has_graphs: ClassVar[bool]

    group: dist.ProcessGroup
    rank: int
    world_size: int
    device: torch.device
    hardware: Hardware
    heap: SymmetricHeap
    heap_bases: torch.Tensor
    pool: Pool
    device_barrier: DeviceBarrier
    static_weights: bool = False
    static_cache: bool = False

    _is_closed = False

    @abstractmethod
    def host_words(self, count: int) -> torch.Tensor:
        """int64 [count] in host memory that this rank's kernels can write; zeros."""

    @abstractmethod
    def ticks(self, seconds: float) -> int:
        """The bound of a wait in the unit in which this fabric's kernels count it."""

    def peer_view(self, block: torch.Tensor, peer: int) -> torch.Tensor:
        """`peer`'s copy of a block of the heap, for torch's own operations on this rank's device.

        Raises:
            PlanError: the fabric shows peers' heaps to kernels only.
        """
        begin = self.heap.offset_of(block)
        view = self._arena_of(peer)[begin : begin + block.nbytes]
        return view.view(block.dtype).view(block.shape)

    def _arena_of(self, peer: int) -> torch.Tensor:
        raise PlanError(f"fabric {self.name} shows peers' memory to kernels only")

    @cached_property
    def workspace(self) -> Workspace:
        return Workspace(self.device)

    @cached_property
    def library_memory(self) -> dict[str, Workspace]:
        """Scratch memory of libraries, by kind, that plans share as well."""
        return {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory of all kinds."""
        return sum(each.nbytes for each in (self.workspace, *self.library_memory.values()))

    def keep_memory(self) -> None:
        """Keep the present scratch memory: a captured graph holds its addresses."""
        for each in (self.workspace, *self.library_memory.values()):
            each.capture()

    def side_stream(self) -> SideStream:
        """A stream beside the caller's."""
        return SideStream(self.device)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's device is idle."""

    def barrier(self) -> None:
        """Wait until every rank's device is idle."""
        self.synchronize()
        self._meet(self.group)

    def _meet(self, group: dist.ProcessGroup) -> None:
        """A barrier of the hosts; NCCL is told its device, which it else warns of guessing."""
        is_nccl = "nccl" in dist.get_backend_config(group)
        dist.barrier(group, device_ids=[self.device.index] if is_nccl else None)

    def close(self) -> None:
        """Free everything once no peer uses it; collective. A second call does nothing.

        If the group has been destroyed, ranks cannot agree, and this is :meth:`release`.
        """
        if self._is_closed:
            return
        group = self.group
        if group not in dist.distributed_c10d._world.pg_map:
            self.release()
            return
        try:
            self.barrier()
        finally:
            self.release()
        self._meet(group)  # a driver frees memory once no peer maps it

    def release(self) -> None:
        """Free this rank's memory and group without its peers; rank and device stay readable.

        Peers keep their own views of the memory. The group's threads end with the last reference to
        it; a thread that outlives the interpreter would abort the process.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.synchronize()
        finally:
            kept = ("_is_closed", "rank", "world_size", "device", "hardware")
            self.__dict__ = {name: self.__dict__[name] for name in kept}
            gc.collect()  # interpreted launches leave cycles, which hold their arguments

    def __enter__(self) -> Fabric:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GrouplessFabric(Fabric):
    """One rank of a group that is simulated, executed or absent: this process is alone."""

    @property
    def group(self) -> Any:
        raise NoGroup(f"fabric {self.name} has no process group")

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def synchronize(self) -> None:
        """Nothing runs on a device."""

    def barrier(self) -> None:
        """There is no other process."""

    def close(self) -> None:
        """The memory goes with its tensors."""
