"""The controller's side of the rank workers: start them, give them tasks, and kill them.

Workers are disposable. One that dies, or misses its deadline, is killed with its whole group by
process id; the controller keeps what it knows and starts another group.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from taxfree.errors import HardwareError, TaxfreeError, WorkerLost
from taxfree_tune.workers.process import start_worker
from taxfree_tune.workers.supervisor import Supervised, process_of

if TYPE_CHECKING:
    from taxfree_kernels.fabric.base import Fabric

_P = ParamSpec("_P")
_T = TypeVar("_T")

START_DEADLINE_S = 180.0  # importing torch on a busy machine, and opening NCCL
_GRACE_S = 2.0


class TaskFailed(TaxfreeError):
    """A task raised on a rank; carries what the worker said of it."""

    def __init__(self, rank: int, details: dict[str, Any]) -> None:
        super().__init__(details["message"], details["hint"])
        self.rank = rank
        self.kind: str = details["kind"]
        self.exit_code = details["exit_code"]  # type: ignore[misc]
        self.add_note(details["traceback"])  # shown with TAXFREE_DEBUG


class WorkerGroup(contextlib.AbstractContextManager["WorkerGroup"]):
    """One process per rank on this node, with a fabric open among them.

    This process starts them; where a launcher has started a process for each rank, each of those
    starts its own (:mod:`taxfree_tune.workers.supervisor`).

    Args:
        world_size: ranks; rank r takes GPU r, or shares GPU r modulo their number where they are
            fewer and the `variables` allow it (see :mod:`taxfree_kernels.fabric.gpu`).
        fabric: "host", "cuda" or "rocm".
        heap_bytes: symmetric heap of each rank.
        timeout_s: longest wait inside kernels, in seconds.
        variables: environment variables of the workers, added to this process's.

    Raises:
        TaskFailed: the fabric cannot be opened; the message says why.
        WorkerLost: a worker died during start-up, or did not start in time.
    """

    def __init__(
        self,
        world_size: int,
        fabric: str,
        heap_bytes: int,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._variables = dict(variables or {})
        self._folder = tempfile.TemporaryDirectory(prefix="taxfree-")
        self._processes: list[subprocess.Popen[bytes] | Supervised] = []
        self._connections: list[Connection] = []
        try:
            # Not a FileStore, which may wait for ever for a file that a peer has deleted.
            with socket.create_server(("127.0.0.1", 0)) as store:
                for rank in range(world_size):
                    self._start(rank, fabric, heap_bytes, timeout_s, store)
            self.hardware = self._replies("open", time.monotonic() + START_DEADLINE_S)[0]
        except BaseException:
            self.kill()
            raise

    def _start(
        self, rank: int, fabric: str, heap_bytes: int, timeout_s: float, store: socket.socket
    ) -> None:
        ours, theirs = Pipe()
        options = {
            "rank": rank,
            "world_size": self.world_size,
            "heap_bytes": heap_bytes,
            "timeout_s": timeout_s,
            "store_port": store.getsockname()[1],
            "store_socket": store.fileno(),
            "fabric": fabric,
        }
        process: subprocess.Popen[bytes] | Supervised | None = process_of(rank)
        with open(self._log(rank), "wb") as log:
            files = theirs.fileno(), log.fileno()
            if isinstance(process, Supervised):
                process.start(options, self._variables, *files)
            else:
                inherited = [store.fileno()] if rank == 0 else []
                process = start_worker(options, self._variables, *files, inherited)
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)

    def call(
        self,
        task: Callable[Concatenate[Fabric, _P], _T],
        deadline_s: float,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> list[_T]:
        """Run a function on every rank, on its fabric, and return the results by rank.

        Args:
            task: a module's own function; workers import it by name.
            deadline_s: seconds after which the group counts as hung.

        Raises:
            TaskFailed: it raised on some rank; if others did not finish, or the driver or fabric
                failed, the group is killed.
            WorkerLost: a worker died, or the deadline passed; the group is killed.
        """
        name = f"{task.__module__}:{task.__qualname__}"
        with self._killed_on_error():
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send((name, args, kwargs))
                except OSError:
                    raise self._lost(rank, name) from None
            return self._replies(name, time.monotonic() + deadline_s)

    def _replies(self, task: str, deadline: float) -> list[Any]:
        replies: dict[int, tuple[str, Any]] = {}
        while len(replies) < self.world_size:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in replies
            }
            for ready in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                try:
                    replies[waiting[ready]] = ready.recv()
                except (EOFError, OSError):
                    raise self._lost(waiting[ready], task) from None
            failed = [rank for rank, (state, _) in replies.items() if state == "failed"]
            if failed:
                # The others may be in a collective with the rank that failed.
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() >= deadline and len(replies) < self.world_size:
                # Those that failed because they waited for a peer name it less well.
                if not all(replies[rank][1]["is_secondary"] for rank in failed):
                    raise _PartialFailure(*cause(replies))
                late = sorted(set(range(self.world_size)) - set(replies))
                raise WorkerLost(
                    f"{_ranks(late)} did not finish {task.rpartition(':')[2]} in time",
                    "a hang; the other ranks were ended with it",
                    is_late=True,
                )
        if failed:
            raise TaskFailed(*cause(replies))
        return [replies[rank][1] for rank in range(self.world_size)]

    def _lost(self, rank: int, task: str) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(_GRACE_S)
        code = self._processes[rank].returncode
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        said = self._log(rank).read_text(errors="replace").strip().splitlines()
        last = f"; it said: {said[-1][:200]}" if said else ""
        return WorkerLost(
            f"rank {rank} died in {task.rpartition(':')[2]} ({how}){last}",
            "out of memory, a broken driver, or killed by somebody",
        )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank{rank}.log")

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except TaskFailed as error:
            # After an error of the driver all fails that the same processes try from then on.
            if isinstance(error, _PartialFailure) or error.exit_code == HardwareError.exit_code:
                self.kill()
            raise
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return bool(self._processes)

    def kill(self) -> None:
        """End every worker at once."""
        for process in self._processes:
            process.kill()
        self._forget()

    def close(self) -> None:
        """Let the workers end; kill those that do not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 5 * _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        self._forget()

    def _forget(self) -> None:
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


