"""Ctrl-C while `taxfree tune` measures: what was finished is kept, and nothing else is left."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from taxfree_tuning_db import Database, DatabaseError
from tests.bad_input.outcome import Outcome, assert_is_refused
from tests.bad_input.table import INTERRUPTED
from tests.ranks import PYTHON, environment, wait_until_gone


@pytest.fixture
def tuning(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has stored a trial and goes on, as the head of a group as in a terminal."""
    (tmp_path / "tmp").mkdir()
    database = tmp_path / "tuning.sqlite"
    run = subprocess.Popen(
        [PYTHON, "-m", "taxfree_cli.app", *shlex.split(INTERRUPTED.command)],
        env=environment(TAXFREE_DB=str(database), TMPDIR=str(tmp_path / "tmp")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs, as this may be in one, ignore SIGINT, and so do their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not trials(database):
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def trials(database: Path) -> list[tuple[str, str]]:
    """What has been stored of all trials."""
    with contextlib.suppress(DatabaseError), Database(database, read_only=True) as found:
        return found._connection.select("SELECT key, value FROM trials ORDER BY key")
    return []


def processes_of(group: int) -> list[int]:
    """Ids of all processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(stat.parent.name))
    return found


def test_an_interrupted_search_keeps_what_it_found(
    tuning: subprocess.Popen[str], tmp_path: Path
) -> None:
    known, shared = trials(tmp_path / "tuning.sqlite"), set(os.listdir("/dev/shm"))
    running = processes_of(tuning.pid)
    assert len(running) >= 3  # the controller and two ranks
    os.killpg(tuning.pid, signal.SIGINT)
    out, err = tuning.communicate(timeout=60)
    outcome = Outcome(tuning.returncode, out, err)
    assert_is_refused(outcome, INTERRUPTED.code, INTERRUPTED.error, INTERRUPTED.hint)
    assert outcome.out == ""
    assert wait_until_gone(running, 5) == []
    assert set(os.listdir("/dev/shm")) <= shared
    assert list((tmp_path / "tmp").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "tuning.sqlite", "tuning.journal"}
    kept = trials(tmp_path / "tuning.sqlite")
    assert kept[: len(known)] == known
    with Database(tmp_path / "tuning.sqlite", read_only=True) as database:
        key = kept[0][0].rpartition(" #")[0]
        assert len(database.trials(key)) == len(kept)  # each of them whole
