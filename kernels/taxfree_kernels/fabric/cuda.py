"""NVIDIA GPUs as a fabric: one process per GPU, heaps in torch's symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton

from taxfree_kernels.device.calibrate import polls_per_second
from taxfree_kernels.errors import FabricUnavailable
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.heap import SymmetricHeap
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.interpreter import is_interpreting


def unavailable() -> str | None:
    """Why this fabric cannot serve in this process, or None."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability()[0] < 9:
        return f"{torch.cuda.get_device_name()} is older than Hopper"
    if is_interpreting():
        return "kernels are interpreted: TRITON_INTERPRET is set"
    return None


class CudaFabric(Fabric):
    """Ranks as the GPUs of one NVLink domain.

    Args:
        group: a process group with NCCL for CUDA tensors; None for the default group.
        heap_bytes: size of each rank's arena.

    Raises:
        FabricUnavailable: no such GPU, two ranks on one GPU, or no access between them.
    """

    name = "cuda"
    backend = "cuda"
    has_graphs = True

    def __init__(self, group: dist.ProcessGroup | None, heap_bytes: int) -> None:
        reason = unavailable()
        if reason is not None:
            raise FabricUnavailable(f"fabric cuda: {reason}", "see `taxfree doctor`")
        self.group = group if group is not None else dist.distributed_c10d._get_default_group()
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.hardware = _hardware(self.device)
        self._refuse_shared_gpus()
        self._arena, bases = self._rendezvous(heap_bytes)
        self.heap = SymmetricHeap(self._arena)
        self.heap_bases = torch.tensor(bases, dtype=torch.int64, device=self.device)
        self._polls_per_second = polls_per_second(self)

    def _refuse_shared_gpus(self) -> None:
        uuids: list[str] = [""] * self.world_size
        own = str(torch.cuda.get_device_properties(self.device).uuid)
        dist.all_gather_object(uuids, own, self.group)
        if len(set(uuids)) < self.world_size:
            raise FabricUnavailable(
                "two ranks share one GPU", "set the device of each rank before taxfree.init"
            )

    def _rendezvous(self, heap_bytes: int) -> tuple[torch.Tensor, list[int]]:
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
                "are all GPUs in one NVLink domain, with peer access?",
            ) from error
        return arena, [int(base) for base in self._handle.buffer_ptrs]

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def ticks(self, seconds: float) -> int:
        return int(seconds * self._polls_per_second)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.barrier()


def _hardware(device: torch.device) -> Hardware:
    properties = torch.cuda.get_device_properties(device)
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Hardware(
        name=properties.name,
        backend="cuda",
        architecture=f"sm_{properties.major}{properties.minor}",
        compute_units=properties.multi_processor_count,
        warp_size=limits.get("warpSize", 32),
        shared_memory=limits["max_shared_mem"],
        registers=255,
        memory_bytes=properties.total_memory,
    )
