"""Kernels that note what they do: nothing of it in the usual build, all of it in the other."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.ranks import KERNELS, PYTHON, copy_of_kernels, environment

pytestmark = pytest.mark.xdist_group("timeline")  # the usual build is compiled once

COMPILE = """
import json, sys
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.cross_compile.compile import compile_launch
from taxfree_kernels.cross_compile.record import record
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import variants

problem = AllGatherMatmul(m=64, n=3584, k=8192, world_size=4)
found = {}
for gpu in sys.argv[1:]:
    hardware = KNOWN[gpu]
    config = variants("all_gather_matmul")["push"].seed_configs(problem, hardware)[0]
    (launch,) = record("all_gather_matmul", "push", problem, config, hardware)
    found[gpu] = compile_launch(launch, hardware).text
json.dump(found, sys.stdout)
"""
_NOTE = re.compile(r"\n *if trace.TIMELINE != \"\":\n *trace.note\([^\n]*\)")
_DEBUG = re.compile(r"^\s*(\.loc|\.file|\.section\s+\.debug|//|;|\$L__tmp|\.Ltmp).*$", re.MULTILINE)
_CLOCK = {"h200": "globaltimer", "mi300x": "s_memrealtime"}


def compiled(folder: Path, kernels: Path, *gpus: str, **variables: str) -> dict[str, str]:
    """Assembly of push by GPU, from a process that compiles these kernels."""
    cache = {"TRITON_CACHE_DIR": str(folder / f"cache{len(variables)}{kernels == KERNELS}")}
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", COMPILE, *gpus],
        env=environment(kernels, **cache, **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def instructions(text: str) -> list[str]:
    """Assembly without what says where it comes from."""
    code = re.split(r"\.section\s+\.debug|\.amdgpu_metadata", text)[0]
    lines = _DEBUG.sub("", code).splitlines()
    return [re.sub(r"\s*(//|;).*", "", line) for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("timeline")


@pytest.fixture(scope="module")
def usual(folder) -> dict[str, str]:
    return compiled(folder, KERNELS, *_CLOCK)


def test_the_usual_build_is_that_of_kernels_that_cannot_note(folder, usual):
    bare = copy_of_kernels(folder)
    found = 0
    for file in (bare / "taxfree_kernels/device").glob("*.py"):
        text, notes = _NOTE.subn("\n\n", file.read_text())
        found += notes
        assert re.findall(r"\n +trace\.note\(", text) == []  # all notes stand behind the switch
        file.write_text(text)
    assert found >= 5
    without = compiled(folder, bare, *_CLOCK)
    assert {what: instructions(text) for what, text in usual.items()} == {
        what: instructions(text) for what, text in without.items()
    }


def test_the_usual_build_reads_no_clock(usual):
    assert [what for what, text in usual.items() if _CLOCK[what] in text] == []


@pytest.mark.dealt("gpu")
@pytest.mark.parametrize(("gpu", "backend"), [("h200", "cuda"), ("mi300x", "hip")])
def test_the_other_build_reads_it_at_every_event(folder, gpu, backend):
    found = compiled(folder, KERNELS, gpu, TAXFREE_TIMELINE=backend)
    assert found[gpu].count(_CLOCK[gpu]) >= 5
