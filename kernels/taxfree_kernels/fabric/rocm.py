"""AMD GPUs as a fabric: heaps through ROCm's Iris, else in torch's symmetric memory.

Iris provides a single arena and the table of each rank's heap. It supports only the default process
group, and assigns rank r the GPU r modulo the number of GPUs; if that does not fit on every rank,
all ranks use torch's symmetric memory instead.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import triton

from taxfree_kernels.errors import FabricUnavailable
from taxfree_kernels.fabric.gpu import GpuFabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.interpreter import is_interpreting

#: where the driver describes each device, or each partition of one
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
#: architecture -> compute units of a chiplet, where the driver does not tell their number
_CHIPLET_UNITS = {"gfx942": 38, "gfx950": 32}
#: architecture -> bytes of LDS
_LDS = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
#: methods of ROCm's Iris, which shares its name with an unrelated package
_NEEDED = ("zeros", "get_heap_bases", "get_rank", "get_num_ranks")
#: older compilers let a signal overtake the data that it announces: docs/amd.md#executed
_OLDEST_TRITON = (3, 8)
_IRIS_SLACK = 2 << 20  # bytes, for the alignment of Iris' allocators


def unsupported_reason() -> str | None:
    """Why this fabric cannot serve in this process, or None."""
    if torch.version.hip is None:
        return f"this torch ({torch.__version__}) is built without ROCm"
    if not torch.cuda.is_available():
        return "torch sees no ROCm device"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if _architecture(properties) not in _LDS:
        return f"{properties.name} is {_architecture(properties)}, not {' or '.join(_LDS)}"
    if is_interpreting():
        return "kernels are interpreted: TRITON_INTERPRET is set"
    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST_TRITON:
        return f"Triton {triton.__version__} compiles signals wrongly for AMD; 3.8 does not"
    return None


def find_iris() -> tuple[ModuleType | None, str]:
    """ROCm's Iris, or None and why there is none."""
    try:
        module = importlib.import_module("iris")
    except (ImportError, OSError) as error:  # it loads the HIP runtime: OSError without one
        return None, f"iris is not importable ({_first_line(error)})"
    if module.__name__ != "iris":
        return None, "the imported iris is the checker's stand-in"
    context = getattr(module, "Iris", None)
    if callable(getattr(module, "iris", None)) and all(hasattr(context, name) for name in _NEEDED):
        return module, ""
    return None, "the installed iris is another package of that name, or too old"


class RocmFabric(GpuFabric):
    """Ranks as the GPUs of one XGMI domain."""

    name = "rocm"
    backend = "hip"

    @staticmethod
    def hardware_of(device: torch.device) -> Hardware:
        properties = torch.cuda.get_device_properties(device)
        architecture = _architecture(properties)
        return Hardware(
            name=properties.name,
            backend="hip",
            architecture=architecture,
            compute_units=properties.multi_processor_count,
            warp_size=64,
            shared_memory=_LDS[architecture],
            registers=512,
            memory_bytes=properties.total_memory,
            num_xcds=num_xcds(architecture, properties.multi_processor_count),
        )

    def _map_arenas(self, heap_bytes: int) -> tuple[torch.Tensor, list[int]]:
        if self.world_size == 1:
            return super()._map_arenas(heap_bytes)
        iris, reason = self._agree_on_iris()
        if iris is not None:
            return self._map_by_iris(iris, heap_bytes)
        try:
            return super()._map_arenas(heap_bytes)
        except FabricUnavailable as error:
            message = f"{error.message}; and no Iris: {reason}"
            raise FabricUnavailable(message, error.hint) from error

    def _agree_on_iris(self) -> tuple[ModuleType | None, str]:
        """Iris if it can serve every rank, else a rank's reason; its calls are collective."""
        iris, reason = find_iris()
        reason = reason or self._rank_unsupported_reason()
        reasons: list[str] = [""] * self.world_size
        dist.all_gather_object(reasons, reason, self.group)
        first = next(filter(None, reasons), "")
        return (None, first) if first else (iris, "")

    def _rank_unsupported_reason(self) -> str:
        """Why Iris cannot serve this rank, or ""."""
        if self.world_size < dist.get_world_size():
            return "it serves the default process group only, and this group is a part of it"
        its_gpu, current = dist.get_rank() % torch.cuda.device_count(), torch.cuda.current_device()
        if current == its_gpu:
            return ""
        return f"it would use GPU {its_gpu}, this rank is on GPU {current}"

    def _map_by_iris(self, iris: ModuleType, heap_bytes: int) -> tuple[torch.Tensor, list[int]]:
        try:
            self._iris = iris.iris(heap_size=heap_bytes + _IRIS_SLACK)  # unmaps all when it dies
            arena = self._iris.zeros(heap_bytes, dtype=torch.uint8)
        except (RuntimeError, OSError, MemoryError) as error:
            raise FabricUnavailable(
                f"Iris failed: {_first_line(error)}",
                "are all GPUs in one XGMI domain, with peer access?",
            ) from error
        ranks = self._iris.get_rank(), self._iris.get_num_ranks()
        if ranks != (dist.get_rank(), dist.get_world_size()):
            raise FabricUnavailable(
                "Iris counts ranks otherwise than torch.distributed",
                "install the commit of Iris that `taxfree doctor` names",
            )
        bases = self._iris.get_heap_bases().tolist()  # only now: allocating maps peers anew
        offset = arena.data_ptr() - bases[dist.get_rank()]
        members = dist.get_process_group_ranks(self.group)
        return arena, [bases[member] + offset for member in members]


def num_xcds(architecture: str, compute_units: int, topology: Path = _TOPOLOGY) -> int:
    """The number of chiplets of a device, or of a partition of one: 8 in mode SPX, 1 in CPX.

    Devices with equally many units are in the same mode. So the driver's description of one of them
    tells; where there is none, the number of units does.

    Args:
        compute_units: of the device.
        topology: a folder for each device, with its `properties`.
    """
    for path in sorted(topology.glob("*/properties")):
        lines = (line.split() for line in path.read_text().splitlines())
        properties = {line[0]: int(line[1]) for line in lines if len(line) == 2}
        units = properties.get("simd_count", 0) // max(1, properties.get("simd_per_cu", 1))
        if units == compute_units and properties.get("num_xcc"):
            return properties["num_xcc"]
    return max(1, round(compute_units / _CHIPLET_UNITS[architecture]))


def _architecture(properties: object) -> str:
    """``gfx942`` of ``gfx942:sramecc+:xnack-``."""
    return str(getattr(properties, "gcnArchName", "unknown")).partition(":")[0]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
