"""Compilers side by side, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.coverage import DEVICES
from taxfree_check.cross_compile.resources import Resources
from tests.rooms import SOURCES
from tests.tritons import FOLDERS, NEWEST

HERE = Path(__file__).parent


def run_python(*arguments: str, triton: str = NEWEST, **environment: str) -> str:
    """Standard output of a Python without an interpreter for kernels, under one of the Tritons."""
    paths = (FOLDERS[triton], *SOURCES, HERE)
    path = os.pathsep.join(str(each) for each in paths if each)
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class Snippets:
    """Compiles the kernels of ``snippets.py``, all for one compiler at once."""

    def __init__(self) -> None:
        self._done: dict[str, dict[str, Any]] = {}

    def compiled(self, name: str, device: str, triton: str) -> CompiledKernel:
        if triton not in self._done:
            script = str(HERE / "snippets.py")
            self._done[triton] = json.loads(run_python(script, *DEVICES, triton=triton))
        fields = self._done[triton][device][name]
        return CompiledKernel(**fields | {"resources": Resources(**fields["resources"])})


@pytest.fixture(scope="session")
def snippets() -> Snippets:
    return Snippets()
