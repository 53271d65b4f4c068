"""`taxfree db`: records of the tuning database, and the look-up of a problem."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from taxfree.errors import NoRecord, TaxfreeError, UsageError
from taxfree.problems import format_problem, recorded_problem, require_operation
from taxfree_cli import options
from taxfree_cli.output import note, print_json, print_lines, warn
from taxfree_cli.record_views import (
    difference_json,
    look_up_json,
    print_differences,
    print_list,
    print_look_up,
    print_record,
    print_trials,
    print_verdicts,
    print_winners,
)
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.variant import operation_names
from taxfree_tune.measuring import results
from taxfree_tune.shapes import ShapeRequest, expand, is_wanted
from taxfree_tuning_db import (
    Database,
    Difference,
    HardwareFingerprint,
    Record,
    Table,
    TrialRecord,
    differences,
    export,
    import_records,
    plan_import,
    prune,
    read_export,
    read_table,
    shipped_records,
    stale_reason,
)

db = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    help="Inspect the tuning database; import and export records.",
)

Gpu: TypeAlias = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Only records of GPUs with this in their name."),
]
Trials: TypeAlias = Annotated[
    bool, typer.Option("--trials", help="Show each tried candidate and its outcome.")
]
ExportFile: TypeAlias = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="File to write; default: stdout.")
]
ImportFile: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="A file of `taxfree db export`; - for stdin.")
]
ResultFile: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="A file of `taxfree bench --out`.")
]


TableFile: TypeAlias = Annotated[
    Path, typer.Argument(metavar="TABLE", help="A database, or a file of `taxfree db export`.")
]
VerifiedTable: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="TABLE",
        help="A database, or a file of `taxfree db export`; default: your records and the shipped.",
    ),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change; store nothing.")
]
SampleSize: TypeAlias = Annotated[
    int, typer.Option("--sample", metavar="COUNT", min=1, help="Records to measure, at most.")
]
Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", metavar="NUMBER", min=0, help="Which records are measured.")
]


@db.callback()
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@db.command("path")
def path_command(db: options.Db = None, json: options.Json = False) -> None:
    """Print the path of the database."""
    path = options.database_path(db)
    if json:
        print_json({"path": str(path), "exists": path.exists()})
        return
    print_lines([str(path)])


@db.command("list")
def list_command(
    op: options.OnlyOp = None,
    gpu: Gpu = None,
    db: options.Db = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """List the winners by operation, sizes and GPUs, with the shipped ones."""
    records = _selected(_table(db), op, gpu)
    if json:
        print_json({"records": [record.to_json() for record in records]})
        return
    if all:
        print_list(records)
    else:
        print_winners(records)


@db.command("show")
def show_command(
    op: options.Op = options.DEFAULT_OP,
    shapes: options.Shapes = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    gpu: Gpu = None,
    trials: Trials = False,
    db: options.Db = None,
    all: options.All = False,
    json: options.Json = False,
) -> None:
    """Show the records of shapes with all measurements; fails if a shape has none.

    Without --shapes, --trials or --all, only the winners.
    """
    records = _selected(_table(db), op, gpu)
    if shapes:
        request = _request(op, shapes, gpus, dtype, records)
        problems = [asdict(problem) for problem in expand(op, request)]
        _require_records(op, problems, records, any_world=gpus is None)
        records = [record for record in records if record.problem in problems]
    elif gpus or dtype:
        request = _request(op, None, gpus, dtype, records)
        records = [
            record
            for record in records
            if (problem := recorded_problem(op, record.problem)) is not None
            and is_wanted(problem, request)
        ]
    tried = _trials(db, records) if trials else {}
    if json:
        documents = [record.to_json() for record in records]
        if trials:
            for record, document in zip(records, documents, strict=True):
                document["tried"] = [asdict(trial) for trial in tried.get(record.key, ())]
        print_json({"records": documents})
        return
    if not (records and (shapes or trials or all)):
        print_winners(records)
        return
    for record in records:
        print_record(record)
        if tried.get(record.key):
            print_trials(tried[record.key])


@db.command("why")
def why_command(
    op: options.Op = options.DEFAULT_OP,
    shapes: options.Shapes = None,
    gpus: options.Gpus = None,
    dtype: options.Dtype = None,
    gpu: Gpu = None,
    db: options.Db = None,
    json: options.Json = False,
) -> None:
    """Print, step by step, how a problem is looked up for recorded GPU models and this one."""
    if not shapes:
        raise UsageError("no problem is given", 'for example --shapes "m=16 n=3584 k=8192"')
    from taxfree._runtime.dispatch import resolve  # loads torch

    table = _table(db)
    records = _selected(table, op, gpu)
    machines = _machines(records, gpu)
    request = _request(op, shapes, gpus, dtype, records or _selected(table, op, None))
    answers = [
        (asdict(problem), machine, resolve(op, problem, table, machine, limits))
        for problem, (machine, limits) in itertools.product(expand(op, request), machines.items())
    ]
    if json:
        print_json({"op": op, "look_ups": [look_up_json(*answer) for answer in answers]})
        return
    for answer in answers:
        print_look_up(op, *answer)


@db.command("export")
def export_command(
    file: ExportFile = None, op: options.OnlyOp = None, gpu: Gpu = None, db: options.Db = None
) -> None:
    """Write your records as one JSON document."""
    with _reading(db) as database:
        records = _selected(Table(database.records()), op, gpu)
    export(records, sys.stdout if file is None else file)
    note(f"records exported: {len(records)}")


@db.command("import")
def import_command(
    file: ImportFile, dry_run: DryRun = False, db: options.Db = None, json: options.Json = False
) -> None:
    """Import the records of an export; of two for one problem, the better measured one stays."""
    from taxfree._runtime.legality import refusal  # loads torch

    # before a database is made for them
    entries = read_export(sys.stdin if str(file) == "-" else file)
    path = options.database_path(db)
    before: dict[str, Record] = {}
    if dry_run:
        if path.exists():
            before = {record.key: record for record in read_table(path)}
        report = plan_import(before.get, entries, file.name, refusal)
    else:
        with Database(path) as database:
            report = import_records(database, entries, file.name, refusal)
    for what, reason in report.refused:
        warn(f"{what} is refused: {reason}")
    done = {"added": report.added, "replaced": report.replaced, "kept": report.kept}
    changes: list[Difference] = []
    if dry_run:
        taken = {record.key: record for record in (*report.added, *report.replaced)}
        changes = differences(before.values(), (before | taken).values())
    if json:
        document: dict[str, Any] = {
            name: [record.key for record in records] for name, records in done.items()
        }
        if dry_run:
            document["differences"] = list(map(difference_json, changes))
        print_json(document | {"refused": [list(refusal) for refusal in report.refused]})
    else:
        if dry_run:
            print_differences(changes)
        print_lines(f"{len(records)} {name}" for name, records in done.items())
    if report.refused:
        others = "would be" if dry_run else "are"
        raise TaxfreeError(
            f"{len(report.refused)} of {len(entries)} records are refused",
            f"the warnings say why; the others {others} imported",
        )


@db.command("diff")
def diff_command(before: TableFile, after: TableFile, json: options.Json = False) -> None:
    """Show how two tables differ; each is a database or an export."""
    changes = differences(read_table(before), read_table(after))
    if json:
        print_json({"differences": list(map(difference_json, changes))})
        return
    print_differences(changes)


@db.command("verify")
def verify_command(
    table: VerifiedTable = None,
    op: options.OnlyOp = None,
    sample: SampleSize = 5,
    seed: Seed = 0,
    fabric: options.Fabric = "auto",
    db: options.Db = None,
    json: options.Json = False,
) -> None:
    """Measure a sample of the records again on this machine; fail if they no longer hold."""
    if table is not None and db is not None:
        raise UsageError("a table and --db are given", "give one of them")
    from taxfree_tune import devices
    from taxfree_tune.tuning import verification

    chosen = devices.fabric_for(fabric)
    records = list(_table(db).records() if table is None else read_table(table))
    of_ops = [record for record in _selected(Table(records), op, None) if record.op != options.STEP]
    of_machine = verification.of_this_machine(of_ops, chosen)
    if not of_machine:
        raise NoRecord(
            f"none of {len(of_ops)} records of operations is of this machine",
            "`taxfree db list` shows their GPUs; world sizes must fit too; records of decode steps "
            f"are measured by `taxfree tune --op {options.STEP}` alone",
        )
    taken = verification.sample(of_machine, sample, seed)
    note(f"verifying {len(taken)} of {len(of_machine)} records of this machine")
    verdicts = []
    for verdict in verification.verify(taken, chosen):
        verdicts.append(verdict)
        note(f"{verdict.state}: {verdict.record.op} {_problem(verdict.record)}")
    if json:
        print_json(
            {"records": len(of_machine), "verdicts": [verdict.to_json() for verdict in verdicts]}
        )
    else:
        print_verdicts(verdicts)
    verification.require_held(verdicts)


@db.command("adopt")
def adopt_command(file: ResultFile, db: options.Db = None, json: options.Json = False) -> None:
    """Make records from the results of a bench, for problems without a record.

    Measurements and records of other versions of their variants are ignored.
    """
    from taxfree.fingerprints import versions
    from taxfree_tune.tuning.winner import adopted  # loads torch

    read = adopted(results.load(file))
    for problem, reason in read.left_out:
        warn(f"{problem} is left out: {reason}")
    with Database(options.database_path(db)) as database, database.transaction():
        table = Table(database.records(), shipped_records())
        recorded = {
            record.key
            for op in {record.op for record in read.records}
            for record in table.serving(versions(op))
            if record.op == op and stale_reason(record, versions(op)) is None
        }
        added = [record for record in read.records if record.key not in recorded]
        for record in added:
            database.put(record)
    kept = [record for record in read.records if record.key in recorded]
    if json:
        keys = {"added": [record.key for record in added], "kept": [record.key for record in kept]}
        print_json(keys | {"left_out": [list(left) for left in read.left_out]})
        return
    print_lines(
        f"added {record.op} {format_problem(record.op, record.problem)}" for record in added
    )
    counts = {"added": added, "kept": kept, "left out": read.left_out}
    print_lines([", ".join(f"{len(records)} {name}" for name, records in counts.items())])


@db.command("prune")
def prune_command(db: options.Db = None, json: options.Json = False) -> None:
    """Delete the records whose winners are variants that no longer exist."""
    from taxfree_kernels.variant import variants  # loads torch

    with _reading(db) as database:
        recorded = {record.op for record in database.records()}
    variants_of = {op: variants(op) for op in operation_names() if op in recorded}
    with Database(options.database_path(db)) as database:
        deleted = prune(database, variants_of)
    if json:
        print_json({"deleted": [record.to_json() for record in deleted]})
        return
    print_lines(
        f"deleted {record.op} {format_problem(record.op, record.problem)}" for record in deleted
    )
    print_lines([f"records deleted: {len(deleted)}"])


# -- records --


def _problem(record: Record) -> str:
    return format_problem(record.op, record.problem)


def _reading(db: Path | None) -> Database:
    return Database(options.database_path(db), read_only=True)


def _table(db: Path | None) -> Table:
    """The user's and the shipped records; only a database that `--db` names must exist."""
    if db is None and not options.database_path(None).exists():
        note("there is no tuning database yet: only shipped records are shown")
        return Table(shipped=shipped_records())
    with _reading(db) as database:
        return Table(database.records(), shipped_records())


