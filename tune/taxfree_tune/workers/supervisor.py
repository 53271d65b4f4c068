"""Processes of a launcher as the ranks of their node.

The first process of a node is the controller. Each other one supervises the worker of its rank: it
starts it, on its own processor cores and with its own environment, ends it, and starts another, as
the controller says. So workers stay disposable, while the launcher's processes live to the end.

They speak through a Unix socket, which passes the descriptors of the worker's pipe and log. Its
name is abstract: nothing is left behind. Each side makes sure that the other belongs to this user.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from taxfree.errors import TaxfreeError, UsageError, WorkerLost
from taxfree_tune.workers.launch import LaunchedProcess, too_many
from taxfree_tune.workers.process import start_worker

_JOIN_S = 120.0  # for all processes of a node: launchers start them at about the same time
_END_S = 30.0  # for those that the controller's command did not wait for
_RETRY_S = 0.05
_MOST_BYTES = 1 << 16  # of a message
_JOB_VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip


class Supervised:
    """A rank whose worker another process starts; what :class:`subprocess.Popen` is to a worker.

    Attributes:
        returncode: of the worker that was started last; None while it runs.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._rank, self._connection = rank, connection
        self.returncode: int | None = None

    def start(
        self, options: Mapping[str, Any], variables: Mapping[str, str], connection: int, log: int
    ) -> None:
        """Start a worker; arguments as of `start_worker`.

        Raises:
            WorkerLost: the launcher's process has ended.
        """
        self.returncode = None
        order = json.dumps({"options": options, "variables": dict(variables)}).encode()
        self._connection.settimeout(None)
        try:
            socket.send_fds(self._connection, [order], [connection, log])
        except OSError:
            raise WorkerLost(
                f"the process that the launcher started as rank {self._rank} has ended",
                "see what it printed, and what the launcher says of it",
            ) from None

    def kill(self) -> None:
        """End the worker at once; without one, nothing happens."""
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps({"kill": True}).encode())

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the worker has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                told = self._connection.recv(_MOST_BYTES)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("worker", timeout or 0.0) from None
            except OSError:
                told = b""
            # Without an answer its supervisor has ended, and the worker with it.
            self.returncode = json.loads(told)["ended"] if told else -signal.SIGKILL
        return self.returncode

    def end(self, code: int) -> None:
        """Let the launcher's process exit with this status."""
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps({"exit": code}).encode())
        self._connection.close()


class Supervisors(AbstractContextManager["Supervisors"]):
    """The controller's side: the other processes of its node, each of which supervises a rank.

    At its end they exit with `code`.

    Args:
        launch: of the first process of a node.

    Raises:
        UsageError: another process is the first one already.
    """

    def __init__(self, launch: LaunchedProcess) -> None:
        self._launch = launch
        self._joined: dict[int, Supervised] = {}
        self._listener = _socket()
        self.code = 1
        try:
            self._listener.bind(_address(launch))
        except OSError:
            self._listener.close()
            raise UsageError(
                "another process is rank 0 of this node",
                "each process needs a LOCAL_RANK of its own",
            ) from None
        self._listener.listen(launch.local_ranks)

    def __enter__(self) -> Supervisors:
        global _current
        _current = self
        return self

    def of(self, rank: int) -> Supervised:
        """The supervisor of a rank; waits until its process has started.

        Raises:
            UsageError: the launcher has started fewer processes.
            WorkerLost: it does not start.
        """
        if rank >= self._launch.local_ranks:
            raise UsageError(*too_many(rank + 1, self._launch.local_ranks, self._launch.nodes))
        self._await([rank], _JOIN_S)
        if rank not in self._joined:
            raise WorkerLost(
                f"rank {rank} did not start within {_JOIN_S:.0f} s",
                f"the launcher promises {self._launch.local_ranks} processes on this node",
            )
        return self._joined[rank]

    def _await(self, ranks: list[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._joined.keys() >= set(ranks) and time.monotonic() < deadline:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            with contextlib.suppress(OSError, ValueError):
                connection, _ = self._listener.accept()
                connection.settimeout(_END_S)
                if _is_of_this_user(connection):
                    rank = int(connection.recv(_MOST_BYTES))
                    self._joined[rank] = Supervised(rank, connection)

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None
        # The launcher may end what is left as soon as the first process has ended.
        _on_signals(signal.SIG_IGN)
        self._await(list(range(1, self._launch.local_ranks)), _END_S)
        for supervised in self._joined.values():
            supervised.end(self.code)
        self._listener.close()


_current: Supervisors | None = None


def process_of(rank: int) -> Supervised | None:
    """The rank's process of the launcher; None where the worker is this process's to start.

    Raises:
        UsageError, WorkerLost: as of `Supervisors.of`.
    """
    return None if _current is None or rank == 0 else _current.of(rank)


def supervise(launch: LaunchedProcess) -> int:
    """Start and end the workers of this process's rank until the controller ends.

    Returns:
        The exit status that the controller gave.

    Raises:
        WorkerLost: the controller has not started, or died.
    """
    # The controller gets them too, and decides. Unlike SIG_IGN this is not inherited by the worker.
    _on_signals(lambda *_: None)
    worker: subprocess.Popen[bytes] | None = None
    with _connected(launch) as controller:
        try:
            while True:
                message, files, _, _ = socket.recv_fds(controller, _MOST_BYTES, 2)
                if not message:
                    raise WorkerLost("the first rank of this node has died")
                order = json.loads(message)
                if "exit" in order:
                    return int(order["exit"])
                if "kill" in order:
                    if worker is not None:
                        worker.kill()
                    continue
                connection, log = files
                worker = start_worker(order["options"], order["variables"], connection, log)
                os.close(connection)
                os.close(log)
                threading.Thread(target=_report_end, args=(worker, controller), daemon=True).start()
        finally:
            # The controller may end before the launcher's signal comes here. Python, as it ends,
            # puts SIG_DFL in the place of functions: this process would die of the signal.
            _on_signals(signal.SIG_IGN)
            if worker is not None:
                worker.kill()


def _on_signals(handler: Any) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, handler)


def _report_end(worker: subprocess.Popen[bytes], controller: socket.socket) -> None:
    code = worker.wait()
    with contextlib.suppress(OSError):
        controller.send(json.dumps({"ended": code}).encode())


def _connected(launch: LaunchedProcess) -> socket.socket:
    """A connection to the controller of this node."""
    deadline = time.monotonic() + _JOIN_S
    while True:
        controller = _socket()
        try:
            controller.connect(_address(launch))
            if not _is_of_this_user(controller):
                raise TaxfreeError("another user's process answers as rank 0 of this node")
            controller.send(str(launch.local_rank).encode())
            return controller
        except OSError:
            controller.close()
        if time.monotonic() > deadline:
            raise WorkerLost(
                "the first rank of this node did not start", "see what it printed"
            ) from None
        time.sleep(_RETRY_S)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(launch: LaunchedProcess) -> str:
    """A name that only the processes of one node of one launch have."""
    job = [os.environ.get(name, "") for name in _JOB_VARIABLES]
    text = json.dumps([os.getuid(), launch.node, launch.local_ranks, *job])
    return f"\0taxfree-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _is_of_this_user(connection: socket.socket) -> bool:
    size = struct.calcsize("3i")
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", told)
    return bool(user == os.getuid())
