"""Each row of the table, as a user would run it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taxfree_cli.app import run
from tests.bad_input.outcome import Outcome, assert_is_refused, content
from tests.bad_input.places import DATABASE, Place, tuned
from tests.bad_input.table import ROWS, Row
from tests.ranks import environment


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in [name for name in os.environ if name.startswith("TAXFREE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TAXFREE_DB", DATABASE)
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as until_end:
        found = Place(tmp_path, monkeypatch, until_end)
        tuned(found)
        yield found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.did)
def test_is_refused_in_one_line_with_a_hint_and_changes_nothing(
    row: Row, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in row.files.items():
        (place.folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for name, value in row.environment.items():
        place.patch.setenv(name, value)
    row.place(place)
    before = content(place.folder)
    outcome = call(row, place, capfd)
    after = content(place.folder)
    assert_is_refused(outcome, row.code, row.error, row.hint)
    assert after == before
    if "--json" in row.command and outcome.out:
        json.loads(outcome.out)
    else:
        assert outcome.out == ""


def call(row: Row, place: Place, capfd: pytest.CaptureFixture[str]) -> Outcome:
    arguments = shlex.split(row.command)
    if place.in_child is None:
        capfd.readouterr()
        return Outcome(run(arguments), *capfd.readouterr())
    with open(place.stdout, "wb") if place.stdout else contextlib.nullcontext(-1) as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "taxfree_cli.app", *arguments],
            env=environment(TAXFREE_DB=DATABASE),
            stdout=stdout,
            stderr=subprocess.PIPE,
            preexec_fn=place.in_child,
        )
    return Outcome(done.returncode, (done.stdout or b"").decode(), done.stderr.decode())


def test_each_row_has_a_name_of_its_own() -> None:
    assert len({row.did for row in ROWS}) == len(ROWS)
