"""When a record may no longer be used, and how such records are removed."""

from __future__ import annotations

from collections.abc import Mapping

from .records import Record
from .store import Database


def stale_reason(record: Record, kernel_hashes: Mapping[str, str]) -> str | None:
    """Return why a record's winner is not today's kernel, or None where it is.

    Args:
        record: the record.
        kernel_hashes: today's kernel hash of every variant of the operation.
    """
    winner = record.winner
    if winner.variant not in kernel_hashes:
        return f"variant {winner.variant} is unknown"
    if winner.kernel_hash != kernel_hashes[winner.variant]:
        return f"kernel of {winner.variant} has changed since it was measured"
    return None


def prune(database: Database, kernel_hashes: Mapping[str, Mapping[str, str]]) -> list[Record]:
    """Delete the stale records of a database, and return them. Trials stay.

    Args:
        database: where to delete.
        kernel_hashes: today's kernel hashes by operation, then variant: records of another kernel
            are stale, operations that it does not name are left alone.
    """
    with database.transaction():
        stale = [
            record
            for record in database.records()
            if record.op in kernel_hashes
            and stale_reason(record, kernel_hashes[record.op]) is not None
        ]
        database.delete(record.key for record in stale)
    return stale
