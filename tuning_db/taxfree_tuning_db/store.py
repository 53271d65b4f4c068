"""The tuning database: one SQLite file behind sqlitedict, with JSON values.

A pickled value is reported as foreign, never loaded: loading one runs code.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import platformdirs

from .connection import Connection, SharedDict
from .errors import (
    DatabaseCorrupt,
    DatabaseMissing,
    DatabaseReadOnly,
    DatabaseTooNew,
    DatabaseUnreadable,
    ForeignRecord,
    ForeignRecordWarning,
    InvalidRecord,
)
from .files import users_folder
from .records import SCHEMA_VERSION, Record, TrialRecord, canonical_json
from .renamed import former_key, op_of_key

_TABLES = ("meta", "records", "trials")
_TRIALS_OF = "FROM trials WHERE key > ? AND key < ?"

_T = TypeVar("_T")


def default_path() -> Path:
    """Return the path of the database: `TAXFREE_DB`, else in the user's data folder."""
    if path := os.environ.get("TAXFREE_DB"):
        return Path(os.path.expanduser(path))  # leaves an unknown ~user as it is; Path raises
    return users_folder(platformdirs.user_data_path) / "tuning.sqlite"


class Database(AbstractContextManager["Database"]):
    """A tuning database, open from construction until `close` or the end of a `with` block.

    It belongs to the process and thread that opened it, and holds no lock between calls.

    Args:
        path: the file. For writing, it and its folders are created if they are missing.
        read_only: refuse every change.

    Raises:
        DatabaseMissing: there is no file to read.
        DatabaseTooNew: a newer taxfree wrote it.
        DatabaseError: it cannot be used; the subclass says why.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._prepare_path()
        self._connection = Connection(self.path, read_only=read_only)
        try:
            self._open_tables()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; again is harmless."""
        self._connection.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Hold the write lock over several calls: `with database.transaction(): ...`.

        Nobody else changes the database before the end. An exception undoes all changes.

        Raises:
            DatabaseLocked: another process has held the lock for too long.
            DatabaseReadOnly: the database was opened, or can only be opened, for reading.
        """
        if self.read_only:
            raise DatabaseReadOnly(
                f"{self.path} is open for reading only", "open it without read_only to change it"
            )
        return self._connection.transaction()

    def require_writable(self) -> None:
        """Make a change and roll it back, to find out early whether records can be stored.

        Raises:
            DatabaseReadOnly: nothing can be written.
            DatabaseError: a write fails; the subclass says why.
        """
        with contextlib.suppress(_RollBack), self.transaction():
            self._connection.execute("UPDATE meta SET value = value")
            raise _RollBack
        if not os.access(self.path.absolute().parent, os.W_OK):  # where SQLite's journal will be
            raise DatabaseReadOnly(
                f"the folder of {self.path} is read-only",
                "make it writable, or point --db or TAXFREE_DB at a copy",
            )

    def records(self) -> Iterator[Record]:
        """Yield every record of one state of the database, ordered by key.

        A row that is not a record is passed over, with a :class:`ForeignRecordWarning`.
        """
        for key, stored in sorted(self._records.items(), key=lambda row: str(row[0])):
            try:
                if not isinstance(key, str):
                    raise ForeignRecord(repr(key), "its key is not text")
                yield _record(key, stored)
            except ForeignRecord as error:
                warnings.warn(
                    f"{error.message}; it is passed over", ForeignRecordWarning, stacklevel=2
                )

    def get(self, key: str) -> Record | None:
        """Return the record of a key, or None.

        Raises:
            ForeignRecord: the row is not a record.
        """
        for name in _keys(key):
            with contextlib.suppress(KeyError):
                return _record(name, self._records[name])
        return None

    def put(self, record: Record) -> None:
        """Store a record, in place of the one with the same key.

        Raises:
            InvalidRecord: one of its mappings was changed and breaks the schema.
        """
        document = record.to_json()
        Record.from_json(document)
        with self.transaction():
            for former in _keys(record.key)[1:]:
                self._records.pop(former, None)
            self._records[record.key] = canonical_json(document)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete records, foreign ones too; unknown keys are skipped."""
        with self.transaction():
            for key in keys:
                for name in _keys(key):
                    self._records.pop(name, None)

    def add_trial(self, key: str, trial: TrialRecord) -> None:
        """Add a trial to the trials of a record's key.

        Raises:
            InvalidRecord: as for `put`.
        """
        document = trial.to_json()
        TrialRecord.from_json(document)
        with self.transaction():
            self._trials[self._next_trial_key(key)] = canonical_json(document)

    def trials(self, key: str) -> tuple[TrialRecord, ...]:
        """Return the trials of a record's key, oldest first.

        Raises:
            ForeignRecord: a row is not a trial.
        """
        select = f"SELECT key, value {_TRIALS_OF} ORDER BY key"
        ranges = map(_trial_range, reversed(_keys(key)))
        rows = [row for interval in ranges for row in self._connection.select(select, interval)]
        trial = partial(TrialRecord.from_json, op=op_of_key(key))
        return tuple(_decode(trial, *row) for row in rows)

    def _next_trial_key(self, key: str) -> str:
        ((last,),) = self._connection.select(f"SELECT MAX(key) {_TRIALS_OF}", _trial_range(key))
        if last is None:
            return f"{key} #{0:09}"
        number = last.rpartition("#")[2]
        if not number.isdecimal():
            raise ForeignRecord(last, "is not the key of a trial")
        return f"{key} #{int(number) + 1:09}"

    def _prepare_path(self) -> None:
        try:
            if not self.read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            elif not self.path.exists():
                raise self._missing()
        except OSError as error:
            # Python says of a file in the place of a folder that it exists.
            is_file = isinstance(error, FileExistsError)
            reason = os.strerror(errno.ENOTDIR) if is_file else error.strerror
            raise DatabaseUnreadable(
                f"{self.path} cannot be reached: {reason}",
                "check the path and the permissions of its folders",
            ) from error

    def _open_tables(self) -> None:
        if not self._table_names():
            self._create_tables()
        if "meta" not in self._table_names():
            raise self._not_ours()
        self._check_schema(SharedDict(self._connection, "meta"))
        if not self._table_names().issuperset(_TABLES):
            raise self._not_ours()
        self._records = SharedDict(self._connection, "records")
        self._trials = SharedDict(self._connection, "trials")
        # Every opener must agree on the journal, and WAL fails on network file systems.
        pragma = "query_only=ON" if self.read_only else "journal_mode=DELETE"
        self._connection.execute(f"PRAGMA {pragma}")

    def _create_tables(self) -> None:
        if self.read_only:
            raise self._missing()
        with self.transaction():
            if self._table_names():  # another process was first
                return
            for name in _TABLES:
                SharedDict(self._connection, name)
            SharedDict(self._connection, "meta")["schema"] = str(SCHEMA_VERSION)

    def _table_names(self) -> set[str]:
        rows = self._connection.select("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows}

    def _check_schema(self, meta: SharedDict) -> None:
        stored = meta.get("schema")
        if not (isinstance(stored, str) and stored.isdecimal()):
            raise self._not_ours()
        if int(stored) > SCHEMA_VERSION:
            raise DatabaseTooNew(
                f"{self.path} has schema {stored}, newer than {SCHEMA_VERSION}",
                "update taxfree, or point --db or TAXFREE_DB at another database",
            )

    def _missing(self) -> DatabaseMissing:
        message = f"there is no tuning database at {self.path}"
        return DatabaseMissing(message, "run `taxfree tune` first")

    def _not_ours(self) -> DatabaseCorrupt:
        hint = "point --db or TAXFREE_DB at a tuning database"
        return DatabaseCorrupt(f"{self.path} is not a tuning database", hint)


def prune(database: Database, variants: Mapping[str, Collection[str]]) -> list[Record]:
    """Delete the records whose winner is an unknown variant, and return them. Trials stay.

    Args:
        variants: operation -> its variants; records of other operations stay.
    """
    with database.transaction():
        useless = [
            record
            for record in database.records()
            if record.op in variants and record.winner.variant not in variants[record.op]
        ]
        database.delete(record.key for record in useless)
    return useless


class _RollBack(Exception):
    """Ends a transaction without a change."""


def _record(key: str, stored: object) -> Record:
    record = _decode(Record.from_json, key, stored)
    if key not in _keys(record.key):
        raise ForeignRecord(key, "holds the record of another key")
    return record


def _keys(key: str) -> tuple[str, ...]:
    """A record's key, and its key before fields of the problem were renamed."""
    former = former_key(key)
    return (key,) if former is None else (key, former)


def _decode(build: Callable[[object], _T], key: str, stored: object) -> _T:
    if not isinstance(stored, str):
        raise ForeignRecord(key, "is not text")
    try:
        return build(json.loads(stored))
    except InvalidRecord as error:
        raise ForeignRecord(key, error.message) from error
    except (ValueError, RecursionError):
        raise ForeignRecord(key, "is not JSON") from None


# A trial's key is its record's key and a number, zero-filled so that text sorts like numbers.


def _trial_range(key: str) -> tuple[str, str]:
    return f"{key} #", f"{key} $"  # "$" comes after "#"
