"""Processes that compile: killed when they hang, replaced when the compiler takes them down."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

_MOST_WORKERS = 32
_LONGEST_COMPLAINT = 300  # characters


class _Worker:
    """One process, and its stderr."""

    def __init__(self, triton_path: Path | None, niceness: int) -> None:
        command = [sys.executable, "-P", "-W", "ignore", "-m", "taxfree_check.cross_compile.worker"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._process: Any = subprocess.Popen(
            [*command, str(niceness)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=_environment(triton_path), text=True,
        )  # fmt: skip

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer; an ``error`` when there is none. Then the worker may be dead."""
        self._log.seek(0)
        self._log.truncate()
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps(request), file=self._process.stdin, flush=True)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self.close()
                return {"error": f"compiling took longer than {timeout_s:g} s"}
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            return {"error": self._complaint("the compiler's process died")}
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            answer["error"] = self._complaint(answer["error"].strip().partition("\n")[0])
        return answer

    def _complaint(self, otherwise: str) -> str:
        """The compiler's first line of complaint on stderr, which says more than the exception."""
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        telling = re.search(r"Assertion `.*' failed", log) or re.search(r"error: .*", log)
        return telling.group()[:_LONGEST_COMPLAINT] if telling else otherwise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):  # the other end of a pipe may be gone
                pipe.close()


def _environment(triton_path: Path | None) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [path for path in sys.path if path]
    if triton_path is not None:
        paths.insert(0, str(triton_path.resolve()))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["CUDA_VISIBLE_DEVICES"] = environment["HIP_VISIBLE_DEVICES"] = ""
    return environment


class CompilePool:
    """Answers compile requests with processes of their own.

    Args:
        workers: processes; half the cores, at most 32, by default.
        timeout_s: for one request; a worker that takes longer is killed.
        triton_path: folder of another Triton than this process would import.
        niceness: of the processes; on busy cores a nice one hardly runs.
    """

    def __init__(
        self,
        workers: int | None = None,
        timeout_s: float = 120.0,
        triton_path: Path | None = None,
        niceness: int = 0,
    ) -> None:
        self._timeout_s, self._triton_path, self._niceness = timeout_s, triton_path, niceness
        # ptxas and the linker are processes of their own: half the cores for ours
        count = workers or max(1, min((os.cpu_count() or 2) // 2, _MOST_WORKERS))
        self._count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compile")
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(None)  # started at the first request that needs it
        self._started: list[_Worker] = []
        self._starting, self._is_closed = threading.Lock(), False
        self._begun: dict[str, Future[dict[str, Any]]] = {}

    def start(self) -> None:
        """Start the processes before the first request: loading the compiler takes seconds."""
        for _ in range(self._count):
            self._threads.submit(self._answer, {})

    def begin(self, requests: Iterable[dict[str, Any]]) -> None:
        """Let processes answer requests whose answers will be asked for later."""
        for request in requests:
            text = json.dumps(request)
            if text not in self._begun:
                self._begun[text] = self._threads.submit(self._answer, request)

    def answers(self, requests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The answer to each request, in their order, as soon as it is there."""
        begun = [self._taken(request) for request in requests]
        return (future.result() for future in begun)

    def _taken(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        text = json.dumps(request)
        if text in self._begun:
            return self._begun.pop(text)
        return self._threads.submit(self._answer, request)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            if worker is None or not worker.is_alive:
                with self._starting:
                    if self._is_closed:
                        return {"error": "the pool is closed"}
                    worker = _Worker(self._triton_path, self._niceness)
                    self._started.append(worker)
            return worker.ask(request, self._timeout_s)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes; requests that wait are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._starting:
            self._is_closed = True
        for worker in self._started:
            worker.kill()
        self._threads.shutdown(wait=True)  # which wait at pipes: a closed one would wake nobody
        for worker in self._started:
            worker.close()
