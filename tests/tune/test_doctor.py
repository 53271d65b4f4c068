"""What `taxfree doctor` finds out: guarded probes, the drivers' tools, and measuring ranks."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from typing import Any

import pytest

import taxfree_kernels.fabric.open  # noqa: F401 - defines kernels in the mode of this process
from taxfree.errors import TaxfreeError, WorkerLost, one_line
from taxfree_tune import doctor
from taxfree_tune.doctor import fabrics, machine, measuring, software
from taxfree_tune.doctor.advice import advice
from taxfree_tune.doctor.report import (
    ExaminedMachine,
    Guard,
    IrisReport,
    MachineReport,
    Package,
    ProbeResults,
    Software,
    StartOrder,
)
from taxfree_tune.drivers import amd, nvidia
from taxfree_tune.drivers.gpu import Gpu, GpuProcess, link_matrix, number, output, whole
from tests.ranks import on_every_fabric, require

NVIDIA_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
AMD_TOPOLOGY = """\
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         XGMI
GPU1   XGMI         0            PCIE
GPU2   XGMI         PCIE         0
================================== End of ROCm SMI Log ===================================
"""


class TestGuard:
    def test_a_probe_that_raises_leaves_its_reason(self):
        guard = Guard()
        assert guard("answer", lambda: 42, 0) == 42
        assert guard("division", lambda: 1 // 0, 7) == 7
        assert list(guard.problems) == ["division"]
        assert guard.problems["division"].startswith("ZeroDivisionError: ")

    def test_reasons_are_one_line_and_typed_unless_made_for_users(self):
        assert one_line(RuntimeError("two\n  lines")) == "RuntimeError: two lines"
        assert one_line(KeyError()) == "KeyError"
        assert one_line(TaxfreeError("rank 1 is gone", "look")) == "rank 1 is gone"


class TestSoftware:
    def test_versions_are_those_loaded_and_installed(self):
        import torch

        found = software.look(Guard())
        assert found.loaded("torch") == torch.__version__
        assert {"taxfree", "python"} <= set(found.versions)
        names = [package.name for package in found.packages]
        assert names == ["torch", "triton", "numpy", "optuna", "sqlitedict"]
        assert all(package.installed for package in found.packages)

    def test_a_package_that_cannot_be_imported_is_a_problem(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sqlitedict", None)
        guard = Guard()
        assert software.look(guard).loaded("sqlitedict") is None
        assert list(guard.problems) == ["import sqlitedict"]

    @pytest.mark.parametrize(
        ("source", "state"),
        [
            (None, "missing"),
            ("__version__ = '0.0.1'", "namesake"),
            ("def iris(): ...", "namesake"),
            ("raise OSError('libamdhip64.so: cannot open')", "broken"),
            ("import a_package_that_is_not_there", "broken"),
            (
                """
                class Iris:
                    def get_heap_bases(self): ...
                def iris(heap_size): ...
                """,
                "present",
            ),
        ],
    )
    def test_iris_is_told_from_its_namesake(self, monkeypatch, tmp_path, source, state):
        if source is not None:
            (tmp_path / "iris.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "iris", raising=False)
        found = software.look(Guard()).iris
        sys.modules.pop("iris", None)
        assert found.state == state
        assert found.detail


class TestTool:
    def test_output_is_without_colours(self):
        assert output("printf", r"\033[1mbold\033[0m") == "bold"

    def test_a_tool_that_fails_says_so(self):
        with pytest.raises(RuntimeError, match=r"sh failed \(9\): no devices"):
            output("sh", "-c", "echo no devices >&2; exit 9")

    @pytest.mark.parametrize(
        ("text", "value"), [("(132Mhz)", 132), ("35.5", 35.5), ("[N/A]", None), ("", None)]
    )
    def test_numbers(self, text, value):
        assert number(text) == value

    def test_whole_numbers(self):
        assert whole("2 MiB", 1 << 20) == 2 << 20
        assert whole("[Not Supported]") is None

    def test_link_matrices_of_both_vendors(self):
        plain = NVIDIA_TOPOLOGY.replace("\x1b[4m", "").replace("\x1b[0m", "")
        assert link_matrix(plain) == (("self", "NV18"), ("NV18", "self"))
        assert link_matrix(AMD_TOPOLOGY)[1] == ("XGMI", "self", "PCIE")
        assert link_matrix("no GPUs") == ()


class TestNvidia:
    @pytest.fixture(autouse=True)
    def smi(self, monkeypatch):
        answers = {
            "--query-gpu=index,name": (
                "0, NVIDIA H200, GPU-a, 143771, 17, 345, 1980, 3201, 3201, 27, 76.41, 700.0, 0x24\n"
                "1, NVIDIA H200, GPU-b, 143771, 0, 345, 1980, [N/A], 3201, 28, [N/A], 700.0, 0x1\n"
            ),
            "--query-gpu=index,uuid": "0, GPU-a\n1, GPU-b\n",
            "--query-gpu=driver": "580.65.06\n580.65.06\n",
            "--query-compute": "GPU-b, 4711, python, 1024\nGPU-c, 12, train, [N/A]\n",
            "topo": NVIDIA_TOPOLOGY,
        }

        def fake(_, *arguments):
            for start, answer in answers.items():
                # An old driver, which has another name for what slows a clock.
                if arguments[0].startswith(start) and "event_reasons" not in arguments[0]:
                    return answer
            raise RuntimeError("nvidia-smi failed: not a valid field")

        monkeypatch.setattr(nvidia, "output", fake)

    def test_gpus(self):
        first, second = nvidia.gpus()
        assert first == Gpu(
            0, "NVIDIA H200", 143771 << 20, 17 << 20, 345, 1980, 3201, 3201, 27, 76.41, 700,
            ("power cap", "heat (software)"),
        )  # fmt: skip
        assert (second.memory_mhz, second.power_w, second.slowed_by) == (None, None, ())

    def test_processes(self):
        first, second = nvidia.processes()
        assert first == GpuProcess(1, 4711, "python", 1024 << 20)
        assert second == GpuProcess(None, 12, "train", None)

    def test_driver(self):
        assert nvidia.driver_version() == "580.65.06"


class TestAmd:
    @pytest.fixture(autouse=True)
    def smi(self, monkeypatch):
        answers = {
            "--showproductname": """{"card0": {"Card Series": "AMD Instinct MI300X",
                "VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297984",
                "sclk clock speed:": "(132Mhz)", "mclk clock speed:": "(900Mhz)",
                "Temperature (Sensor junction) (C)": "35.0",
                "Current Socket Graphics Package Power (W)": "133.0"}, "system": {}}""",
            "--showpids": '{"system": {"PID4711": "python, 1, 4096, 0, 12"}}',
            "--showtopotype": AMD_TOPOLOGY,
            "--showdriverversion": '{"system": {"Driver version": "6.12.12"}}',
        }
        monkeypatch.setattr(amd, "output", lambda _, what, *__: answers[what])

    def test_gpus(self):
        (gpu,) = amd.gpus()
        assert gpu == Gpu(
            0, "AMD Instinct MI300X", 206141652992, 297984,
            compute_mhz=132, memory_mhz=900, temperature_c=35, power_w=133,
        )  # fmt: skip

    def test_processes(self, monkeypatch):
        assert amd.processes() == (GpuProcess(None, 4711, "python", 4096),)
        monkeypatch.setattr(amd, "output", lambda *_: "WARNING: No JSON data to report\n")
        assert amd.processes() == ()

    def test_driver_and_links(self):
        assert amd.driver_version() == "6.12.12"
        assert amd.links()[0] == ("self", "XGMI", "XGMI")


class TestMachine:
    def test_a_broken_tool_is_a_problem_and_the_rest_is_there(self, monkeypatch):
        monkeypatch.setattr(machine, "vendors", lambda: ("nvidia",))

        def broken(*_):
            raise RuntimeError("nvidia-smi failed (9): no devices")

        monkeypatch.setattr(nvidia, "output", broken)
        guard = Guard()
        found = machine.look(guard)
        assert {"system", "cpu", "memory", "nvidia driver"} <= set(found.system)
        assert found.gpus == ()
        assert set(guard.problems) == {
            f"nvidia {w}" for w in ("driver", "processes", "GPUs", "links")
        }

    def test_own_process_is_no_other_process(self, monkeypatch):
        monkeypatch.setattr(machine, "vendors", lambda: ("nvidia",))
        others = (GpuProcess(0, os.getpid(), "me", 0), GpuProcess(0, 1, "init", 0))
        monkeypatch.setattr(nvidia, "processes", lambda: others)
        assert [each.pid for each in machine.look(Guard()).processes] == [1]

    def test_only_variables_that_matter(self):
        found = machine.environment(
            {"NCCL_DEBUG": "INFO", "TAXFREE_DB": "/x", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}
            | {"PYTORCH_CUDA_ALLOC_CONF": "y", "WORLD_SIZE": "2", "CUDA_SECRET": "no"}
        )
        assert list(found) == [
            "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "TAXFREE_DB",
            "WORLD_SIZE",
        ]  # fmt: skip


class TestFabrics:
    @pytest.mark.parametrize("interpret", [None, "0", "1"])
    def test_are_judged_as_their_workers_would(self, monkeypatch, interpret):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if interpret is not None:
            monkeypatch.setenv("TRITON_INTERPRET", interpret)
        reasons = fabrics.reasons(Guard())
        assert list(reasons) == ["cuda", "rocm", "host"]
        assert reasons["host"] is None
        assert "TRITON_INTERPRET" not in (reasons["cuda"] or "")
        assert os.environ.get("TRITON_INTERPRET") == interpret

    def test_without_torch_all_say_why(self, monkeypatch):
        def broken():
            raise ImportError("libtorch.so is not there")

        monkeypatch.setattr(fabrics, "_probe", broken)
        reasons = fabrics.reasons(Guard())
        assert set(reasons.values()) == {"ImportError: libtorch.so is not there"}


class TestStartOrder:
    @pytest.mark.parametrize(
        ("tickets", "chiplets", "largest"),
        [
            ([0, 1, 2, 3], 1, 0),
            ([1, 0, 2, 3], 1, 1),
            ([3, 0, 1, 2], 1, 1),
            ([1, 2, 3, 0], 1, 3),
            ([4, 0, 5, 1, 6, 2, 7, 3], 2, 0),
            ([4, 1, 5, 0], 2, 1),
        ],
    )
    def test_largest_inversion(self, tickets, chiplets, largest):
        from taxfree_tune.doctor.tasks import largest_inversion

        assert largest_inversion(tickets, chiplets) == largest

    @pytest.mark.parametrize(
        ("places", "chiplets", "elsewhere"),
        [
            ([0, 0, 0], 1, 0),
            ([0, 1, 0, 1, 0], 2, 0),
            ([5, 3, 5, 3], 2, 0),
            ([0, 1, 1, 0, 0, 1], 2, 2),
            ([0, 0, 0, 0], 2, 2),
            ([0, 1, 2, 3], 2, 2),
        ],
    )
    def test_programs_that_are_not_on_their_chiplet(self, places, chiplets, elsewhere):
        from taxfree_tune.doctor.tasks import off_their_chiplet

        assert off_their_chiplet(places, chiplets) == elsewhere

    @pytest.mark.parametrize(
        ("order", "is_kept"),
        [
            (StartOrder(64, 1, 1, 0), True),
            (StartOrder(2112, 264, 1, 263), True),
            (StartOrder(2112, 264, 1, 264), False),
            (StartOrder(4864, 608, 8, 76), False),
        ],
    )
    def test_is_kept_unless_a_program_is_a_wave_early(self, order, is_kept):
        assert order.is_kept == is_kept


@on_every_fabric
class TestTasks:
    """The probes, on interpreted ranks and on GPUs."""

    @pytest.fixture
    def run(self, ranks):
        return lambda task: ranks.run(ranks.few, f"taxfree_tune.doctor.tasks:{task}")

    def test_bandwidths_are_measured(self, run, ranks):
        assert all(rate > 0 for rate in dataclasses.astuple(run("rates")[0]))
        peers = run("peers")[0]
        assert [peer.distance for peer in peers] == list(range(1, ranks.few))
        assert all(min(peer.push_gb_s, peer.pull_gb_s) > 0 for peer in peers)

    def test_signals_leave_a_usable_pool_and_all_ranks_agree(self, run, ranks):
        require(ranks.few, ranks.fabric)  # thousands of round trips, each a turn on a shared GPU
        for _ in range(2):
            first, *others = run("signals")
            assert all(other == first for other in others)
            assert [signal.peer for signal in first] == list(range(1, ranks.few))
            assert all(signal.round_trip_us > 0 for signal in first)

    def test_words_arrive_before_their_signals_and_the_pool_stays_usable(self, run, ranks):
        for _ in range(2):
            ranks.run(ranks.few, f"{__name__}:use_pool")
            assert {(each.rounds > 0, each.stale_words) for each in run("coherence")} == {(True, 0)}

    def test_a_barrier_is_timed_in_a_graph_where_there_are_graphs(self, run, ranks):
        barrier = run("barrier")[0]
        assert barrier.eager_us > 0
        assert (barrier.graph_us is None) == (ranks.fabric == "host")

    def test_programs_start_in_order(self, run, ranks):
        order = run("order")[0]
        assert order.is_kept
        assert ranks.fabric != "host" or order.largest_inversion == 0

    def test_data_that_does_not_arrive_is_noticed(self, ranks):
        with pytest.raises(TaxfreeError, match=r"(\d+) of \1 words from rank 1 arrived wrong"):
            ranks.run(ranks.few, f"{__name__}:lose_data")


def use_pool(fabric: Any) -> None:
    """Leave signals of some later generation, as calls of plans do."""
    fabric.pool.reset(1000)


def lose_data(fabric: Any) -> None:
    """On rank 0 alone, so that no other rank's error can be told first."""
    from taxfree_tune.doctor.tasks import _buffers, _checked_rate

    _, target = _buffers(fabric)
    sender = (fabric.rank + 1) % fabric.world_size
    _checked_rate(fabric, lambda _: None if fabric.rank == 0 else target.fill_(sender), 1)


