"""Stale records: their kernel has changed since it was measured."""

from __future__ import annotations

from collections.abc import Mapping

from .records import Record
from .store import Database


def stale_reason(record: Record, kernel_hashes: Mapping[str, str]) -> str | None:
    """Return why a record's winner is not the current kernel, or None if it is.

    Args:
        kernel_hashes: the current hash of every variant of the operation.
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
        kernel_hashes: operation -> variant -> its current hash; records of other operations stay.
    """
    with database.transaction():
        stale = [
            record
            for record in database.records()
            if record.op in kernel_hashes and stale_reason(record, kernel_hashes[record.op])
        ]
        database.delete(record.key for record in stale)
    return stale
