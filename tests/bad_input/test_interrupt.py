"""Ctrl-C, or a scheduler, ends a command: what was finished is kept, and nothing else is left."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from taxfree_cli.exits import ExitCode
from taxfree_tuning_db import Database, DatabaseError
from tests.bad_input.outcome import Outcome, assert_is_refused
from tests.bad_input.table import INTERRUPTED
from tests.ranks import PYTHON, environment, wait_until_gone
from tests.taxfree.test_faults import shared_memory


@contextlib.contextmanager
def running(command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in `folder`, as the head of a group as in a terminal."""
    (folder / "tmp").mkdir()
    run = subprocess.Popen(
        [PYTHON, "-m", "taxfree_cli.app", *shlex.split(command)],
        env=environment(TAXFREE_DB=str(folder / "tuning.sqlite"), TMPDIR=str(folder / "tmp")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs, as this may be in one, ignore SIGINT, and so do their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


@pytest.fixture
def tuning(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A search that has stored a trial and goes on."""
    with running(INTERRUPTED.command, tmp_path) as run:
        while not trials(tmp_path / "tuning.sqlite"):
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        yield run


def trials(database: Path) -> list[tuple[str, str]]:
    """The stored trials."""
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
    known, shared = trials(tmp_path / "tuning.sqlite"), shared_memory()
    alive = processes_of(tuning.pid)
    assert len(alive) >= 3  # the controller and two ranks
    os.killpg(tuning.pid, signal.SIGINT)
    out, err = tuning.communicate(timeout=400)
    outcome = Outcome(tuning.returncode, out, err)
    assert_is_refused(outcome, INTERRUPTED.code, INTERRUPTED.error, INTERRUPTED.hint)
    assert outcome.out == ""
    assert wait_until_gone(alive, 60) == []
    assert shared_memory() <= shared
    assert list((tmp_path / "tmp").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "tuning.sqlite"}
    kept = trials(tmp_path / "tuning.sqlite")
    assert kept[: len(known)] == known
    with Database(tmp_path / "tuning.sqlite", read_only=True) as database:
        key = kept[0][0].rpartition(" #")[0]
        assert len(database.trials(key)) == len(kept)  # each of them whole


def test_a_bench_that_is_ended_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = f"bench --fabric host --gpus 2 --shapes 1,2,3,4,5x32x32 --out {file}"
    with running(command, tmp_path) as run:
        assert run.stdout is not None
        while "dispatch:" not in run.stdout.readline():  # the end of a problem
            assert run.poll() is None, run.communicate()
        alive = processes_of(run.pid)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=400) == INTERRUPTED.code
        assert wait_until_gone(alive, 60) == []
    measured = {row["problem"]["m"] for row in json.loads(file.read_text())["rows"]}
    assert 1 in measured
    assert 5 not in measured


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        [PYTHON, "-m", "taxfree_cli.app", "shapes"],
        env=environment(PYTHONPATH=paths),
        capture_output=True,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert ended.returncode == ExitCode.INTERRUPTED
    assert ended.stderr == "error: interrupted\nhint: nothing was begun\n"
