"""Real ranks for tests: worker groups of the host fabric and of GPUs; copies of the kernels' tree.

A test that runs on GPUs as well takes ``ranks`` of each fabric::

    @on_every_fabric
    def test_it(ranks): ...
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import shutil
import sys
import time
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from taxfree_tune.workers.group import WorkerGroup
from tests.rooms import PYTHONPATH, ROOT

KERNELS = ROOT / "kernels"
OP = "all_gather_matmul"
HEAP_BYTES = 4 << 20
GPU_HEAP_BYTES = 512 << 20  # two slots of what the doctor's probes move
TIMEOUT_S = 30.0  # long: several groups share few cores
DEADLINE_S = 400.0  # less than a test may take


#: variants without kernels of ours that wait for peers
LIBRARY = ("baseline", "splits")
#: variants that the host fabric cannot serve: they need NCCL, CUDA, a compiled kernel, or nodes
ELSEWHERE = ("rail", "registered", "torch_fused", "torch_symm_mem", "warp_specialized")
#: operations whose ranks exchange nothing
LOCAL = ("attention",)


def variant_names(op: str = OP) -> list[str]:
    """All variants of an operation, found without importing torch or triton."""
    folder = KERNELS / "taxfree_kernels" / op
    return sorted(p.stem for p in folder.rglob("*.py") if "\nVARIANT = " in p.read_text())


def served_names(op: str = OP) -> list[str]:
    """Those that the host fabric serves."""
    return [name for name in variant_names(op) if name not in ELSEWHERE]


def our_names(op: str = OP) -> list[str]:
    """Those that have kernels of ours."""
    return [name for name in served_names(op) if name not in LIBRARY]


def gather_dims(variant: str) -> tuple[int, ...]:
    """The dimensions in which a variant of all_gather_matmul gathers."""
    return {"overlap": (0,), "push_specialized": (1,)}.get(variant, (0, 1))


#: for tests and classes of tests: once with ranks of the host, and once, marked `gpu`, of GPUs
on_every_fabric = pytest.mark.parametrize(
    "fabric", ["host", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@cache
def gpus() -> int:
    """GPUs of this machine; none are initialised."""
    import torch

    return torch.cuda.device_count()


def require(world_size: int, fabric: str) -> None:
    """Skip a test where there are fewer GPUs than ranks."""
    if fabric != "host" and gpus() < world_size:
        pytest.skip(f"needs {world_size} GPUs, {gpus()} are there")


def start_group(world_size: int, fabric: str, heap_bytes: int | None = None) -> WorkerGroup:
    """Start ranks for a test; where there are fewer GPUs than ranks, they share them."""
    if heap_bytes is None:
        heap_bytes = HEAP_BYTES if fabric == "host" else GPU_HEAP_BYTES
    if fabric == "host" or world_size <= gpus():
        return WorkerGroup(world_size, fabric, heap_bytes, TIMEOUT_S)
    require(1, fabric)
    from taxfree_kernels.fabric.gpu import SHARING

    return WorkerGroup(world_size, fabric, heap_bytes, TIMEOUT_S, {SHARING: "1"})


def several(fabric: str) -> int:
    """Three ranks; two where there are two GPUs, which they then need not share."""
    return 2 if fabric != "host" and gpus() == 2 else 3


class Ranks:
    """One group per world size, started when it is first asked for, kept until `close`.

    Args:
        fabric: "host" or "cuda".
    """

    def __init__(self, fabric: str = "host") -> None:
        self.fabric = fabric
        self._groups: dict[int, WorkerGroup] = {}

    @property
    def few(self) -> int:
        """A world size for tests to which any will do.

        Small where kernels are interpreted. On GPUs it is that of the tests which want three
        ranks, since starting another group takes longer than all that it would run.
        """
        return 2 if self.fabric == "host" else self.several

    @property
    def several(self) -> int:
        """A world size with more than two ranks, where there are so many."""
        return several(self.fabric)

    def __call__(self, world_size: int) -> WorkerGroup:
        group = self._groups.get(world_size)
        if group is None or not group.is_alive:
            group = self._groups[world_size] = start_group(world_size, self.fabric)
        return group

    def run(self, world_size: int, task: str, **arguments: Any) -> list[Any]:
        """What each rank returned from ``module:function``, by rank."""
        return self(world_size).call(_run_and_close, DEADLINE_S, task, arguments)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}


def _run_and_close(fabric: Any, task: str, arguments: dict[str, Any]) -> Any:
    """A test's function; then the end of runtimes that it left open, as models' layers do.

    The next test has the same processes, where `taxfree.autotune` would tune for them, too. It has
    the environment that was there before, with the user's own database.
    """
    from taxfree._runtime.runtime import runtimes

    with mock.patch.dict(os.environ):
        result = pkgutil.resolve_name(task)(fabric, **arguments)
    for runtime in runtimes():
        if runtime._fabric is fabric:
            runtime._retire()
        else:
            runtime._release()
    return result


def processes(group: WorkerGroup) -> list[int]:
    """Process ids of a group, by rank."""
    return [process.pid for process in group._processes]


def workers_of(controller: int) -> list[int]:
    """Process ids of the rank workers that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if f"--controller={controller}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def replies_of_survivors(
    group: WorkerGroup, task: str, deadline_s: float, survivors: list[int], **arguments: Any
) -> dict[int, Any]:
    """Run a task in which ranks die or stop, which a group's own `call` would end at once."""
    for connection in group._connections:
        connection.send((task, (), arguments))
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
    path = os.pathsep.join([str(kernels), PYTHONPATH, *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | variables


PYTHON = sys.executable
