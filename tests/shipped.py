"""The shipped records, for tests that are not of versions."""

from __future__ import annotations

from dataclasses import replace

from taxfree_kernels.variant import variants
from taxfree_tuning_db import Record, shipped_records


def shipped_as_of_today() -> tuple[Record, ...]:
    """The shipped records, as if no version had been raised since they were measured."""

    def current(record: Record) -> Record:
        version = variants(record.op)[record.winner.variant].version
        return replace(record, winner=replace(record.winner, version=version))

    return tuple(map(current, shipped_records()))