class FakeGroup:
    """A worker group that answers what it is told to, and may get lost."""

    def __init__(self, answers):
        self.answers, self.is_alive, self.closed = answers, True, False

    def call(self, task, deadline_s):
        answer = self.answers[task.__name__]
        if isinstance(answer, Exception):
            self.is_alive = not isinstance(answer, WorkerLost)
            raise answer
        return [answer, answer]

    def __exit__(self, *_):
        self.closed = True


class TestMeasuring:
    @pytest.fixture
    def measure(self, monkeypatch):
        def call(answers, world_size=2, deadline_s=60.0):
            self.groups = []
            self.guard = Guard()

            def start(*_):
                self.groups.append(FakeGroup(answers))
                return self.groups[-1]

            monkeypatch.setattr(measuring, "WorkerGroup", start)
            return measuring.measure(self.guard, "host", world_size, lambda _: None, deadline_s)

        return call

    def test_all_probes_run_on_one_group(self, measure):
        measured = measure({name: name for name in measuring.PROBES})
        assert {getattr(measured, name) for name in measuring.PROBES} == set(measuring.PROBES)
        assert self.guard.problems == {}
        assert [group.closed for group in self.groups] == [True]

    def test_a_failed_probe_is_a_problem_and_the_rest_goes_on(self, measure):
        answers = {name: name for name in measuring.PROBES} | {"order": TaxfreeError("no order")}
        measured = measure(answers)
        assert measured.order is None
        assert measured.signals == "signals"
        assert self.guard.problems == {"program start order": "no order"}
        assert len(self.groups) == 1

    def test_a_lost_group_is_replaced_once(self, measure):
        lost = {"order": WorkerLost("rank 1 hung"), "peers": WorkerLost("rank 0 died")}
        measured = measure({name: name for name in measuring.PROBES} | lost)
        assert (measured.rates, measured.barrier) == ("rates", "barrier")
        assert self.guard.problems == {
            "program start order": "rank 1 hung",
            "peer bandwidth": "rank 0 died",
            "coherence of the heap": "not tried, as the ranks were lost before",
            "signal round trip": "not tried, as the ranks were lost before",
        }
        assert len(self.groups) == 2

    def test_one_rank_has_no_peers(self, measure):
        answers = {"rates": 0, "order": 1, "barrier": 2}
        measured = measure(answers, world_size=1)
        assert measured.peers is None
        assert list(self.guard.problems) == ["peers"]

    def test_a_bad_setting_is_a_problem(self, measure, monkeypatch):
        monkeypatch.setenv("TAXFREE_TIMEOUT", "soon")
        measure({name: name for name in measuring.PROBES})
        assert list(self.guard.problems) == ["settings"]

    def test_a_hang_of_real_ranks_is_bounded(self, monkeypatch):
        monkeypatch.setattr(measuring, "PROBES", {"rates": "rates of bounds"})
        guard = Guard()
        measured = measuring.measure(guard, "host", 1, lambda _: None, deadline_s=0.001)
        assert measured.rates is None
        assert "did not finish rates in time" in guard.problems["rates of bounds"]


