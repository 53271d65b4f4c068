"""Devices of this machine, as the controller sees them; on NVIDIA, without initialising a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taxfree.errors import HardwareError, UsageError
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.drivers import amd, nvidia
from taxfree_tune.shapes import DEFAULT_SET, INTERPRETED_SET
from taxfree_tune.workers.launch import LaunchedProcess, too_many

_HOST_RANKS = 2
_MOST_HOST_RANKS = 64  # processes that interpret, each with a torch of its own


def available_gpus() -> int:
    """GPUs that torch can see; asks the driver, and initialises none."""
    import torch

    return torch.cuda.device_count()


def fabric_for(name: str) -> str:
    """The fabric that ``auto`` stands for on this machine, or `name` itself.

    Raises:
        HardwareError: a GPU fabric is asked for, and there is no GPU; or the machine has GPUs, and
            torch cannot use them.
    """
    import torch

    if name == "auto":
        if not available_gpus():
            _require_no_driver()
            return "host"
        return "rocm" if torch.version.hip else "cuda"
    if name != "host" and not available_gpus():
        raise HardwareError(
            f"fabric {name}: torch {torch.__version__} sees no GPU",
            "--fabric host interprets the kernels on the CPU; see `taxfree doctor`",
        )
    return name


def _require_no_driver() -> None:
    """Refuse to interpret kernels on a machine with GPUs whose owner did not ask for it.

    Raises:
        HardwareError: a driver is loaded.
    """
    import torch

    drivers = {"NVIDIA": nvidia.DRIVER, "AMD": amd.DRIVER}
    for vendor, driver in drivers.items():
        if driver.exists():
            raise HardwareError(
                f"there is a driver of {vendor}, but torch {torch.__version__} sees no GPU",
                "see `taxfree doctor`; --fabric host interprets the kernels on the CPU",
            )


def world_sizes(fabric: str) -> tuple[int, ...]:
    """World sizes where none is asked for.

    The ranks that a launcher started on this node, else all GPUs, or two ranks on the host.
    """
    launched = LaunchedProcess.from_environment().local_ranks
    if launched > 1:
        return (launched,)
    return (_HOST_RANKS,) if fabric == "host" else (available_gpus(),)


def most_ranks(fabric: str) -> int:
    """Largest world size: GPUs, or as many ranks as the host fabric may have.

    No more than a launcher has started on this node, if it has started several.
    """
    count = _MOST_HOST_RANKS if fabric == "host" else available_gpus()
    launched = LaunchedProcess.from_environment().local_ranks
    return count if launched == 1 else min(count, launched)


def default_shapes(fabric: str) -> str:
    """The named set of a command that was given none, where nothing is tuned yet."""
    return INTERPRETED_SET if fabric == "host" else DEFAULT_SET


def require(fabric: str, ranks: int) -> None:
    """Check that every rank has a device of its own.

    Raises:
        HardwareError: there are fewer GPUs than ranks.
        UsageError: a launcher has started fewer ranks.
    """
    launch, count = LaunchedProcess.from_environment(), most_ranks(fabric)
    if ranks <= count:
        return
    if fabric != "host" and count < min(ranks, launch.local_ranks):
        raise HardwareError(
            f"{ranks} GPUs are asked for, and a rank sees {count}",
            "each rank must see all GPUs of its node: srun --gpus-per-node, not --gpus-per-task",
        )
    if launch != LaunchedProcess():
        raise UsageError(*too_many(ranks, count, launch.nodes))
    if fabric == "host":
        raise HardwareError(
            f"{ranks} ranks are asked for, the host fabric has at most {count}",
            "--gpus 2 shows what any number does",
        )
    raise HardwareError(
        f"{ranks} GPUs are asked for, {count} {'is' if count == 1 else 'are'} there",
        f"--gpus {count}, or --fabric host to interpret the kernels on the CPU",
    )


def gpu_name(fabric: str) -> str | None:
    """The name by which records know this machine's devices; None where the driver is silent."""
    if fabric == "host":
        return KNOWN["cpu"].name
    if fabric == "rocm":
        import torch

        return str(torch.cuda.get_device_name())  # AMD's tool has other names
    try:
        return nvidia.gpus()[0].name
    except Exception:
        return None


def heap_bytes(problems: Sequence[Any]) -> int:
    """Symmetric memory that any variant of these problems needs."""
    return arena_bytes(max((problem.slot_bytes for problem in problems), default=0))
