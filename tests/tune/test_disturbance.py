"""Busy and throttled GPUs, as the driver's tool would report them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from taxfree_tune.drivers import nvidia
from taxfree_tune.measuring import disturbance

OWN = os.getpid()


@pytest.fixture
def driver(monkeypatch):
    """A driver of GPUs 0 and 1, whose state a test changes; this rank is on GPU 1."""
    state = SimpleNamespace(reasons=0x1, percent="0", processes=[("GPU-b", OWN, "python")])

    def output(tool, query, *options):
        if query.startswith("--query-gpu=utilization"):
            return f"{state.percent}\n"
        if query.startswith("--query-gpu=index,uuid"):
            return "0, GPU-a\n1, GPU-b\n"
        if query.startswith("--query-compute-apps"):
            return "".join(f"{gpu}, {pid}, {name}, 1\n" for gpu, pid, name in state.processes)
        return f"1, H200, GPU-b, 1, 1, 345, 1980, 1, 1, 27, 70.0, 700.0, {state.reasons:#x}\n"

    monkeypatch.setattr(nvidia, "output", output)
    monkeypatch.setattr(disturbance, "vote", lambda group, value: [value])
    monkeypatch.setattr(disturbance, "_uuid", lambda device: "GPU-b")
    monkeypatch.setattr(disturbance, "_last_work", -10.0)
    return state


def watched(during=lambda: None):
    watch = disturbance.DisturbanceWatch(SimpleNamespace(group=None, device=torch.device("meta")))
    during()
    return watch.reasons()


def test_an_idle_gpu_of_our_own_disturbs_nothing(driver):
    assert watched() == ""
    driver.processes = []  # a container, where the driver shows none
    assert watched() == ""


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (0x1, ""),
        (0x4, ""),  # a power cap
        (0x2 | 0x10 | 0x100, ""),  # chosen clocks
        (0x8, "GPU 1 is slowed by hardware slowdown"),
        (0x20, "GPU 1 is slowed by heat (software)"),
        (0x4 | 0x40, "GPU 1 is slowed by heat (hardware)"),
        (0x80, "GPU 1 is slowed by power brake"),
    ],
)
def test_heat_and_brakes_disturb_and_a_power_cap_does_not(driver, reasons, said):
    assert watched(lambda: setattr(driver, "reasons", reasons)) == said


def test_another_process_on_the_gpu_disturbs(driver):
    driver.processes.append(("GPU-a", 12, "elsewhere"))
    assert watched() == ""
    driver.processes.append(("GPU-b", 4711, "serve"))
    assert watched() == "GPU 1 is shared with serve (4711)"


def test_where_the_driver_has_other_process_ids_they_are_counted(driver):
    driver.processes = [("GPU-b", 90_001, "python")]
    assert watched() == ""
    driver.processes.append(("GPU-b", 90_002, "serve"))
    assert "serve (90002)" in watched()


def test_a_gpu_in_use_before_our_work_disturbs_and_our_own_use_does_not(driver):
    driver.percent = "87"
    assert watched() == "GPU 1 is in use by 87 %"
    assert watched() == ""  # we have just used it
    driver.percent = "[N/A]"
    assert watched() == ""


def test_a_driver_that_does_not_answer_tells_nothing(driver, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("nvidia-smi failed (9): no devices")

    monkeypatch.setattr(nvidia, "output", broken)
    assert watched() == ""


def test_ranks_of_the_host_are_not_watched():
    assert disturbance._uuid(torch.device("cpu")) == ""
