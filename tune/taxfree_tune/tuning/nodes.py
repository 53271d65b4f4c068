"""Nodes of one launch that tune one list: each with its own group, and one table comes out.

Nodes that are asked for the same problems on the same GPUs divide them. The first node's database
is the table. The others begin with a copy of it, in a folder of their own, because SQLite is unsafe
on file systems that nodes share; what they store goes to the first node too, at once. They speak
through the store of torch.distributed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from taxfree.errors import Interrupted, TaxfreeError, UsageError, WorkerLost, one_line
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune.workers.launch import LaunchedProcess
from taxfree_tuning_db import Database, DatabaseMissing, Record, TrialRecord

LEASE_S = 60.0  # without a heartbeat, after which a node counts as dead
_JOIN_S = 300.0
_BEATS = 6  # of a lease
_POLL_S = 0.1
_FAREWELL_S = 10.0
_PIECE_BYTES = 4 << 20  # of a message: the store limits them


class NodeFailed(TaxfreeError):
    """Another node has failed; this one ends with its exit code."""

    def __init__(self, node: int, end: dict[str, Any]) -> None:
        super().__init__(f"node {node} failed: {end['message']}", end["hint"])
        self.exit_code = end["code"]  # type: ignore[misc]


class Nodes(AbstractContextManager["Nodes"]):
    """This node among those of a launch, from the moment when all of them are there.

    Leaving the block ends the node for the others: with the exit code of the error, or once all
    nodes have ended.

    Args:
        launch: of the first process of a node.
        receive: on the first node, given what other nodes `send`.

    Raises:
        UsageError: the address of the first node is not given.
        WorkerLost: not all nodes came.
    """

    def __init__(self, launch: LaunchedProcess, receive: Callable[[dict[str, Any]], None]) -> None:
        self._node, self._others = launch.node, [*range(launch.nodes)]
        self._others.remove(launch.node)
        self._receive = receive
        self._store = _meet(launch)
        self._sent, self._received = 0, dict.fromkeys(self._others, 0)
        self._seen: dict[int, tuple[bytes | None, float]]
        self._seen = dict.fromkeys(self._others, (None, time.monotonic()))
        self._folder = tempfile.TemporaryDirectory(prefix="taxfree-")
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._beating.start()

    def copy_of(self, path: Path) -> Path:
        """The first node's table: its own file there, a copy of it on other nodes."""
        if self._node == 0:
            content = _content(path)
            begins = range(0, len(content), _PIECE_BYTES)
            for index, begin in enumerate(begins):
                self._set(f"table/{index}", content[begin : begin + _PIECE_BYTES])
            self._set("pieces/0", json.dumps(len(begins)))
            return path
        count = self._asked(0, "pieces")
        content = b"".join(self._get(f"table/{index}") or b"" for index in range(count))
        copy = Path(self._folder.name, "tuning.sqlite")
        if content:
            copy.write_bytes(zlib.decompress(content))
        return copy

    def share_of(self, gpu: str | None, problems: Sequence[Problem]) -> list[Problem]:
        """This node's part of the problems that it is asked for, on its kind of GPU."""
        asked = json.dumps([gpu, [[op_of(problem), asdict(problem)] for problem in problems]])
        self._set(f"asked/{self._node}", json.dumps(asked))
        alike = [node for node in self._others if self._asked(node, "asked") == asked]
        alike = sorted([self._node, *alike])
        return list(problems[alike.index(self._node) :: len(alike)])

    @contextlib.contextmanager
    def database(self, path: Path) -> Iterator[Database]:
        """This node's database; what others store reaches that of the first node."""
        if self._node:
            with _Forwarding(path, self.send) as database:
                yield database
            return
        with Database(path) as self._table:
            try:
                yield self._table
            finally:
                with contextlib.suppress(TaxfreeError):
                    self.collect()

    def send(self, message: dict[str, Any]) -> None:
        """Send something to the first node; not for that node itself.

        Raises:
            WorkerLost: it does not answer.
            NodeFailed: it has failed.
        """
        end = self._told("end/0")
        if end is not None:
            raise NodeFailed(0, end)
        self._set(f"sent/{self._node}/{self._sent}", json.dumps(message))
        self._sent += 1

    def collect(self) -> None:
        """On the first node: take in what others have sent until now; elsewhere nothing.

        Raises:
            NodeFailed: another node has failed.
            WorkerLost: another node has died.
        """
        for node in self._others if self._node == 0 else ():
            # Looked for first: what a node has sent before its end is then there.
            end = self._told(f"end/{node}")
            while sent := self._told(name := f"sent/{node}/{self._received[node]}"):
                self._take(sent)
                self._store.delete_key(name)
                self._received[node] += 1
            if end is None:
                self._require_alive(node)
            elif end["code"]:
                raise NodeFailed(node, end)

    def gather(self) -> None:
        """On the first node: collect until all others have finished; errors as of `collect`."""
        finished = self._node != 0
        while not finished:
            finished = all(self._told(f"end/{node}") for node in self._others)
            self.collect()
            time.sleep(0.0 if finished else _POLL_S)

    def _take(self, message: dict[str, Any]) -> None:
        if "record" in message:
            self._table.put(Record.from_json(message["record"]))
        elif "trial" in message:
            self._table.add_trial(message["key"], TrialRecord.from_json(message["trial"]))
        else:
            self._receive(message)

    # -- the store -----------------------------------------------------------------------------

    def _set(self, name: str, value: str | bytes) -> None:
        with _answering():
            self._store.set(name, value)  # type: ignore[arg-type]  # bytes are taken, too

    def _get(self, name: str) -> bytes | None:
        with _answering():
            return self._store.get(name) if self._store.check([name]) else None

    def _told(self, name: str) -> Any:
        text = self._get(name)
        return None if text is None else json.loads(text)

    def _asked(self, node: int, name: str) -> Any:
        """What another node tells, once it does."""
        while True:
            end = self._told(f"end/{node}")  # first: a node may tell, and end, between two looks
            told = self._told(f"{name}/{node}")
            if told is not None:
                return told
            if end is not None:
                raise NodeFailed(node, end)
            self._require_alive(node)
            time.sleep(_POLL_S)

    def _require_alive(self, node: int) -> None:
        told = self._get(f"beat/{node}")
        beat, since = self._seen[node]
        if told != beat:
            self._seen[node] = told, time.monotonic()
        elif time.monotonic() - since > LEASE_S:
            raise WorkerLost(
                f"node {node} has not answered for {LEASE_S:.0f} s",
                "finished trials are kept; the same command continues",
            )

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # what the main thread does next reports it
            for count in itertools.count():
                self._store.set(f"beat/{self._node}", str(count))
                if self._ended.wait(LEASE_S / _BEATS):
                    return

    # -- the end -------------------------------------------------------------------------------

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._set(f"end/{self._node}", json.dumps({"code": 0}))
                self._part()
            else:
                with contextlib.suppress(TaxfreeError):
                    self._set(f"end/{self._node}", json.dumps(_end(error)))
                    if self._node == 0:
                        self._part()
                    self._set(f"read/{self._node}", "true")
        finally:
            self._ended.set()
            self._beating.join()
            self._folder.cleanup()

    def _part(self) -> None:
        """Wait for the end of the first node; it waits until others know, as the store may be its.

        Raises:
            NodeFailed, WorkerLost: it has failed, or died.
        """
        if self._node:
            end = self._asked(0, "end")
            self._set(f"read/{self._node}", "true")
            if end["code"]:
                raise NodeFailed(0, end)
            return
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline and not all(
            self._told(f"read/{node}") for node in self._others
        ):
            time.sleep(_POLL_S)


