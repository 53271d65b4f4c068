"""`taxfree doctor`: how a report is shown, and what the exit code says."""

from __future__ import annotations

import json

import pytest

import taxfree_tune.doctor
from taxfree_tune.doctor.report import (
    BarrierTime,
    Coherence,
    ExaminedMachine,
    IrisReport,
    MachineReport,
    Package,
    PeerBandwidth,
    ProbeResults,
    Rates,
    SignalTime,
    Software,
    StartOrder,
)
from taxfree_tune.drivers.gpu import Gpu, GpuProcess

GIB = 1 << 30
H200 = Gpu(0, "NVIDIA H200", 141 * GIB, GIB, 345, 1980, 3201, 3201, 27, 76.4, 700, ("power cap",))
MEASURED = ProbeResults(
    "cuda",
    3,
    interpreted=False,
    rates=Rates(771.2, 4612.0, 355.1),
    order=StartOrder(2112, 264, 1, 12),
    barrier=BarrierTime(9.87, 4.32),
    peers=(PeerBandwidth(1, 338.1, 328.2), PeerBandwidth(2, 338.3, 328.4)),
    coherence=Coherence(50, 0),
    signals=(SignalTime(1, 2.113), SignalTime(2, 2.2)),
)


def report(asked="auto", measured=MEASURED, **changes):
    facts = {
        "software": Software(
            {"taxfree": "0.1.0", "CUDA": "13.0", "NCCL": "2.28.9"},
            (
                Package("torch", "2.13.0+cu130", ("torch 2.13.0",)),
                Package("triton", "3.9.0", ("triton 3.8.0",)),
                Package("optuna", None, ()),
                Package("numpy", None, ("numpy 2.4.1",)),
            ),
            IrisReport("namesake", "another package called iris, not ROCm's"),
        ),
        "machine": ExaminedMachine(
            {"system": "Linux", "nvidia driver": "580.65"},
            ("nvidia",),
            (H200, Gpu(1, "NVIDIA H200")),
            (GpuProcess(1, 4711, "python", 3 * GIB),),
            (("self", "NV18"), ("NV18", "self")),
            {"NCCL_DEBUG": "INFO"},
        ),
        "fabrics": {"cuda": None if measured else "torch sees no CUDA device", "host": None},
        "problems": {"nvidia links": "RuntimeError: no topology"},
        "advice": ("taxfree tune --shapes paper --gpus 3", "a step that is " + "long " * 20),
    }
    return MachineReport(asked=asked, measured=measured, **facts | changes)


@pytest.fixture
def found(monkeypatch):
    """Make `examine` find something."""

    def set_report(result):
        monkeypatch.setattr(taxfree_tune.doctor, "examine", lambda *_, **__: result)

    return set_report


