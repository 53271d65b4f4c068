"""The states of a machine, a database and a terminal in which commands are tried.

Each function takes a `Place`, whose folder holds a tuned database, and spoils something of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import pickle
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from taxfree_kernels.variant import problem_class
from taxfree_tuning_db import Database, DatabaseFull, connection, export
from tests.tuning_db.examples import BASELINE, OP, TRIAL, record_of

DATABASE = "tuning.sqlite"
_DAC_CAPABILITIES = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_PR_CAPBSET_DROP = 24


@dataclass
class Place:
    """Where a command runs.

    Args:
        folder: the current folder, with the database.
        patch: of this process.
        until_end: what to undo after the command.
        in_child: if set, the command runs in a process of its own, which calls this first.
        stdout: a file that takes what that process prints.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    until_end: contextlib.ExitStack
    in_child: Callable[[], object] | None = None
    stdout: str | None = None

    @property
    def database(self) -> Path:
        return self.folder / DATABASE


def tuned(place: Place) -> None:
    """A database with a record and a trial of a current problem."""
    problem = problem_class(OP)(m=16, n=3584, k=8192, dtype="bfloat16", world_size=8)
    record = record_of(problem=asdict(problem))
    with Database(place.database) as database:
        database.put(record)
        database.add_trial(record.key, TRIAL)


# -- the database --


def no_database(place: Place) -> None:
    place.database.unlink()


def a_folder(place: Place) -> None:
    place.database.unlink()
    place.database.mkdir()


def a_path_through_a_file(place: Place) -> None:
    (place.folder / "file").touch()
    place.patch.setenv("TAXFREE_DB", "file/tuning.sqlite")


def not_sqlite(place: Place) -> None:
    place.database.write_text("no database at all\n" * 100)


def cut_off(place: Place) -> None:
    content = place.database.read_bytes()
    place.database.write_bytes(content[: len(content) // 2])


def damaged(place: Place) -> None:
    """All pages but the first, which holds the schema."""
    content = place.database.read_bytes()
    place.database.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


def of_another_program(place: Place) -> None:
    place.database.unlink()
    _change(place.database, "CREATE TABLE songs (title)")


def newer(place: Place) -> None:
    _change(place.database, "UPDATE meta SET value = '2' WHERE key = 'schema'")


def of_no_schema(place: Place) -> None:
    _change(place.database, "UPDATE meta SET value = ?", pickle.dumps(_Bait()))


def with_a_pickled_trial(place: Place) -> None:
    _change(place.database, "UPDATE trials SET value = ?", pickle.dumps(_Bait()))


def locked(place: Place) -> None:
    """By another process, which writes."""
    place.patch.setattr(connection, "BUSY_TIMEOUT_S", 0.05)
    script = (
        "import sqlite3, sys; other = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "other.execute('BEGIN EXCLUSIVE'); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(place.database)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    place.until_end.callback(writer.communicate)
    assert writer.stdout is not None
    writer.stdout.readline()


def full(place: Place) -> None:
    """SQLite may add no page: the error and its handling are those of a full disk."""
    connect = sqlite3.connect

    def limited(*arguments: object, **options: object) -> sqlite3.Connection:
        found: sqlite3.Connection = connect(*arguments, **options)  # type: ignore[call-overload]
        found.execute("PRAGMA max_page_count = 1")  # clamped to the pages that there are
        return found

    place.patch.setattr(sqlite3, "connect", limited)
    with Database(place.database) as database:
        for size in (1000, 100, 10, 1):  # leave no room on the pages that there are
            trial = replace(TRIAL, state="failed", reason="x" * size, median_us={})
            with contextlib.suppress(DatabaseFull):
                while True:
                    database.add_trial("filler", trial)


class _Bait:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("bait"),)


def _change(path: Path, statement: str, *values: object) -> None:
    """Change the file behind the store's back."""
    with contextlib.closing(sqlite3.connect(path)) as sqlite, sqlite:
        sqlite.execute(statement, values)


# -- permissions, disks and terminals --


def unreadable(place: Place) -> None:
    place.database.chmod(0)
    place.in_child = _obey_permissions


def read_only(place: Place) -> None:
    place.database.chmod(0o444)
    place.in_child = _obey_permissions


def in_a_read_only_folder(place: Place) -> None:
    place.folder.chmod(0o555)
    place.until_end.callback(place.folder.chmod, 0o755)
    place.in_child = _obey_permissions


def _obey_permissions() -> None:
    """Let files' modes bind root as they bind others: without two capabilities they do."""
    if os.geteuid() != 0:
        return
    for capability in _DAC_CAPABILITIES:
        if ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError("this root may not give up capabilities")


def no_room_for_files(place: Place) -> None:
    """A limit on the size of files: writing fails half-way, as on a full disk."""
    place.in_child = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def a_full_terminal(place: Place) -> None:
    """Stdout is a full disk."""
    place.in_child = os.getpid
    place.stdout = "/dev/full"


# -- GPUs, and what else there is not --


def no_gpus(place: Place) -> None:
    place.patch.setattr("torch.cuda.device_count", lambda: 0)


def two_gpus(place: Place) -> None:
    place.patch.setattr("torch.cuda.device_count", lambda: 2)


def a_broken_driver(place: Place) -> None:
    """The device is there, its tool fails, and torch sees nothing."""
    device, tool = place.folder / "nvidia0", place.folder / "nvidia-smi"
    device.touch()
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed: no communication >&2\nexit 9\n")
    tool.chmod(0o755)
    place.patch.setenv("PATH", str(place.folder), prepend=os.pathsep)
    place.patch.setattr("taxfree_tune.drivers.nvidia.DRIVER", device)
    no_gpus(place)


def ranks_that_fail(error: str) -> Callable[[Place], None]:
    """Rank processes whose fabric does not open, as it would not on GPUs.

    Args:
        error: the expression of what torch raises there.
    """

    def spoil(place: Place) -> None:
        (place.folder / "sitecustomize.py").write_text(
            "import sys\n"
            "if sys.argv[0] == '-m':\n"  # a module is started, and not imported yet
            "    import taxfree_kernels.fabric.open as fabrics, torch\n"
            "    def open_fabric(*_):\n"
            f"        raise {error}\n"
            "    fabrics.open_fabric = open_fabric\n"
        )
        place.patch.syspath_prepend(place.folder)
        place.patch.setattr(sys, "dont_write_bytecode", True)
        place.patch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    return spoil


# -- files --

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def config_json(**changes: object) -> str:
    """The config of a model, with some fields changed."""
    return json.dumps(CONFIG | changes)


def exported() -> str:
    """An export of one record."""
    text = io.StringIO()
    record = record_of(64, winner=BASELINE, runners_up=())
    today = {"weight_layout": "nk", "bias": False}
    export([replace(record, problem=record.problem | today)], text)
    return text.getvalue()


def a_pickle() -> bytes:
    """A file that leaves another one behind when it is unpickled."""
    return pickle.dumps(_Bait())


def alias_bomb() -> str:
    """A YAML file of a kilobyte that stands for 10^9 words."""
    lines = ["- &l0 [m, m, m, m, m, m, m, m, m, m]"]
    lines += [f"- &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    return "\n".join(lines)
