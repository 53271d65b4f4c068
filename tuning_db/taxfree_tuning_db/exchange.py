"""Export and import of records as one JSON document, and how two tables differ."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

from .errors import DatabaseUnreadable, InvalidRecord, NotAnExport
from .files import is_database, read_all, read_text, write
from .records import OF_A_BENCH, OF_A_LENDER, Record
from .store import Database

EXPORT_MARK = "taxfree_tuning_db"
EXPORT_VERSION = 1
_MOST_SAMPLES = 10**6  # of one measurement; more samples win
_MOST_CHARACTERS = 1000  # of a text
_CLOCKS_APART = timedelta(days=1)

Location: TypeAlias = str | os.PathLike[str] | IO[str]
Refusal: TypeAlias = Callable[[Record], str | None]


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
    document = {EXPORT_MARK: EXPORT_VERSION, "records": [record.to_json() for record in ordered]}
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
        document = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        raise NotAnExport(name, "it is not JSON") from None
    return _entries(name, document)


def plan_import(
    known: Callable[[str], Record | None],
    document: Location | Mapping[str, Any] | list[object],
    origin: str = "",
    refusal: Refusal = lambda record: None,
) -> ImportReport:
    """Return what an import would do; nothing is stored.

    Of two records of the same taxfree version, one from a search beats one from a bench, and both
    beat one that was lent; then the one with more samples behind its winner wins, then the newer.
    Of different versions of the same winner the later wins, of different versions of taxfree the
    newer record. In a tie, the known record stays.

    Args:
        known: key -> the record that there is, or None.
        document: an export: a path, a text stream, the parsed document, or the entries that
            `read_export` returned.
        origin: where the document is from; the records' provenance says so.
        refusal: why a record of the right form is refused nevertheless, or None.

    Raises:
        NotAnExport: the document is something else.
        DatabaseError: the document cannot be read, or a known record not be decoded.
    """
    if isinstance(document, Mapping):
        entries = _entries("the document", document)
    elif isinstance(document, list):
        entries = document
    else:
        entries = read_export(document)
    valid, refused = _validated(entries, refusal)
    added, replaced, kept = list[Record](), list[Record](), list[Record]()
    taken: dict[str, Record] = {}
    for record in valid:
        former = taken.get(record.key) or known(record.key)
        if former is not None and not _is_better(record, former):
            kept.append(former)
            continue
        taken[record.key] = _marked(record, origin)
        (added if former is None else replaced).append(taken[record.key])
    return ImportReport(tuple(added), tuple(replaced), tuple(kept), tuple(refused))


def import_records(
    database: Database,
    document: Location | Mapping[str, Any] | list[object],
    origin: str = "",
    refusal: Refusal = lambda record: None,
) -> ImportReport:
    """Put the records of an export into a database atomically, as of `plan_import`.

    Raises:
        NotAnExport: the document is something else; the database is unchanged.
        DatabaseError: the document cannot be read, or the database not be written.
    """
    with database.transaction():
        report = plan_import(database.get, document, origin, refusal)
        for record in (*report.added, *report.replaced):
            database.put(record)
    return report


def read_table(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Return the records of an export or of a database.

    Raises:
        NotAnExport: the file is neither, or one of its records breaks the schema.
        DatabaseError: it cannot be read.
    """
    if is_database(Path(path)):
        with Database(path, read_only=True) as database:
            return tuple(database.records())
    valid, refused = _validated(read_export(path))
    for entry, reason in refused:
        raise NotAnExport(os.fspath(path), f"{entry}: {reason}")
    return tuple(valid)


Change: TypeAlias = Literal["added", "removed", "changed"]


