"""Stale records: their winner was measured with another version of its variant, or is unknown."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .records import Measurement, Record
from .store import Database


def stale_reason(measured: Record | Measurement, versions: Mapping[str, int]) -> str | None:
    """Return why a measurement, or a record's winner, is not of today's kernel; None if it is.

    Args:
        versions: the current version of every variant of the operation.
    """
    winner = measured.winner if isinstance(measured, Record) else measured
    current = versions.get(winner.variant)
    if current is None:
        return f"variant {winner.variant} is unknown"
    if winner.version != current:
        return f"measured with version {winner.version} of {winner.variant}, now {current}"
    return None


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