def _end(error: BaseException) -> dict[str, Any]:
    """The end of a node by an error, for the others."""
    if isinstance(error, KeyboardInterrupt):
        return {"code": Interrupted.exit_code, "message": "interrupted", "hint": ""}
    return {
        "code": getattr(error, "exit_code", 1),
        "message": one_line(error),
        "hint": getattr(error, "hint", ""),
    }


def _content(path: Path) -> bytes:
    """A database at one moment, compressed; nothing where there is none.

    Raises:
        DatabaseError: it cannot be read.
    """
    try:
        with Database(path, read_only=True):
            pass
    except DatabaseMissing:
        return b""
    address = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as opened:
        return zlib.compress(opened.serialize())


class _Forwarding(Database):
    """A database whose changes are also sent elsewhere."""

    def __init__(self, path: Path, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(path)
        self._send = send

    def put(self, record: Record) -> None:
        super().put(record)
        self._send({"record": record.to_json()})

    def add_trial(self, key: str, trial: TrialRecord) -> None:
        super().add_trial(key, trial)
        self._send({"key": key, "trial": trial.to_json()})


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Report a store that does not answer.

    Raises:
        WorkerLost: it does not.
    """
    try:
        yield
    except RuntimeError as error:  # of torch.distributed, which has subclasses for some
        raise WorkerLost(
            f"the first node does not answer: {one_line(error)}",
            "see what it printed; the same command continues",
        ) from error


def _meet(launch: LaunchedProcess) -> Store:
    """The store of torch.distributed that all nodes share, once they are there."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"{launch.nodes} nodes were launched without {' and '.join(missing)}",
            "in Slurm: export MASTER_PORT=29500 MASTER_ADDR=$(scontrol show hostnames | head -1)",
        )
    stores: list[Store | Exception] = []

    def meet() -> None:
        timeout = timedelta(seconds=_JOIN_S)
        try:
            store = next(rendezvous("env://", launch.node, launch.nodes, timeout=timeout))[0]
        except Exception as error:
            stores.append(error)
        else:
            stores.append(store)

    # In a thread, because torch does not let Ctrl-C interrupt it.
    meeting = threading.Thread(target=meet, name="rendezvous", daemon=True)
    meeting.start()
    while meeting.is_alive():
        meeting.join(_POLL_S)
    (store,) = stores
    if isinstance(store, Exception):
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise WorkerLost(
            f"the {launch.nodes} nodes do not meet at {where}: {one_line(store)}",
            "MASTER_ADDR is the first node's, MASTER_PORT a free port there",
        ) from store
    # A launcher that starts all anew keeps the store.
    return PrefixStore(f"taxfree/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
