"""Kernels that note what they do: nothing of it in the usual build, all of it in the other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.ranks import KERNELS, PYTHON, copy_of_kernels, environment

COMPILE = """
import sys
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_check.cross_compile.compile import compile_launch
from taxfree_check.cross_compile.record import record
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import variants

problem = AllGatherMatmul(m=64, n=3584, k=8192, world_size=4)
hardware = KNOWN[sys.argv[1]]
config = variants("all_gather_matmul")["push"].seed_configs(problem, hardware)[0]
(launch,) = record("all_gather_matmul", "push", problem, config, hardware)
print(compile_launch(launch, hardware).text)
"""
_NOTE = re.compile(r"\n *if (sync\.)?TIMELINE != \"\":\n *(sync\.)?note\([^\n]*\)")
_DEBUG = re.compile(r"^\s*(\.loc|\.file|\.section\s+\.debug|//|;|\$L__tmp|\.Ltmp).*$", re.MULTILINE)
_CLOCK = {"h200": "globaltimer", "mi300x": "s_memrealtime"}
_BACKEND = {"h200": "cuda", "mi300x": "hip"}
pytestmark = pytest.mark.dealt("gpu")


def compiled(folder: Path, kernels: Path, gpu: str, **variables: str) -> str:
    """Assembly of push, from a process that compiles these kernels."""
    cache = {"TRITON_CACHE_DIR": str(folder / f"cache{len(variables)}{kernels == KERNELS}")}
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", COMPILE, gpu],
        env=environment(kernels, **cache, **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def instructions(text: str) -> list[str]:
    """Assembly without what says where it comes from."""
    code = re.split(r"\.section\s+\.debug|\.amdgpu_metadata", text)[0]
    lines = _DEBUG.sub("", code).splitlines()
    return [re.sub(r"\s*(//|;).*", "", line) for line in lines if line.strip()]


@pytest.fixture(scope="module", params=_CLOCK)
def gpu(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gpu) -> Path:
    return tmp_path_factory.mktemp(f"timeline-{gpu}")


@pytest.fixture(scope="module")
def usual(folder, gpu) -> str:
    return compiled(folder, KERNELS, gpu)


def test_the_usual_build_is_that_of_kernels_that_cannot_note(folder, gpu, usual):
    bare = copy_of_kernels(folder)
    found = 0
    for file in (bare / "taxfree_kernels/device").glob("*.py"):
        text, notes = _NOTE.subn("\n\n", file.read_text())
        found += notes
        assert re.findall(r"\n +(?:sync\.)?note\(", text) == []  # all notes stand behind the switch
        file.write_text(text)
    assert found >= 5
    assert instructions(usual) == instructions(compiled(folder, bare, gpu))


def test_the_usual_build_reads_no_clock(gpu, usual):
    assert _CLOCK[gpu] not in usual


def test_the_other_build_reads_it_at_every_event(folder, gpu):
    found = compiled(folder, KERNELS, gpu, TAXFREE_TIMELINE=_BACKEND[gpu])
    assert found.count(_CLOCK[gpu]) >= 5
