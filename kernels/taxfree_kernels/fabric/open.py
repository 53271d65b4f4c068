"""Choosing a fabric by probing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from taxfree_kernels.errors import FabricUnavailable
from taxfree_kernels.fabric import cuda, host, rocm
from taxfree_kernels.fabric.gpu import current_device
from taxfree_kernels.fabric.heap import DeviceBarrier, Pool
from taxfree_kernels.hardware import KNOWN, Hardware

if TYPE_CHECKING:
    import torch.distributed as dist

    from taxfree_kernels.fabric.base import Fabric

_PROVIDERS = {
    "cuda": (cuda.CudaFabric, cuda.unsupported_reason),
    "rocm": (rocm.RocmFabric, rocm.unsupported_reason),
    "host": (host.HostFabric, host.unsupported_reason),
}


def probe() -> dict[str, str | None]:
    """Fabric name -> why it cannot serve in this process, or None."""
    return {name: unsupported_reason() for name, (_, unsupported_reason) in _PROVIDERS.items()}


def choose(name: str = "auto") -> str:
    """The name of the fabric to open on this machine.

    ``auto`` is the GPU fabric if there is a GPU, even one that cannot serve, else ``host``.

    Raises:
        FabricUnavailable: it cannot serve; the message says why.
    """
    if name == "auto":
        gpus = "rocm" if torch.version.hip else "cuda"
        name = gpus if torch.cuda.is_available() else "host"
    if name not in _PROVIDERS:
        raise FabricUnavailable(
            f"unknown fabric {name!r}", f"one of: auto, {', '.join(_PROVIDERS)}"
        )
    reason = _PROVIDERS[name][1]()
    if reason is not None:
        raise FabricUnavailable(f"fabric {name}: {reason}", "see `taxfree doctor`")
    return name


def hardware_here() -> Hardware:
    """Limits of the device that a rank of this process has.

    Raises:
        FabricUnavailable: as of :func:`choose`.
    """
    name = choose()
    if name == "host":
        return KNOWN["cpu"]
    provider = {"cuda": cuda.CudaFabric, "rocm": rocm.RocmFabric}[name]
    return provider.hardware_of(current_device())


def open_fabric(
    name: str, group: dist.ProcessGroup | None, heap_bytes: int, timeout_s: float = 30.0
) -> Fabric:
    """Open a fabric with one pool on an initialised process group; collective.

    Args:
        name: "auto", "host", "cuda" or "rocm".
        group: the ranks; None for the default group.
        heap_bytes: of each rank's arena.
        timeout_s: bound of a wait in kernels, in seconds.

    Raises:
        FabricUnavailable: it cannot serve; the message says why.
        HeapExhausted: the arena does not even hold the control words.
    """
    # What is made here outlives the caller's inference mode, and is not on its default device.
    with torch.inference_mode(False), torch.device("cpu"):
        fabric: Fabric = _PROVIDERS[choose(name)][0](group, heap_bytes)
        try:
            fabric.device_barrier = DeviceBarrier(fabric, timeout_s)
            fabric.pool = Pool(fabric, timeout_s=timeout_s)
        except BaseException:
            fabric.release()
            raise
    return fabric