class TestExamine:
    @pytest.fixture(autouse=True)
    def cuda_serves(self, monkeypatch):
        """A machine on which both fabrics look well."""
        monkeypatch.setattr(
            fabrics, "reasons", lambda _: {"cuda": None, "rocm": "not here", "host": None}
        )
        monkeypatch.setattr(doctor.devices, "available_gpus", lambda: 4)

    def test_auto_falls_back_to_the_next_that_opens(self, monkeypatch):
        def measure(guard, fabric, world_size, tell):
            if fabric == "cuda":
                raise WorkerLost("rank 3 died")
            return ProbeResults(fabric, world_size, interpreted=True)

        monkeypatch.setattr(measuring, "measure", measure)
        report = doctor.examine()
        assert report.serves
        assert report.fabrics["cuda"] == "does not open: rank 3 died"
        assert (report.measured.fabric, report.measured.world_size) == ("host", 2)

    def test_too_many_gpus_are_refused_before_anything_starts(self):
        report = doctor.examine("cuda", 8)
        assert not report.serves
        assert report.reason.startswith("fabric cuda: does not open: 8 GPUs are asked for, 4 are")

    def test_an_asked_fabric_has_no_substitute(self):
        report = doctor.examine("rocm")
        assert not report.serves
        assert report.reason == "fabric rocm: not here"

    def test_an_error_that_nobody_foresaw_is_a_reason(self, monkeypatch):
        def measure(*_):
            raise OSError("out of file descriptors")

        monkeypatch.setattr(measuring, "measure", measure)
        assert doctor.examine().reason == "no fabric can serve on this machine"


