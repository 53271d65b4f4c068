"""The errors of the tuning database, all of them a `DatabaseError`."""

from __future__ import annotations


class DatabaseError(Exception):
    """Base of every error of the tuning database.

    Args:
        message: one line, what is wrong.
        hint: one line, what to do about it.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DatabaseMissing(DatabaseError):
    """There is no database at the path."""


class DatabaseUnreadable(DatabaseError):
    """The file cannot be opened or read: permissions, not a file, I/O errors."""


class DatabaseReadOnly(DatabaseError):
    """The database may be read but not written."""


class DatabaseCorrupt(DatabaseError):
    """The file is damaged, or is not a tuning database."""


class DatabaseLocked(DatabaseError):
    """Another process has held the lock for longer than we wait."""


class DatabaseTooNew(DatabaseError):
    """The database has the schema of a newer taxfree."""


class DatabaseFull(DatabaseError):
    """The disk has no space for the write."""


class ForeignRecord(DatabaseError):
    """A row was not written by taxfree; it was not decoded.

    Attributes:
        key: the key of the row, as `Database.delete` takes it.
    """

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"foreign record {key[:80]}{'...' * (len(key) > 80)}: {why}",
            "something else wrote to this file: move it away, then run `taxfree tune`",
        )
        self.key = key


class ForeignRecordWarning(RuntimeWarning):
    """A row of a database is not a record; the others are read."""


class InvalidRecord(DatabaseError):
    """A value breaks the schema of a record.

    Attributes:
        field: the path of the field, such as `winner.median_us.graph`; empty for the whole.
        why: what is wrong with it.
    """

    def __init__(self, field: str, why: str) -> None:
        super().__init__(
            f"{field}: {why}" if field else why,
            "records are written by `taxfree tune` and `taxfree db export`, not by hand",
        )
        self.field = field
        self.why = why


class NotAnExport(DatabaseError):
    """A document is not an export of records."""

    def __init__(self, document: str, why: str) -> None:
        hint = "write one with `taxfree db export`"
        super().__init__(f"{document} is not a taxfree export: {why}", hint)
