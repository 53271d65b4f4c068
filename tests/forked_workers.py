"""Rank workers of the host fabric, forked from a process that has imported torch and all kernels.

To import them takes a worker two seconds of processor time, and tests start more than a hundred.
The forks are children of the tests' process, as workers are of their controller; but all have one
seed of hashes. Commands that tests run in processes of their own start workers as a user's do.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_MODULE = "taxfree_tune.workers.worker"
_FIRST_FREE = 500  # file descriptors from here on are nobody's


class Forks:
    """Takes the place of `subprocess.Popen` in worker groups."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._path = os.pathsep.join(filter(None, sys.path))

    def __call__(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        # CUDA is not forked, and a test that changes what kernels are imported means a start to be
        # another.
        if (
            env.get("TRITON_INTERPRET") != "1"
            or env["PYTHONPATH"] != self._path
            or "TAXFREE_TIMELINE" in env
        ):
            return subprocess.Popen(command, env=env, **options)
        return self._start(command, env, **options)

    def _begin(self) -> None:
        # Orphans are the children of this process from now on.
        assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": self._path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        self._requests = Connection(os.dup(ours.fileno()))

    def _start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stdout: int,
        **_: Any,
    ) -> Fork:
        assert command[1:3] == ["-m", _MODULE]
        if self._process is None:
            self._begin()
        request = command[3:], dict(env), os.getcwd(), pass_fds
        self._requests.send(request)
        socket.send_fds(self._socket, [b"x"], [stdout, *pass_fds])
        return Fork(self._requests.recv())

    def close(self) -> None:
        if self._process is not None:
            self._requests.close()
            self._socket.close()
            self._process.wait()


class Fork:
    """A worker, with what of `subprocess.Popen` a worker group uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self._wait(0)
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(_MODULE, timeout)
            time.sleep(0.005)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _serve(inherited: int) -> None:
    # What forks share, none of which starts threads.
    import torch._dynamo
    import torch.distributed.tensor.parallel  # noqa: F401
    import triton  # noqa: F401

    from taxfree_kernels.variant import operation_names, variants

    for op in operation_names():
        variants(op)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()  # to look through all of this takes a collection half a second
    atexit.register(gc.unfreeze)  # else bindings complain of leaks

    connection = socket.socket(fileno=_moved(inherited))
    requests = Connection(_moved(os.dup(connection.fileno())))
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        _, fds, *_ = socket.recv_fds(connection, 1, 8)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            child = os.fork()
            if child == 0:
                _become_worker(between, fds, *request)
            requests.send(child)
            os._exit(0)  # the tests' process adopts the child
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become_worker(
    parent: int,
    fds: list[int],
    arguments: list[str],
    environment: Mapping[str, str],
    folder: str,
    numbers: Sequence[int],
) -> None:
    log, *kept = [_moved(fd) for fd in fds]
    for fd, number in zip([log, log, *kept], [1, 2, *numbers], strict=True):
        os.dup2(fd, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    while os.getppid() == parent:
        time.sleep(0.001)
    from taxfree_tune.workers.worker import main

    main()
    sys.exit()


def _moved(fd: int) -> int:
    """The same file behind a descriptor that no worker is told of."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(fd)
    return moved


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