class TestShown:
    def lines(self, cli, found, monkeypatch, columns):
        found(report())
        monkeypatch.setenv("COLUMNS", str(columns))
        outcome = cli("doctor")
        assert outcome.code == 0
        assert outcome.err == ""
        return [line.rstrip() for line in outcome.out.splitlines()]

    def test_sections_in_order(self, cli, found, monkeypatch):
        lines = self.lines(cli, found, monkeypatch, 120)
        titles = [line for line in lines if line and not line.startswith(" ")]
        assert titles == [
            "Software", "Machine", "Environment", "Fabrics",
            "Measured on 3 ranks of fabric cuda", "Not found out", "Next",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "line",
        [
            "  torch          2.13.0+cu130",
            "  triton         3.9.0 loaded, triton 3.8.0 installed",
            "  optuna         missing",
            "  numpy          installed (numpy 2.4.1), but cannot be imported",
            "  iris           another package called iris, not ROCm's",
            "  gpu 1          NVIDIA H200",
            "  links          NV18 between 1 pair",
            "  processes      python 4711 on gpu 1 (3.0 GiB)",
            "  NCCL_DEBUG=INFO",
            "  cuda           can serve",
            "  bounds         bfloat16 matmul 771 TFLOP/s, memory 4612 GB/s, links 355 GB/s",
            "  to rank + 2    push 338, pull 328 GB/s",
            "  coherence      words arrive before their signals, 50 rounds with each peer",
            "  signal         there and back from rank 0 in 2.11 (rank 1), 2.2 (rank 2) us",
            "  barrier        9.87 us",
            "  graph capture  works, barrier 4.32 us",
            "  nvidia links   RuntimeError: no topology",
            "  taxfree tune --shapes paper --gpus 3",
        ],
    )
    def test_lines(self, cli, found, monkeypatch, line):
        assert line in self.lines(cli, found, monkeypatch, 120)

    def test_a_gpu_in_one_paragraph(self, cli, found, monkeypatch):
        text = " ".join(" ".join(self.lines(cli, found, monkeypatch, 120)).split())
        assert (
            "gpu 0 NVIDIA H200, 1 of 141 GiB used, 345 of 1980 MHz, 3201 of 3201 MHz memory, "
            "76 of 700 W, 27 °C, slowed by power cap"
        ) in text

    def test_a_narrow_terminal_breaks_values_and_no_steps(self, cli, found, monkeypatch):
        lines = self.lines(cli, found, monkeypatch, 40)
        steps = lines[lines.index("Next") + 1 :]
        assert all(len(line) <= 40 for line in lines[: -len(steps)])
        assert len(steps) == 2
        assert "  iris           another package called" in lines
        assert "                 iris, not ROCm's" in lines

    @pytest.mark.parametrize(
        ("order", "said"),
        [
            (StartOrder(64, 1, 1, 0), "in order of program id (64 programs)"),
            (StartOrder(4864, 608, 8, 9), "up to 9 places early within each chiplet: as programs"),
            (StartOrder(2112, 264, 1, 999), "NOT in order of id (2112 programs, 264 at a time)"),
            (StartOrder(64, 16, 8, 0), "64 programs in turn to 8 chiplets"),
            (StartOrder(64, 16, 8, 0, 5), "NOT 64 programs in turn to 8 chiplets: 5 run elsewhere"),
        ],
    )
    def test_start_orders(self, cli, found, order, said):
        found(report(measured=ProbeResults("cuda", 2, interpreted=False, order=order)))
        assert said in cli("doctor").out

    def test_interpreted_figures_say_so(self, cli, found):
        found(report(measured=ProbeResults("host", 2, interpreted=True)))
        assert "not the speed of a GPU" in cli("doctor").out


class TestExitCode:
    def test_is_0_where_a_fabric_serves(self, cli, found):
        found(report())
        assert cli("doctor").code == 0

    @pytest.mark.parametrize("asked", ["cuda", "auto"])
    def test_is_3_where_none_does_and_the_report_is_shown(self, cli, found, asked):
        found(report(asked, measured=None))
        outcome = cli("doctor", "--fabric", asked)
        assert outcome.code == 3
        assert "torch sees no CUDA device" in outcome.out
        assert outcome.err.startswith("error: ")
        assert "\nhint: " in outcome.err

    def test_is_2_for_no_ranks(self, cli):
        assert cli("doctor", "--gpus", "0").code == 2


def test_json_is_one_document(cli, found):
    found(report(measured=None))
    outcome = cli("doctor", "--json")
    document = json.loads(outcome.out)
    assert document["serves"] is False
    assert document["fabrics"]["cuda"] == "torch sees no CUDA device"
    assert document["machine"]["gpus"][0]["slowed_by"] == ["power cap"]


def test_the_host_fabric_is_measured(cli):
    outcome = cli("doctor", "--fabric", "host", "--gpus", "2", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["serves"] is True
    measured = document["measured"]
    assert (measured["world_size"], measured["interpreted"]) == (2, True)
    assert all(measured[name] for name in ("rates", "order", "barrier", "peers"))
    assert measured["signals"][0]["round_trip_us"] > 0
    assert not {"peer bandwidth", "signal round trip"} & set(document["problems"])
    assert document["advice"]


def test_help_loads_no_torch(process):
    script = (
        "import sys; from taxfree_cli.app import run; run(['doctor', '--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert process("-c", script).returncode == 0
