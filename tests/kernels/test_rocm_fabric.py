"""The rocm fabric without an AMD GPU: its calls of Iris as recorded, its probes, its choices."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from taxfree_kernels.errors import FabricUnavailable, PlanError
from taxfree_kernels.fabric import gpu, rocm
from taxfree_kernels.fabric.gpu import SHARING, GpuFabric
from taxfree_kernels.fabric.open import choose, probe
from taxfree_kernels.fabric.rocm import RocmFabric
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.doctor.advice import IRIS_COMMIT

CONTRACT = json.loads(Path(__file__).with_name("iris_contract.json").read_text())
RANK, WORLD = 1, 4
HEAP_BYTES = 1 << 16
BEFORE = 1024  # bytes of the heap that Iris keeps for itself, before the arena


def signature(text: str) -> inspect.Signature:
    """Of a text such as `(self, *size, dtype=None)`."""
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def recorded{text}: ...", scope)
    return inspect.signature(scope["recorded"])


RECORDED = {name: signature(text) for name, text in CONTRACT["signatures"].items()}


def stand_in(rank: int = RANK, world: int = WORLD) -> ModuleType:
    """A module with the recorded names, whose functions refuse what the signatures refuse."""

    def as_recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            RECORDED[name].bind(*args, **kwargs)
            module.calls.append(name)
            return function(*args, **kwargs)

        return call

    class Iris:
        pass

    def create(heap_size: int) -> Iris:
        context = Iris()
        context.heap = torch.full((heap_size,), 7, dtype=torch.uint8)
        return context

    def zeros(context: Iris, count: int, dtype: torch.dtype) -> torch.Tensor:
        return context.heap[BEFORE : BEFORE + count * dtype.itemsize].view(dtype).zero_()

    def bases(context: Iris) -> torch.Tensor:
        assert "Iris.zeros" in module.calls  # allocating maps peers anew
        own = context.heap.data_ptr()
        return torch.tensor([own + (peer - rank) * (1 << 30) for peer in range(world)])

    module = ModuleType("iris")
    module.calls, module.Iris = [], Iris
    module.iris = as_recorded("iris", create)
    Iris.zeros = as_recorded("Iris.zeros", zeros)
    Iris.get_heap_bases = as_recorded("Iris.get_heap_bases", bases)
    Iris.get_rank = as_recorded("Iris.get_rank", lambda _: rank)
    Iris.get_num_ranks = as_recorded("Iris.get_num_ranks", lambda _: world)
    return module


@pytest.fixture
def node(monkeypatch) -> SimpleNamespace:
    """Rank 1 of 4 on a node of MI300X, as far as torch tells; memory is the CPU's."""
    found = SimpleNamespace(
        name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", uuid="GPU-",
        multi_processor_count=304, total_memory=192 << 30, members=list(range(WORLD)),
    )  # fmt: skip

    def gather(into: list[str], own: str, _: Any) -> None:
        into[:] = [own and f"{own}{rank}" for rank in range(len(into))]

    def rank_in(group: Any = None) -> int:
        return RANK if group is None else found.members.index(RANK)

    def world_size(group: Any = None) -> int:
        return WORLD if group is None else len(found.members)

    monkeypatch.setattr(triton, "__version__", "3.8.0")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: RANK)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(rocm, "is_interpreting", lambda: False)
    monkeypatch.setattr(gpu, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu, "_polls_per_second", lambda _: 1000.0)
    monkeypatch.setattr(dist, "get_rank", rank_in)
    monkeypatch.setattr(dist, "get_world_size", world_size)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: found.members)
    monkeypatch.setitem(sys.modules, "iris", stand_in())
    return found


def open_rocm() -> RocmFabric:
    return RocmFabric(SimpleNamespace(group_name="all"), HEAP_BYTES)


