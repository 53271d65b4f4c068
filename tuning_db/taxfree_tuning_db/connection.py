"""One SQLite connection with the interface that sqlitedict expects of its own.

sqlitedict runs SQLite in a thread that dies on a failed commit or a damaged page, and then its
caller waits forever. It also logs every error, turns off syncing to disk and ignores its timeout.
`SharedDict` keeps the mapping interface but uses this connection, which runs in the calling thread
and is shared by all tables, so that one transaction spans them.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlitedict import SqliteDict, identity

from .errors import (
    DatabaseCorrupt,
    DatabaseError,
    DatabaseFull,
    DatabaseLocked,
    DatabaseReadOnly,
    DatabaseUnreadable,
)

BUSY_TIMEOUT_S = 10.0

# a part of SQLite's message -> the error, our message and hint
_CAUSES: dict[str, tuple[type[DatabaseError], str, str]] = {
    "locked": (DatabaseLocked, "is locked by another process",
               "wait for the other taxfree command to end, or stop it"),
    "database or disk is full": (DatabaseFull, "cannot grow: the disk is full",
                                 "free some space, or point --db or TAXFREE_DB at another disk"),
    "readonly": (DatabaseReadOnly, "is read-only",
                 "make it writable, or point --db or TAXFREE_DB at a copy"),
    "malformed": (DatabaseCorrupt, "is damaged",
                  "move it away and run `taxfree tune`, or import an export of it"),
    "not a database": (DatabaseCorrupt, "is not a SQLite database",
                       "point --db or TAXFREE_DB at a tuning database"),
}  # fmt: skip


class Connection:
    """A connection to one SQLite file, for the process and thread that opened it.

    Args:
        path: the file.
        read_only: refuse to change or create it.

    Raises:
        DatabaseError: it cannot be opened; the subclass says why.
    """

    autocommit = False

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        self._pid = os.getpid()
        # Reading asks for rw too: only then can SQLite roll back what a killed writer left.
        mode = "rw" if read_only else "rwc"
        with self._explained():
            self._sqlite = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
            )

    def select(self, sql: str, arguments: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a statement and return all of its rows, so that no read lock outlives the call."""
        if os.getpid() != self._pid:
            raise DatabaseUnreadable(
                f"{self._path} was opened before this process was forked",
                "open the database in the process that uses it",
            )
        with self._explained():
            return self._sqlite.execute(sql, arguments).fetchall()

    def select_one(self, sql: str, arguments: tuple[object, ...] = ()) -> tuple[Any, ...] | None:
        """Run a statement and return its first row, or None."""
        return next(iter(self.select(sql, arguments)), None)

    def execute(self, sql: str, arguments: tuple[object, ...] = ()) -> None:
        """Run a statement that has no rows."""
        self.select(sql, arguments)

    def commit(self, blocking: bool = True) -> None:
        """Do nothing: sqlitedict commits when it likes, but only `transaction` may."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the write lock. All changes inside happen, or none. Inner transactions join."""
        if self._in_transaction():
            yield
            return
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back by itself after some errors, a full disk among them.
            if self._in_transaction():
                self.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the connection; again is harmless."""
        self._sqlite.close()

    def _in_transaction(self) -> bool:
        with self._explained():
            return self._sqlite.in_transaction

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._explanation(error) from error

    def _explanation(self, error: Exception) -> DatabaseError:
        # Undecodable text comes from a damaged page, or from SQLite's message about one.
        text = "malformed" if isinstance(error, UnicodeDecodeError) else str(error)
        for part, (cause, message, hint) in _CAUSES.items():
            if part in text:
                return cause(f"{self._path} {message}", hint)
        return DatabaseUnreadable(
            f"{self._path} cannot be used: {error}",
            "check the path and its permissions, those of its folder too",
        )


class SharedDict(SqliteDict):  # type: ignore[misc]
    """A sqlitedict table on a shared connection; it is created where it is missing.

    Values are written as text and returned as they are stored, of whatever type.
    """

    def __init__(self, connection: Connection, table: str) -> None:
        self._shared = connection
        super().__init__(":shared:", tablename=table, encode=identity, decode=identity)

    def _new_conn(self) -> Connection:
        return self._shared

    def close(self, do_log: bool = True, force: bool = False) -> None:
        """Do nothing: sqlitedict closes in `__del__`, but the connection outlives its tables."""
