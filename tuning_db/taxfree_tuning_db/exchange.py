"""Export and import of records as one JSON document."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeAlias

from .errors import DatabaseUnreadable, InvalidRecord, NotAnExport
from .files import write
from .records import OF_A_BENCH, Record
from .store import Database

EXPORT_MARK = "taxfree_tuning_db"
EXPORT_VERSION = 1

Location: TypeAlias = str | os.PathLike[str] | IO[str]


@dataclass(frozen=True)
class ImportReport:
    """The outcome of an import.

    Args:
        added: records of problems that had none.
        replaced: records that have replaced a worse one.
        kept: records of the database that were at least as good as the document's.
        refused: (entry, reason) of every entry that is not a valid record.
    """

    added: tuple[Record, ...]
    replaced: tuple[Record, ...]
    kept: tuple[Record, ...]
    refused: tuple[tuple[str, str], ...]


def export(records: Iterable[Record], target: Location) -> None:
    """Write records as one JSON document, sorted by key.

    Args:
        target: a path, whose file is replaced at once or not at all, or a text stream.

    Raises:
        DatabaseUnreadable: the path cannot be written.
    """
    ordered = sorted(records, key=lambda record: record.key)
    document = {EXPORT_MARK: EXPORT_VERSION, "records": [each.to_json() for each in ordered]}
    text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
    if not isinstance(target, str | os.PathLike):
        target.write(text)
        return
    try:
        write(Path(target), text)
    except OSError as error:
        raise DatabaseUnreadable(
            f"{os.fspath(target)} cannot be written: {error.strerror}", "choose another path"
        ) from error


def read_export(source: Location) -> list[object]:
    """Return the entries of an export: documents for `Record.from_json`, not validated yet.

    Raises:
        NotAnExport: the document is something else, or of a newer version.
        DatabaseUnreadable: the path cannot be read.
    """
    name, text = _read(source)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise NotAnExport(name, "it is not JSON") from None
    return _entries(name, document)


def import_records(
    database: Database, document: Location | Mapping[str, Any] | list[object]
) -> ImportReport:
    """Put the records of an export into a database atomically, keeping the better of two.

    A measured record beats a modelled one. Of two records of the same taxfree version, one from a
    search beats one from a bench; then the one with more samples behind its winner wins, then the
    newer. Records of different versions, or with different sources of the same winner, measured
    different kernels: there the newer wins. In a tie, the database's record stays.

    Args:
        document: an export: a path, a text stream, the parsed document, or the entries that
            `read_export` returned.

    Raises:
        NotAnExport: the document is something else; the database is unchanged.
        DatabaseError: the document cannot be read, or the database not be written.
    """
    if isinstance(document, Mapping):
        entries = _entries("the document", document)
    elif isinstance(document, list):
        entries = document
    else:
        entries = read_export(document)
    valid, refused = _validated(entries)
    added, replaced, kept = list[Record](), list[Record](), list[Record]()
    with database.transaction():
        for record in valid:
            known = database.get(record.key)
            if known is not None and not _is_better(record, known):
                kept.append(known)
                continue
            database.put(record)
            (added if known is None else replaced).append(record)
    return ImportReport(tuple(added), tuple(replaced), tuple(kept), tuple(refused))


def _read(source: Location) -> tuple[str, str]:
    if not isinstance(source, str | os.PathLike):
        return str(getattr(source, "name", "the stream")), source.read()
    name = os.fspath(source)
    try:
        return name, Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise NotAnExport(name, "it is not text") from None
    except OSError as error:
        raise DatabaseUnreadable(
            f"{name} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error


def _entries(name: str, document: object) -> list[object]:
    if not isinstance(document, Mapping) or EXPORT_MARK not in document:
        raise NotAnExport(name, f"it has no {EXPORT_MARK!r}")
    if document[EXPORT_MARK] != EXPORT_VERSION:
        raise NotAnExport(name, f"version {document[EXPORT_MARK]!r} is not {EXPORT_VERSION}")
    if not isinstance(document.get("records"), list):
        raise NotAnExport(name, "it has no list of records")
    return list(document["records"])


def _validated(entries: Iterable[object]) -> tuple[list[Record], list[tuple[str, str]]]:
    valid, refused = [], []
    for index, entry in enumerate(entries):
        try:
            valid.append(Record.from_json(entry))
        except InvalidRecord as error:
            refused.append((f"records[{index}]", error.message))
    return valid, refused


def _is_better(one: Record, other: Record) -> bool:
    if one.is_modelled != other.is_modelled:
        return other.is_modelled
    has_changed = (
        one.winner.variant == other.winner.variant
        and one.winner.kernel_hash != other.winner.kernel_hash
    )
    if has_changed or one.software.taxfree != other.software.taxfree:
        return _created(one) > _created(other)
    return _worth(one) > _worth(other)


def _worth(record: Record) -> tuple[bool, int, datetime]:
    is_of_a_search = record.provenance.get("method") != OF_A_BENCH
    return is_of_a_search, record.winner.samples, _created(record)


def _created(record: Record) -> datetime:
    """Return the time at which a record was made; a record without it is the oldest."""
    text = record.provenance.get("created")
    if text is None:
        return datetime.min.replace(tzinfo=UTC)
    created = datetime.fromisoformat(text)
    return created if created.tzinfo else created.replace(tzinfo=UTC)
