"""The kernels around the clock: interpreted here, and compiled for GPUs that are not."""

from __future__ import annotations

import json
import time

import pytest
import torch

from taxfree_tune.profiling import step_clock
from tests.check.cross_compile.conftest import run_python

INTERPRETED = {"BACKEND": "interpreter"}
COMPILE = """
import json, sys
import torch
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import Launch
from taxfree_tune.profiling import step_clock
from taxfree_kernels.device.peers import Group
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import Kernel

log = torch.empty(1 << 10, dtype=torch.int64, device="meta")
found = {}
for name in ("h200", "mi300x"):
    gpu = KNOWN[name]
    clock, group = {"BACKEND": gpu.backend}, {"GROUP": Group(8, gpu.backend)}
    launches = {
        "read_clock": (step_clock.read_clock, clock, (log, 3)),
        "empty": (step_clock.empty, {}, (log,)),
        "clock_step": (step_clock.clock_step, clock, (log, 2000)),
        "exchange": (step_clock.exchange_clocks, group, (log, log, log, 0, 1, 1, 50)),
    }
    for what, (function, constants, args) in launches.items():
        kernel = Kernel(function, 1, constants, {"num_warps": 1})
        found[f"{name} {what}"] = compile_launch(Launch(kernel, args), gpu).text
json.dump(found, sys.stdout)
"""


def log(size: int = 4) -> torch.Tensor:
    return torch.full((size,), -1, dtype=torch.int64)


def test_a_reading_is_the_time_of_its_launch():
    found = log()
    before = time.perf_counter_ns()
    step_clock.read_clock[(1,)](found, 2, **INTERPRETED)
    after = time.perf_counter_ns()
    assert before < found[2] < after
    assert found[[0, 1, 3]].tolist() == [-1, -1, -1]


def test_the_step_of_the_clock_is_the_least_that_was_seen():
    found = log(1)
    begin = time.perf_counter_ns()
    step_clock.clock_step[(1,)](found, 5, **INTERPRETED)
    assert 0 < found[0] <= (time.perf_counter_ns() - begin) / 5


def test_an_empty_kernel_leaves_everything_alone():
    found = log()
    step_clock.empty[(1,)](found)
    assert found.tolist() == [-1] * 4


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, str]:
    """GPU and kernel -> assembly, from a process that does not interpret."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return json.loads(run_python("-c", COMPILE, TRITON_CACHE_DIR=cache))


@pytest.mark.parametrize(
    ("gpu", "clock"),
    [("h200", "%globaltimer"), ("mi300x", "s_memrealtime")],
)
class TestCompiled:
    def test_a_reading_reads_the_clock_once(self, compiled, gpu, clock):
        assert compiled[f"{gpu} read_clock"].count(clock) == 1

    def test_an_exchange_reads_it_before_and_after(self, compiled, gpu, clock):
        assert compiled[f"{gpu} exchange"].count(clock) == 2

    def test_nothing_is_nothing(self, compiled, gpu, clock):
        text = compiled[f"{gpu} empty"]
        assert "st.global" not in text
        assert "global_store" not in text


def test_amd_waits_for_its_clock(compiled):
    text = compiled["mi300x read_clock"]
    assert "s_waitcnt lgkmcnt(0)" in text[text.index("s_memrealtime") :]
