"""What every fabric gives to plans: a rank, a symmetric heap, and where peers' heaps are seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.fabric.side_stream import SideStream
from taxfree_kernels.fabric.workspace import Workspace

if TYPE_CHECKING:
    from types import TracebackType

    from taxfree_kernels.fabric.barrier import DeviceBarrier
    from taxfree_kernels.hardware import Hardware


class Fabric(ABC):
    """A group of ranks that load from and store to each other's symmetric heaps.

    Attributes:
        group: the process group, for what goes through the host and for library collectives.
        rank, world_size: in `group`, which may be part of a bigger world.
        device: of this rank's tensors.
        hardware: limits of the device.
        heap: this rank's arena.
        heap_bases: int64 [world_size] on the device: where this rank sees each rank's arena.
        pool: the inboxes that plans share.
        device_barrier: aligns all ranks' streams.
        workspace: scratch memory of the plans.
    """

    name: ClassVar[str]
    backend: ClassVar[str]  # what kernels get as BACKEND: "interpreter", "cuda" or "hip"
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
        """Scratch memory of libraries' own kinds, by kind, that plans share likewise."""
        return {}

    def side_stream(self) -> SideStream:
        """A stream beside the caller's."""
        return SideStream(self.device)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's device is idle."""

    def barrier(self) -> None:
        """Wait until every rank's device is idle."""
        self.synchronize()
        dist.barrier(self.group)

    @abstractmethod
    def close(self) -> None:
        """Give the heap back; collective."""

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
