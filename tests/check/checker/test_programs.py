"""Programs of a launcher: the command runs them as they are on a world's ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from taxfree_cli.app import run

MAIN = f"{Path(__file__).with_name('program_example.py')}::main"


@pytest.fixture(autouse=True)
def _without_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "iris"]:
        monkeypatch.delitem(sys.modules, name)


def check(capfd: pytest.CaptureFixture[str], arguments: str) -> tuple[int, str, str]:
    code = run(["check", MAIN, "--ranks", "2", "--seeds", "5", "--program", arguments])
    return code, *capfd.readouterr()


def test_a_right_program_passes_and_leaves_nothing_behind(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = dict(os.environ), list(sys.argv)
    code, out, err = check(capfd, "--size 48")
    assert code == 0, err
    assert "right" not in out
    assert (dict(os.environ), list(sys.argv)) == before


def test_a_race_is_found_and_replayed(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capfd, "--size 48 --sem relaxed")
    assert code == 4
    assert "no acquire" in out
    assert "--program '--size 48 --sem relaxed' --first-seed" in err


def test_what_its_arguments_do_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = check(capfd, "--sizes")
    assert code == 1
    assert "raised SystemExit: 2" in err
