"""A command line to run: in this process, or as a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from taxfree_cli.app import run
from tests.rooms import PYTHONPATH


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """Run `taxfree` in this process, with a database of its own that does not exist yet."""
    for name in [name for name in os.environ if name.startswith("TAXFREE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TAXFREE_DB", str(tmp_path / "tuning.sqlite"))

    def call(*arguments: object) -> Outcome:
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python in a process of its own, with the rooms on its path."""

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHONPATH": PYTHONPATH,
            "TAXFREE_DB": str(tmp_path / "tuning.sqlite"),
        }
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture
def second_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the second of two nodes."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
