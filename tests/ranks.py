"""Real ranks for tests: worker groups of the host fabric, and copies of the kernels' tree."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from taxfree.group import WorkerGroup

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels"
OP = "all_gather_matmul"
HEAP_BYTES = 2 << 20
TIMEOUT_S = 30.0  # long: several groups share few cores
DEADLINE_S = 100.0


def variant_names() -> list[str]:
    """All variants of the operation, found without importing torch or triton."""
    folder = KERNELS / "taxfree_kernels" / OP
    return sorted(p.stem for p in folder.glob("*.py") if "\nVARIANT = " in p.read_text())


class Ranks:
    """One group per world size, started when it is first asked for, kept until `close`."""

    def __init__(self) -> None:
        self._groups: dict[int, WorkerGroup] = {}

    def __call__(self, world_size: int) -> WorkerGroup:
        group = self._groups.get(world_size)
        if group is None or not group.is_alive:
            group = WorkerGroup(world_size, "host", HEAP_BYTES, TIMEOUT_S)
            self._groups[world_size] = group
        return group

    def run(self, world_size: int, task: str, **arguments: Any) -> list[Any]:
        """What each rank returned from ``module:function``, by rank."""
        return self(world_size).call(task, DEADLINE_S, **arguments)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}


def processes(group: WorkerGroup) -> list[int]:
    """Process ids of a group, by rank."""
    return [process.pid for process in group._processes]


def replies_of_survivors(
    group: WorkerGroup, task: str, deadline_s: float, survivors: list[int], **arguments: Any
) -> dict[int, Any]:
    """Run a task in which ranks die or stop, which a group's own `call` would end at once."""
    for connection in group._connections:
        connection.send((task, arguments))
    connections = {group._connections[rank]: rank for rank in survivors}
    found: dict[int, Any] = {}
    deadline = time.monotonic() + deadline_s
    while len(found) < len(survivors) and time.monotonic() < deadline:
        missing = [c for c, rank in connections.items() if rank not in found]
        for ready in wait(missing, deadline - time.monotonic()):
            state, value = ready.recv()
            assert state == "done", value
            found[connections[ready]] = value
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Those of `pids` that still run after so long."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def copy_of_kernels(folder: Path, **modules: str) -> Path:
    """A copy of the kernels' source root, with modules added to the operation's folder."""
    root = folder / "kernels"
    shutil.copytree(KERNELS, root, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in modules.items():
        (root / "taxfree_kernels" / OP / f"{name}.py").write_text(text)
    return root


def replace_in(path: Path, pattern: str, replacement: str) -> None:
    """Change the one place of a file that matches."""
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count == 1, f"{pattern!r} matches {count} times in {path}"
    path.write_text(text)


def environment(kernels: Path = KERNELS, **variables: str) -> Mapping[str, str]:
    """For a process of its own that imports the rooms, with this source root of kernels."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TAXFREE_") and name != "TRITON_INTERPRET"
    }
    path = os.pathsep.join(map(str, (kernels, ROOT, ROOT / "tuning_db")))
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | variables


PYTHON = sys.executable