class TestContract:
    def test_it_is_of_the_commit_that_doctor_installs(self):
        assert CONTRACT["pinned_commit"] == IRIS_COMMIT
        guide = (Path(__file__).parents[2] / "docs" / "amd.md").read_text()
        assert f"iris.git@{IRIS_COMMIT}" in guide
        assert CONTRACT["read_commit"] in guide

    def test_every_name_that_is_probed_for_is_recorded(self):
        assert {"iris", *(f"Iris.{name}" for name in rocm._NEEDED)} == set(RECORDED)

    def test_an_installed_iris_has_the_recorded_signatures(self):
        iris, reason = rocm.find_iris()
        if iris is None:
            pytest.skip(reason)
        for name, recorded in RECORDED.items():
            owner = iris.Iris if name.startswith("Iris.") else iris
            live = inspect.signature(getattr(owner, name.rpartition(".")[2]))
            assert live.parameters == recorded.parameters, name


class TestIris:
    def test_one_arena_is_taken_and_seen_at_the_ranks_bases(self, node):
        fabric = open_rocm()
        calls = sys.modules["iris"].calls
        assert set(calls) == set(RECORDED)
        assert (calls.count("iris"), calls.count("Iris.zeros")) == (1, 1)
        assert fabric.heap.free_bytes == HEAP_BYTES
        own = fabric._arena.data_ptr()
        assert fabric.heap_bases.dtype == torch.int64
        assert fabric.heap_bases.tolist() == [own + (r - RANK) * (1 << 30) for r in range(WORLD)]
        assert own == fabric._iris.heap.data_ptr() + BEFORE

    def test_the_device_is_known(self, node):
        fabric = open_rocm()
        known = KNOWN["mi300x"]
        assert (fabric.name, fabric.backend, fabric.has_graphs) == ("rocm", "hip", True)
        assert (fabric.rank, fabric.world_size, fabric.ticks(2.0)) == (RANK, WORLD, 2000)
        for field in ("backend", "architecture", "compute_units", "warp_size", "shared_memory",
                      "registers", "memory_bytes", "num_xcds"):  # fmt: skip
            assert getattr(fabric.hardware, field) == getattr(known, field)

    def test_peers_memory_is_for_kernels_only(self, node):
        fabric = open_rocm()
        with pytest.raises(PlanError, match="fabric rocm shows peers' memory to kernels only"):
            fabric.peer_view(fabric.heap.empty(4, torch.float32), 1)

    def test_it_must_count_ranks_as_torch_does(self, node, monkeypatch):
        monkeypatch.setitem(sys.modules, "iris", stand_in(rank=0, world=1))
        with pytest.raises(FabricUnavailable, match="Iris counts ranks otherwise"):
            open_rocm()

    def test_its_failure_is_one_line(self, node, monkeypatch):
        def broken(heap_size: int) -> None:
            raise RuntimeError("hipErrorOutOfMemory\nat hip.py:12")

        monkeypatch.setattr(sys.modules["iris"], "iris", broken)
        with pytest.raises(FabricUnavailable, match=r"^Iris failed: hipErrorOutOfMemory$"):
            open_rocm()


class TestWithoutIris:
    """Symmetric memory of torch is asked; its failure names what kept Iris from serving."""

    @pytest.fixture(autouse=True)
    def no_symmetric_memory(self, monkeypatch):
        def refuse(*_: Any) -> None:
            raise FabricUnavailable("torch symmetric memory failed: no peer access")

        monkeypatch.setattr(GpuFabric, "_map_arenas", refuse)

    def test_absent(self, node, monkeypatch):
        monkeypatch.setitem(sys.modules, "iris", None)
        with pytest.raises(FabricUnavailable, match="no Iris: iris is not importable"):
            open_rocm()

    def test_without_the_hip_runtime(self, node, monkeypatch):
        def load(_: str) -> None:
            raise OSError("libamdhip64.so: cannot open shared object file")

        monkeypatch.setattr(rocm.importlib, "import_module", load)
        with pytest.raises(FabricUnavailable, match=r"not importable .libamdhip64\.so"):
            open_rocm()

    def test_a_namesake(self, node, monkeypatch):
        monkeypatch.setitem(sys.modules, "iris", ModuleType("iris"))
        with pytest.raises(FabricUnavailable, match="another package of that name"):
            open_rocm()

    def test_the_checkers_stand_in(self, node, monkeypatch):
        from taxfree_check.checker.conventions import iris

        monkeypatch.setitem(sys.modules, "iris", iris)
        assert rocm.find_iris() == (None, "the imported iris is the checker's stand-in")

    def test_a_part_of_the_default_group(self, node):
        node.members = [1, 3]
        with pytest.raises(FabricUnavailable, match="default process group only"):
            open_rocm()

    def test_a_gpu_that_iris_would_not_use(self, node, monkeypatch):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
        with pytest.raises(FabricUnavailable, match="it would use GPU 1, this rank is on GPU 5"):
            open_rocm()

    def test_torchs_memory_serves(self, node, monkeypatch):
        arena = torch.zeros(HEAP_BYTES, dtype=torch.uint8)
        monkeypatch.setitem(sys.modules, "iris", None)
        monkeypatch.setattr(GpuFabric, "_map_arenas", lambda *_: (arena, [1, 2, 3, 4]))
        assert open_rocm().heap_bases.tolist() == [1, 2, 3, 4]