class RankGroup(Protocol):
    """Ranks that run tasks: `WorkerGroup`, or those of :mod:`taxfree_tune.workers.local`."""

    def call(
        self,
        task: Callable[Concatenate[Fabric, _P], _T],
        deadline_s: float,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> list[_T]:
        """See `WorkerGroup.call`."""


class Groups(Protocol):
    """Where ranks come from: `Workers`, or those of :mod:`taxfree_tune.workers.local`."""

    def group(self) -> RankGroup:
        """See `Workers.group`."""


class Workers(contextlib.AbstractContextManager["Workers"]):
    """A worker group that is started again after it was lost.

    Args:
        start: starts a group.
        starts: how often at most; None for any number.
    """

    def __init__(self, start: Callable[[], WorkerGroup], starts: int | None = None) -> None:
        self._start, self._starts_left = start, starts
        self._group: WorkerGroup | None = None

    def group(self) -> WorkerGroup:
        """The group, alive.

        Raises:
            TaxfreeError: it was lost, and may not be started again.
            TaskFailed, WorkerLost: it does not start.
        """
        if self._group is None or not self._group.is_alive:
            if self._starts_left is not None:
                if self._starts_left == 0:
                    raise TaxfreeError("not tried, as the ranks were lost before")
                self._starts_left -= 1
            self._group = self._start()
        return self._group

    def __exit__(self, *error: Any) -> None:
        if self._group is not None:
            self._group.__exit__(*error)


class _PartialFailure(TaskFailed):
    """A task raised on some ranks while others went on waiting for them."""


def cause(replies: Mapping[int, tuple[str, Any]]) -> tuple[int, dict[str, Any]]:
    """A rank that failed, and its `TaskFailed` details, as close to the cause as can be told.

    A driver's failure comes before all others, because these may be timeouts of ranks that waited
    for that one. A timeout that only follows another rank's comes last. Otherwise the first that
    was told is taken.
    """
    failures = [(rank, details) for rank, (state, details) in replies.items() if state == "failed"]

    def distance(failure: tuple[int, dict[str, Any]]) -> tuple[bool, bool]:
        _, details = failure
        return details["exit_code"] != HardwareError.exit_code, details["is_secondary"]

    return min(failures, key=distance)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