def _selected(table: Table, op: str | None, gpu: str | None) -> list[Record]:
    """Records of an operation, perhaps of an older taxfree's, and of GPUs.

    Raises:
        UsageError: there is no such operation.
    """
    records = list(table.records())
    if op is not None and all(record.op != op for record in records):
        require_operation(op, options.STEP)
    return [
        record
        for record in records
        if op in (None, record.op) and (gpu or "").lower() in record.hardware.gpu.lower()
    ]


def _machines(
    records: Sequence[Record], gpu: str | None
) -> dict[HardwareFingerprint, Hardware | None]:
    """The devices of records, this machine's, and those that are named, with their known limits.

    Raises:
        NoRecord: there are none.
    """
    from taxfree.fingerprints import hardware_fingerprint
    from taxfree_kernels.fabric.open import hardware_here
    from taxfree_tune.devices import available_gpus

    limits = {hardware.name: hardware for hardware in KNOWN.values()}
    limits_of = {record.hardware: limits.get(record.hardware.gpu) for record in records}
    here = [hardware_here()] if available_gpus() else []
    for hardware in (*here, *(KNOWN.values() if gpu else ())):
        machine = hardware_fingerprint(hardware)
        is_asked = (gpu or "").lower() in machine.gpu.lower()
        if is_asked and not any(machine.is_same(other) for other in limits_of):
            limits_of[machine] = hardware
    if not limits_of:
        raise NoRecord(
            "no record names a GPU to look up",
            "run `taxfree tune` first; with --gpu, `taxfree db list` shows the recorded names",
        )
    return limits_of


