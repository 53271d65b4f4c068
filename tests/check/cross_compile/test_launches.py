"""A recorded launch is specialised, and found in Triton's cache, as a real one would be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tritons import TRITONS

from .conftest import run_python

pytestmark = pytest.mark.dealt("triton")

#: Prints, in turn, how Triton's launcher specialises recorded arguments and real tensors.
SPECIALISE = """
import itertools, json
import torch, triton
from triton import knobs
from taxfree_check.cross_compile.compile import AbsentDevice, target_of
from taxfree_check.cross_compile.record import record
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants

seen = []
def hook(*, key, compile, **rest):
    seen.append([str(key), str(compile["signature"]), str(compile["constants"]),
                 str(compile["configs"])])
    return True  # do not compile
knobs.runtime.jit_cache_hook = hook

for device, m in itertools.product(("h200", "mi300x"), (1, 16, 77)):
    problem = problem_class("all_gather_matmul")(m=m, n=256, k=512, world_size=2)
    hardware = KNOWN[device]
    triton.runtime.driver.set_active(AbsentDevice(target_of(hardware)))
    for name, variant in variants("all_gather_matmul").items():
        if variant.unsupported_reason(problem, hardware):
            continue
        config = variant.seed_configs(problem, hardware)[0]
        for launch in record("all_gather_matmul", name, problem, config, hardware):
            kernel = launch.kernel
            given = dict(**kernel.constants, **kernel.options)
            kernel.function.warmup(*launch.args, grid=(kernel.grid,), **given)
            real = [torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype)
                    if isinstance(arg, torch.Tensor) else arg for arg in launch.args]
            kernel.function[(kernel.grid,)](*real, **given)
knobs.runtime.jit_cache_hook = None
print(json.dumps(seen))
"""

#: Prints the keys under which two kernels are in Triton's cache.
KEYS = """
import json
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import record
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants

problem = problem_class("all_gather_matmul")(m=16, n=256, k=512, world_size=2)
keys = []
for device in ("h200", "mi300x"):
    hardware = KNOWN[device]
    config = variants("all_gather_matmul")["push"].seed_configs(problem, hardware)[0]
    for launch in record("all_gather_matmul", "push", problem, config, hardware):
        keys.append(compile_launch(launch, hardware).cache_key)
print(json.dumps(keys))
"""

#: Prints the arguments that a launcher gets when one kernel is launched with different tensors.
AGAIN = """
import json
import torch, triton
from taxfree_check.cross_compile.compile import AbsentDevice, target_of
from taxfree_tune.measuring import probes
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import Kernel

def text(given):
    return str(getattr(given, "shape", given)).partition(" object at")[0]

class Utils:
    def load_binary(self, *given):
        return 0, 0, 32, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 17}

class Driver(AbsentDevice):
    utils = Utils()
    def launcher_cls(self, source, metadata):
        kernel = len(kernels)
        kernels.append(metadata.name)
        def launch(*given):
            launches.append([kernel, [text(each) for each in given]])
        return launch
    def get_current_device(self):
        return 0

kernels, launches = [], []
triton.runtime.driver.set_active(Driver(target_of(KNOWN["h200"])))
kernel = Kernel(probes.start_order, 8, {"XCDS": 1, "BACKEND": "cuda", "BUSY": 4})
words = torch.zeros(64, dtype=torch.int32)
held = Kernel(
    probes.start_order, 8, {"XCDS": 1, "BACKEND": "cuda", "BUSY": 4}, last_args=(words, words)
)
for counter in (words[:1], words[4:5], words[1:2], words[:1]):
    kernel(counter, words, words)
    held(counter)
print(json.dumps([launches[::2], launches[1::2], len(kernel._runners), len(held._runners)]))
"""


@pytest.fixture(scope="module", params=TRITONS)
def triton(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def printed(triton: str) -> list[Any]:
    """The output of all three scripts, which share a process: most of their time is imports."""
    output = run_python("-c", SPECIALISE + KEYS + AGAIN, triton=triton, PYTHONHASHSEED="1")
    return [json.loads(line) for line in output.splitlines()]


def test_a_recorded_launch_is_specialised_as_a_real_one(printed: list[Any]) -> None:
    seen, _, _ = printed
    assert len(seen) >= 6 * 2 * 4
    for recorded, real in zip(seen[::2], seen[1::2], strict=True):
        assert recorded == real


def test_the_cache_key_is_the_same_in_each_process(printed: list[Any], triton: str) -> None:
    _, keys, _ = printed
    assert json.loads(run_python("-c", KEYS, triton=triton, PYTHONHASHSEED="2")) == keys
    assert len(set(keys)) == len(keys) == 2


def test_a_remembered_kernel_is_launched_as_triton_would(printed: list[Any]) -> None:
    _, _, (launches, with_held, *kinds) = printed
    assert with_held == launches
    aligned, again, unaligned, as_before = launches
    assert again == as_before == aligned
    assert unaligned[0] != aligned[0]
    assert unaligned[1] == aligned[1]
    assert kinds == [2, 2]
