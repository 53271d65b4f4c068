"""The shipped tables: one export (`taxfree db export`) per machine, such as `nvidia-h200-x8.json`.

The source of their records is `shipped`. The user's records take precedence over them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable

from ..exchange import read_export
from ..records import Record


@functools.cache
def shipped_records() -> tuple[Record, ...]:
    """Return the records of all shipped tables, which are read once."""
    return records_in(files(__name__))


def records_in(folder: Traversable) -> tuple[Record, ...]:
    """Return the records of the tables in a folder, sorted by the names of the files.

    Raises:
        NotAnExport: a table is not an export.
        InvalidRecord: a table holds a record that breaks the schema.
    """
    tables = (path for path in folder.iterdir() if path.name.endswith(".json"))
    ordered = sorted(tables, key=lambda table: table.name)
    return tuple(record for table in ordered for record in _records_of(table))


def _records_of(table: Traversable) -> list[Record]:
    with table.open(encoding="utf-8") as stream:
        records = [Record.from_json(entry) for entry in read_export(stream)]
    return [
        replace(record, provenance={**record.provenance, "source": "shipped"}) for record in records
    ]