class TestProbe:
    def test_auto_is_rocm_on_hip(self, node):
        assert probe()["rocm"] is None
        assert choose() == "rocm"

    @pytest.mark.parametrize("gpu", ["mi300x", "mi350x"])
    def test_lds_by_architecture(self, node, gpu):
        node.gcnArchName = f"{KNOWN[gpu].architecture}:sramecc+"
        assert open_rocm().hardware.shared_memory == KNOWN[gpu].shared_memory

    def test_other_architectures_are_refused(self, node):
        node.gcnArchName = "gfx90a:sramecc+:xnack-"
        assert probe()["rocm"] == "AMD Instinct MI300X is gfx90a, not gfx942 or gfx950"
        with pytest.raises(FabricUnavailable, match=r"fabric rocm: .* is gfx90a"):
            choose("rocm")

    def test_two_ranks_on_one_gpu_are_refused(self, node, monkeypatch):
        monkeypatch.setattr(dist, "all_gather_object", lambda into, own, _: into.clear())
        for value in ("", "0"):
            monkeypatch.setenv(SHARING, value)
            with pytest.raises(FabricUnavailable, match="two ranks share one GPU"):
                open_rocm()
        monkeypatch.setenv(SHARING, "1")
        assert open_rocm().world_size == WORLD

    @pytest.mark.parametrize(
        ("owner", "name", "value", "reason"),
        [
            (torch.version, "hip", None, "is built without ROCm"),
            (torch.cuda, "is_available", lambda: False, "torch sees no ROCm device"),
            (rocm, "is_interpreting", lambda: True, "TRITON_INTERPRET is set"),
            (triton, "__version__", "3.7.1+rocm7.2", "3.8 does not"),
        ],
    )
    def test_why_it_cannot_serve(self, node, monkeypatch, owner, name, value, reason):
        monkeypatch.setattr(owner, name, value)
        assert reason in rocm.unsupported_reason()


class TestChiplets:
    @pytest.mark.parametrize(
        ("architecture", "units", "chiplets"),
        [
            ("gfx942", 304, 8), ("gfx942", 152, 4), ("gfx942", 76, 2), ("gfx942", 38, 1),
            ("gfx942", 228, 6), ("gfx950", 256, 8), ("gfx950", 128, 4), ("gfx950", 32, 1),
        ],
    )  # fmt: skip
    def test_without_a_driver_the_units_tell(self, architecture, units, chiplets, tmp_path):
        assert rocm.num_xcds(architecture, units, tmp_path) == chiplets

    def test_the_driver_knows_better(self, tmp_path):
        nodes = {  # a CPU; a device of 80 units on 4 chiplets; one whose driver does not tell
            "0": "cpu_cores_count 96\nsimd_count 0\n",
            "1": "simd_count 320\nsimd_per_cu 4\nnum_xcc 4\nunique_id 18446744073709551615\n",
            "2": "simd_count 1216\nsimd_per_cu 4\n",
        }
        for node, text in nodes.items():
            (tmp_path / node).mkdir()
            (tmp_path / node / "properties").write_text(text)
        assert rocm.num_xcds("gfx942", 80, tmp_path) == 4
        assert rocm.num_xcds("gfx942", 304, tmp_path) == 8
        assert rocm.num_xcds("gfx942", 38, tmp_path) == 1
