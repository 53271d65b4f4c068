"""A PostgreSQL server of a test's own, from Debian's packages."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def is_here() -> bool:
    """Whether the server is installed."""
    return bool(_BINARIES) or shutil.which("initdb") is not None


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run a server; yields the URL of its database."""
    # Not below pytest's folder, which other users cannot enter; the server refuses to run as root.
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        data = f"{folder}/data"
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres")
        _run("initdb", "-D", data, "-U", "taxfree", "-A", "trust", "--no-sync")
        options = f"-p {port} -h 127.0.0.1 -k {folder} -F"
        _run("pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
        try:
            yield f"postgresql://taxfree@127.0.0.1:{port}/postgres"
        finally:
            _run("pg_ctl", "-D", data, "-m", "immediate", "stop")


def _run(program: str, *arguments: str) -> None:
    path = _BINARIES[-1] / program if _BINARIES else Path(program)
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    subprocess.run(
        [*as_user, str(path), *arguments],
        check=True,
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
