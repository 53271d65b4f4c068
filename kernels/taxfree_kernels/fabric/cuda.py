"""NVIDIA GPUs as a fabric: one process per GPU, heaps in torch's symmetric memory."""

from __future__ import annotations

import torch
import triton

from taxfree_kernels.fabric.gpu import GpuFabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.interpreter import is_interpreting


def unsupported_reason() -> str | None:
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


class CudaFabric(GpuFabric):
    """Ranks as the GPUs of one NVLink domain."""

    name = "cuda"
    backend = "cuda"

    @staticmethod
    def hardware_of(device: torch.device) -> Hardware:
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