class TestAdvice:
    def report(self, *, vendors=(), iris="missing", measured=None, versions=(), **packages):
        loaded = {"torch": "2.13.0", "triton": "3.9.0", "numpy": "2.4.1"} | packages
        found = tuple(Package(name, each, (f"{name} {each}",)) for name, each in loaded.items())
        software = Software(dict(versions), found, IrisReport(iris, ""))
        return MachineReport("auto", software, ExaminedMachine(vendors=vendors), {}, measured, {})

    def said(self, **facts):
        return "\n".join(advice(self.report(**facts)))

    def test_gpus_that_serve_are_tuned(self):
        measured = ProbeResults("cuda", 8, interpreted=False)
        report = self.report(vendors=("nvidia",), versions={"CUDA": "13.0"}, measured=measured)
        assert advice(report) == ("taxfree tune --shapes paper --gpus 8",)

    def test_a_cpu_has_the_demo(self):
        said = self.said(measured=ProbeResults("host", 2, interpreted=True))
        assert "make demo" in said
        assert "--fabric host" in said
        assert "pip" not in said

    @pytest.mark.parametrize(
        ("facts", "step"),
        [
            ({"vendors": ("nvidia",)}, "pip install 'taxfree[cuda]'"),
            ({"vendors": ("amd",)}, "ROCm build of torch"),
            (
                {"vendors": ("amd",), "iris": "namesake"},
                "pip uninstall iris, then pip install",
            ),
            ({"torch": None}, "pip install 'taxfree[cpu]'"),
            ({"triton": None}, "pip install 'triton>=3.6'"),
            ({"triton": "3.6.0"}, "pip install 'numpy<2.4'"),
            (
                {"measured": ProbeResults("cuda", 2, False, order=StartOrder(8, 1, 1, 5))},
                "programs start out of order",
            ),
        ],
    )
    def test_what_is_wrong_comes_with_its_repair(self, facts, step):
        assert step in self.said(**facts)

    def test_two_tritons_are_named(self):
        report = self.report()
        twice = Package("triton", "3.5.1", ("pytorch-triton-rocm 3.5.1", "triton 3.9.0"))
        report = dataclasses.replace(
            report, software=dataclasses.replace(report.software, packages=(twice,))
        )
        assert "keep one Triton of these: pytorch-triton-rocm 3.5.1, triton 3.9.0" in "\n".join(
            advice(report)
        )

    def test_busy_and_slow_gpus_are_warned_of(self):
        busy = ExaminedMachine(
            gpus=(Gpu(0, "H200", slowed_by=("power cap",)),), processes=(GpuProcess(0, 7, "x", 1),)
        )
        said = "\n".join(advice(dataclasses.replace(self.report(), machine=busy)))
        assert "other processes" in said
        assert "slowed down" in said
