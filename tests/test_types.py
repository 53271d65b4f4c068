"""Types are consistent; a test, so that others run meanwhile."""

from __future__ import annotations

import subprocess

import pytest

from tests.ranks import PYTHON, ROOT


@pytest.mark.timeout(900)
def test_mypy_finds_nothing() -> None:
    pytest.importorskip("mypy")
    done = subprocess.run([PYTHON, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
