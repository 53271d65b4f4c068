"""Reads what a report shows: records and trials of tuning, result files, and where each is from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taxfree.errors import UsageError
from taxfree.files import read_json
from taxfree.problems import recorded_problem
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_names
from taxfree_tune.measuring.results import Results, load
from taxfree_tuning_db import Database, DatabaseMissing, Record, TrialRecord, shipped_records
from taxfree_tuning_db.renamed import with_new_names

SHIPPED = "shipped tables"


@dataclass(frozen=True)
class Recorded:
    """A record, and where it is from.

    Args:
        record: of a problem of this version.
        source: :data:`SHIPPED`, or the name of the database.
        trials: that the database has of it, oldest first.
    """

    record: Record
    source: str
    trials: tuple[TrialRecord, ...] = ()


@dataclass(frozen=True)
class ResultFile:
    """A file of measurements.

    Args:
        source: its name.
        environment: where and when it was measured.
        entries: its rows or pictures, as JSON.
    """

    source: str
    environment: Mapping[str, Any]
    entries: Sequence[dict[str, Any]]


@dataclass
class Sources:
    """All that a report is made from.

    Args:
        records: of the user's database, then the shipped ones.
        benches: (name, content) of files of `bench --out`.
        models: files of `bench --model --out` of GPUs; an entry is a mode of a phase.
        accounts: files of `explain --json`; an entry is a pipeline's account.
        timelines: files of `explain --trace`; an entry is a call of each pipeline.
        left_out: files of a folder that hold none of these.
    """

    records: list[Recorded] = field(default_factory=list)
    benches: list[tuple[str, Results]] = field(default_factory=list)
    models: list[ResultFile] = field(default_factory=list)
    accounts: list[ResultFile] = field(default_factory=list)
    timelines: list[ResultFile] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def read(database: Path, required: bool, results: Sequence[Path]) -> Sources:
    """Read the records of a database and the shipped ones, and result files.

    Args:
        required: whether a database that is not there is an error.
        results: files, or folders of them; a folder may hold other files too.

    Raises:
        DatabaseError: the database cannot be read.
        UsageError: a file is none that a report shows.
    """
    sources = Sources()
    try:
        with Database(database, read_only=True) as opened:
            for record in opened.records():
                sources.records.append(Recorded(record, database.name, opened.trials(record.key)))
    except DatabaseMissing:
        if required:
            raise
    sources.records += [Recorded(record, SHIPPED) for record in shipped_records()]
    sources.records = [record for record in sources.records if _is_known(record.record)]
    for result in results:
        if result.is_dir():
            for path in sorted(result.rglob("*.json")):
                name, is_shown = path.relative_to(result).as_posix(), False
                with contextlib.suppress(UsageError):  # it may hold anything
                    is_shown = _add(sources, path, name)
                if not is_shown:
                    sources.left_out.append(name)
        elif not _add(sources, result, result.name):
            raise UsageError(
                f"{result} holds nothing that a report shows",
                "give files of bench --out, explain --json or explain --trace",
            )
    return sources


def _is_known(record: Record) -> bool:
    """Whether a record is of today's operations, and of a GPU: interpreted times say nothing."""
    return (
        record.op in operation_names()
        and record.hardware.architecture != KNOWN["cpu"].architecture
        and recorded_problem(record.op, record.problem) is not None
    )


def _add(sources: Sources, path: Path, name: str) -> bool:
    """Add a file by what it holds; returns whether it holds anything that is shown."""
    document = read_json(path, "give a result file")
    if not isinstance(document, dict) or _environment(document).get("fabric") == "host":
        return False
    rows = document.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    if document.get("pictures"):
        _require(path, document["pictures"], ("op", "problem", "hardware", "timelines"))
        renamed = [with_new_names(call["op"], call) for call in document["pictures"]]
        sources.timelines.append(ResultFile(name, _environment(document), renamed))
    elif "t_graph_us" in first and "is_modelled" in first:
        _require(path, rows, ("op", "problem", "variant", "t_eager_us", "residual_us"))
        renamed = [with_new_names(row["op"], row) for row in document["rows"]]
        sources.accounts.append(ResultFile(name, _environment(document), renamed))
    elif "tokens_per_s" in first:
        _require(path, rows, ("model", "layers", "world_size", "phase", "path", "median_us"))
        sources.models.append(ResultFile(name, _environment(document), document["rows"]))
    elif "mode" in first and "t_bound_us" in first:
        results = load(path)
        ops = operation_names()
        rows_known = [row for row in results.rows if row.op in ops]
        sources.benches.append(
            (name, Results(results.environment, tuple(rows_known), results.skipped))
        )
    else:
        return False
    return True


def _environment(document: Mapping[str, Any]) -> Mapping[str, Any]:
    environment = document.get("environment")
    return environment if isinstance(environment, dict) else {}


def _require(path: Path, entries: Any, names: Sequence[str]) -> None:
    """Check that all entries have these fields.

    Raises:
        UsageError: naming the first that is missing.
    """
    for entry in entries if isinstance(entries, list) else [None]:
        for name in names:
            if not isinstance(entry, dict) or name not in entry:
                raise UsageError(f"{path}: an entry has no {name!r}", "see explain --json")


@dataclass(frozen=True)
class Origin:
    """The origin of measurements, for the table at the end of a report.

    Args:
        source: name of a table, database or file.
        holds: what kind of figures.
        machine: product name of the GPU, or "modelled for" it.
        gpus: numbers of GPUs.
        oldest, newest: ISO times; empty where the file does not say.
        software: versions, in words.
        count: of figures.
        changed: of them, those whose kernel has changed since.
    """

    source: str
    holds: str
    machine: str
    gpus: tuple[int, ...]
    oldest: str
    newest: str
    software: str
    count: int
    changed: int


def software_words(software: Mapping[str, Any]) -> str:
    """Versions in words."""
    names = ("taxfree", "triton", "torch")
    said = [f"{name} {software[name]}" for name in names if software.get(name)]
    said += [str(software[name]) for name in ("runtime", "collectives") if software.get(name)]
    if software.get("driver"):
        said.append(f"driver {software['driver']}")
    return ", ".join(said)


def machine_of(environment: Mapping[str, Any]) -> str:
    """The GPU that an environment is of; modelled ones are marked."""
    gpu = str(environment.get("hardware", {}).get("gpu", "unknown"))
    return f"{gpu}, modelled" if environment.get("modelled") else gpu


def iterate(files: Sequence[ResultFile]) -> Iterator[tuple[ResultFile, dict[str, Any]]]:
    """All entries of files, each with its file."""
    for file in files:
        for entry in file.entries:
            yield file, entry