def _request(
    op: str,
    shapes: list[str] | None,
    gpus: str | None,
    dtype: str | None,
    records: Iterable[Record],
) -> ShapeRequest:
    """The request of the options; without `--gpus`, for the world sizes that records have."""
    world_sizes = sorted({int(record.problem["world_size"]) for record in records}) or [1]
    return options.ShapeOptions(op, shapes, gpus, dtype).request(tuple(world_sizes))


def _require_records(
    op: str,
    problems: Iterable[dict[str, Any]],
    records: Iterable[Record],
    *,
    any_world: bool,
) -> None:
    """Fail unless each problem has a record, perhaps of another world size.

    Raises:
        NoRecord: naming the first that has none.
    """

    def identity(problem: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in problem.items() if not (any_world and k == "world_size")}

    recorded = [identity(record.problem) for record in records]
    missing = [problem for problem in problems if identity(problem) not in recorded]
    if missing:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        first = {**identity(missing[0]), "dtype": None}
        dtypes = [problem["dtype"] for problem in recorded if problem | {"dtype": None} == first]
        hint = "`taxfree db list` shows what there is; `taxfree tune` makes records"
        if dtypes:
            hint = f"there is one of {dtypes[0]}: add --dtype {dtypes[0]}"
        raise NoRecord(f"no record of {format_problem(op, missing[0])}{others}", hint)


def _trials(db: Path | None, records: Iterable[Record]) -> dict[str, tuple[TrialRecord, ...]]:
    if not options.database_path(db).exists():  # all records are shipped ones, without trials
        return {}
    with _reading(db) as database:
        return {record.key: database.trials(record.key) for record in records}