@dataclass(frozen=True)
class Difference:
    """How two tables differ in one record.

    Args:
        before, after: the record of each table, or None; not both.
    """

    before: Record | None
    after: Record | None

    @property
    def change(self) -> Change:
        """The kind of the difference."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"

    @property
    def differing(self) -> tuple[str, ...]:
        """Names of the fields that were changed."""
        if self.before is None or self.after is None:
            return ()
        ours, theirs = _content(self.before), _content(self.after)
        names = (field.name for field in fields(Record))
        return tuple(name for name in names if getattr(ours, name) != getattr(theirs, name))

    @property
    def record(self) -> Record:
        """The record after the change, or the removed one."""
        record = self.after or self.before
        assert record is not None
        return record


def differences(before: Iterable[Record], after: Iterable[Record]) -> list[Difference]:
    """Return how two tables differ, ordered by key; where records came from does not count."""
    ours, theirs = ({record.key: record for record in table} for table in (before, after))
    pairs = (Difference(ours.get(key), theirs.get(key)) for key in sorted(ours | theirs))
    return [pair for pair in pairs if _content(pair.before) != _content(pair.after)]


def _content(record: Record | None) -> Record | None:
    return record and replace(record, provenance={})


def _marked(record: Record, origin: str) -> Record:
    mark = {"source": "imported"} | ({"from": origin} if origin else {})
    return replace(record, provenance=record.provenance | mark)


def _read(source: Location) -> tuple[str, str]:
    name = str(getattr(source, "name", "the stream"))
    try:
        if not isinstance(source, str | os.PathLike):
            return name, read_all(source)
        name = os.fspath(source)
        return name, read_text(Path(source))
    except UnicodeDecodeError:
        raise NotAnExport(name, "it is not text") from None
    except OSError as error:
        raise DatabaseUnreadable(
            f"{name} cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error


def _entries(name: str, document: object) -> list[object]:
    if not isinstance(document, Mapping) or EXPORT_MARK not in document:
        raise NotAnExport(name, f"it has no {EXPORT_MARK!r}")
    if isinstance(document, _Ambiguous):
        raise NotAnExport(name, f"key {document.key!r} is there twice")
    if document[EXPORT_MARK] != EXPORT_VERSION:
        raise NotAnExport(name, f"version {document[EXPORT_MARK]!r} is not {EXPORT_VERSION}")
    if not isinstance(document.get("records"), list):
        raise NotAnExport(name, "it has no list of records")
    return list(document["records"])


def _validated(
    entries: Iterable[object], refusal: Refusal = lambda record: None
) -> tuple[list[Record], list[tuple[str, str]]]:
    valid, refused = [], []
    for index, entry in enumerate(entries):
        try:
            record = Record.from_json(entry)
            reason = _implausible(entry) or _incredible(record) or refusal(record)
        except InvalidRecord as error:
            reason = error.message
        if reason is None:
            valid.append(record)
        else:
            refused.append((f"records[{index}]", reason))
    return valid, refused


class _Ambiguous(dict[str, Any]):
    """An object of a document that has a key twice.

    Attributes:
        key: the key.
    """

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    ambiguous = _Ambiguous(fields)
    names = [name for name, _ in pairs]
    ambiguous.key = next(name for name in names if names.count(name) > 1)
    return ambiguous


def _implausible(value: object) -> str | None:
    """Why no program writes such a value, or None."""
    if isinstance(value, _Ambiguous):
        return f"key {value.key!r} is there twice"
    if isinstance(value, str):
        if not value.isprintable():
            return f"{value[:80]!r} has characters that cannot be printed"
        is_long = len(value) > _MOST_CHARACTERS
        return f"{value[:20]!r}... has {len(value)} characters" if is_long else None
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    children = value if isinstance(value, list) else []
    return next(filter(None, map(_implausible, children)), None)


def _incredible(record: Record) -> str | None:
    """Why a record would win over others without a right to, or None."""
    for measurement in (record.winner, record.baseline, *record.runners_up):
        if measurement.samples > _MOST_SAMPLES:
            return f"{measurement.variant} has {measurement.samples:.0e} samples"
    if _created(record) > datetime.now(UTC) + _CLOCKS_APART:
        return f"provenance.created: {record.provenance['created']} is not over yet"
    return None


def _is_better(one: Record, other: Record) -> bool:
    if one.winner.variant == other.winner.variant and one.winner.version != other.winner.version:
        return one.winner.version > other.winner.version
    if one.software.taxfree != other.software.taxfree:
        return _created(one) > _created(other)
    return _worth(one) > _worth(other)


def _worth(record: Record) -> tuple[int, int, datetime]:
    method = record.provenance.get("method")
    least_first = (OF_A_LENDER, OF_A_BENCH)
    candidates = least_first.index(method) if method in least_first else len(least_first)
    return candidates, record.winner.samples, _created(record)


def _created(record: Record) -> datetime:
    """Return the time at which a record was made; a record without it is the oldest."""
    text = record.provenance.get("created")
    if text is None:
        return datetime.min.replace(tzinfo=UTC)
    created = datetime.fromisoformat(text)
    return created if created.tzinfo else created.replace(tzinfo=UTC)
