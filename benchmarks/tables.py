"""Writes the Markdown tables of the README and the docs from committed result files.

A table is between two markers. The first names a result file, and may fix fields of a problem:

    <!-- results: benchmarks/results/all_gather_matmul/nvidia-h200-x8.json gather_dim=1 -->
    <!-- end of results -->

The kind `results` makes one table per combination of the other fields, with a row per M, or per
length of the KV cache. Other kinds:

    summary MACHINE     a few problems of all operations, from the machine's result files
    highlights MACHINE  a line per operation
    scaled FILES        problems in fp8, beside 16 bits, a column per M; FILES may have a *
    accept FILE         a run of the acceptance script; with rows=models that of models alone
    model FILES         whole models, of ``taxfree bench --model``; FILES may have a *; of these
                        modes, as in modes=graph,step

Below a table are the variants that have changed since they were measured. `--check` writes nothing,
and fails if a document differs from the result files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.documents import (
    ROOT,
    Block,
    check_parser,
    is_current,
    is_removed,
    ran,
    rows_of,
    table,
    us,
    with_blocks,
    write_changed,
)
from taxfree._runtime.dispatch import Dispatcher
from taxfree.fingerprints import size_field
from taxfree.problems import format_problem, heading, recorded_problem
from taxfree.settings import Settings
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import is_library
from taxfree_tune.measuring.results import DISPATCH, Row, by_problem, fastest, load, machine_name
from taxfree_tuning_db import Table, shipped_records

COLUMNS = (
    "library eager", "library graph", "ours, unfused", "best fused", "dispatch", "speed-up",
    "x bound", "dispatch eager",
)  # fmt: skip
CAPTION = (
    "Microseconds, median of the slowest rank; ours and dispatch in a graph if there are any. "
    "Speed-up: fastest library time / dispatch. Last, dispatch in eager calls."
)
_COLUMNS = {"gather_dim": (1,), "dtype": ("bfloat16",)}
_ROWS = {"gather_dim": (0,), "dtype": ("bfloat16",)}
#: operation, and the problems: field -> values
SUMMARY: Sequence[tuple[str, Mapping[str, Sequence[Any]]]] = (
    ("all_gather_matmul", _COLUMNS | {"m": (1, 64, 512, 1024)}),
    ("all_gather_matmul", _ROWS | {"m": (1, 64, 256, 1024, 4096, 8192)}),
    ("matmul_all_reduce", {"k": (3584,), "residual": (False,), "m": (1, 64, 256, 1024, 4096)}),
    ("matmul_all_reduce", {"rms_norm": (True,), "m": (16,)}),
    ("matmul_reduce_scatter", {"m": (256, 1024, 4096, 8192)}),
    ("flash_decode", {"batch": (1, 8, 16), "kv_len_per_rank": (8192,)}),
)
SUMMARY_CAPTION = (
    "Microseconds, median of the slowest rank: our fastest variant in a graph, fused or not; what "
    "dispatch picks there today, from the same measurements; the library's fastest, in a graph or "
    "eager, and its time over dispatch's."
)
_LARGE = range(1025, 1 << 20)
#: label, operation, and the problems: field -> values
HIGHLIGHTS: Sequence[tuple[str, str, Mapping[str, Sequence[Any]]]] = (
    ("all-gather + matmul, A by columns", "all_gather_matmul", {"gather_dim": (1,)}),
    ("all-gather + matmul, A by rows", "all_gather_matmul", {"gather_dim": (0,), "m": range(1025)}),
    ("all-gather + matmul, A by rows", "all_gather_matmul", {"gather_dim": (0,), "m": _LARGE}),
    ("matmul + all-reduce", "matmul_all_reduce", {"rms_norm": (False,)}),
    ("matmul + all-reduce + RMSNorm", "matmul_all_reduce", {"rms_norm": (True,)}),
    ("matmul + reduce-scatter", "matmul_reduce_scatter", {"m": range(1025)}),
    ("matmul + reduce-scatter", "matmul_reduce_scatter", {"m": _LARGE}),
    ("decode attention, batch 1", "flash_decode", {"batch": (1,)}),
    ("decode attention, batch 4 and 8", "flash_decode", {"batch": (4, 8)}),
)
HIGHLIGHTS_CAPTION = (
    "Speed-up over the library's fastest path, in a graph or eager: of what dispatch picks today "
    "in a graph, and of our fastest variant there, from the same measurements."
)
FP8_CAPTION = (
    "Microseconds in a graph of what dispatch picks, median of the slowest rank; in brackets as a "
    "multiple of the library's fastest path, in fp8 that of inputs which are quantised before; "
    "of a problem that was tuned since, both are of the search's last round."
)
_COMMON = ("dtype", "world_size", "v_head_dim")  # the same in the whole table


def main() -> int:
    """Update the documents, or check them; returns the exit code."""
    options = check_parser(__doc__).parse_args()
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(documents)}
    updated = {path: update(text, ROOT) for path, text in texts.items()}
    is_outdated = write_changed(updated, check=options.check)
    return int(options.check and is_outdated)


def update(text: str, root: Path) -> str:
    """A document with new tables.

    Args:
        text: Markdown.
        root: that the names of result files start from.
    """

    def rows(block: Block) -> list[Row]:
        return [row for path in sorted(root.glob(block["file"])) for row in rows_of(load(path))]

    def where(block: Block) -> dict[str, str]:
        return dict(word.split("=", 1) for word in block["where"].split())

    return with_blocks(
        text,
        {
            "results": lambda block: tables(rows(block), where(block)),
            "summary": lambda block: summary(root, block["file"]),
            "highlights": lambda block: highlights(root, block["file"]),
            "model": lambda block: models(
                [json.loads(path.read_bytes()) for path in sorted(root.glob(block["file"]))],
                where(block)["modes"].split(","),
            ),
            "scaled": lambda block: scaled(
                sorted(root.glob(block["file"])), Path(block["file"]).name
            ),
            "accept": lambda block: acceptance(
                json.loads((root / block["file"]).read_bytes()), where(block)
            ),
        },
    )


def tables(rows: Iterable[Row], where: Mapping[str, str]) -> str:
    """The tables of the rows whose problems have these fields, in Markdown.

    A table is of problems that differ in one field only, below a title of the other fields.
    """
    chosen = [row for row in rows if all(str(row.problem[f]) == v for f, v in where.items())]
    by_title: dict[str, list[list[Row]]] = {}
    for group in by_problem(chosen):
        along = size_field(group[0].op)
        fields = {name: value for name, value in group[0].problem.items() if name != along}
        by_title.setdefault(heading(group[0].op, fields), []).append(group)
    parts = []
    for title, groups in by_title.items():
        header = [size_field(groups[0][0].op), *COLUMNS]
        cells = table(header, map(_cells, sorted(groups, key=_size)))
        parts.append(f"**{title}**\n\n{cells}\n")
    return "".join(parts) + f"{CAPTION}{_age(chosen)}\n"


def summary(root: Path, machine: str) -> str:
    """A few problems of all operations on a machine, in Markdown."""
    header = ["", "ours", "dispatch", "library", "speed-up"]
    lines, shown = [], list[Row]()
    for op, wanted in SUMMARY:
        for group in _measured(root, machine, op, wanted):
            ours, dispatch, library = compared = _compared(group, machine)
            shown += filter(None, compared)
            fields = {f: v for f, v in group[0].problem.items() if f not in _COMMON}
            named = [_named(ours), _named(dispatch), _named(library)]
            times = f"{library.median_us / dispatch.median_us:.2f}" if dispatch else "-"
            lines.append([f"{op} {format_problem(op, fields)}", *named, times])
    return f"{table(header, lines, text=[0])}\n{SUMMARY_CAPTION}{_age(shown)}\n"


def highlights(root: Path, machine: str) -> str:
    """The ranges of speed-ups on a machine, in Markdown."""
    header = ["", "sizes", "dispatch", "our fastest variant"]
    lines, shown = [], []
    for label, op, wanted in HIGHLIGHTS:
        groups = _measured(root, machine, op, wanted)
        sizes = [str(_size(group)) for group in groups]
        compared = [_compared(group, machine) for group in groups]
        shown += [row for rows in compared for row in rows if row]
        by_dispatch = [library.median_us / pick.median_us for _, pick, library in compared if pick]
        by_ours = [library.median_us / ours.median_us for ours, _, library in compared]
        of = f"{size_field(op)} = {_span(sizes[0], sizes[-1], '...')}"
        spans = [
            _span(f"{min(x):.2f}", f"{max(x):.2f}", " to ") if x else "-"
            for x in (by_dispatch, by_ours)
        ]
        lines.append([label, of, *spans])
    return f"{table(header, lines, text=[0, 1])}\n{HIGHLIGHTS_CAPTION}{_age(shown)}\n"


def _span(first: str, last: str, between: str) -> str:
    return first if first == last else f"{first}{between}{last}"


def _measured(
    root: Path, machine: str, op: str, wanted: Mapping[str, Sequence[Any]]
) -> list[list[Row]]:
    """The rows of each problem whose fields have these values, by size."""
    folder = root / "benchmarks/results" / op
    paths = [folder / f"{machine}.json", *sorted(folder.glob(f"{machine}-*.json"))]
    rows = [row for path in paths for row in rows_of(load(path))]
    chosen = [row for row in rows if all(row.problem[f] in v for f, v in wanted.items())]
    return sorted(by_problem(chosen), key=_size)


def _size(group: Sequence[Row]) -> int:
    return int(group[0].problem[size_field(group[0].op)])


def _compared(group: Sequence[Row], machine: str) -> tuple[Row, Row | None, Row]:
    """Our fastest in a graph, what dispatch picks there today, and the library's fastest."""
    in_graph = [row for row in group if row.mode == "graph"]
    others = [row for row in in_graph if not row.is_library]
    ours = fastest([row for row in others if row.variant != DISPATCH])
    library = fastest([row for row in group if row.is_library])
    assert ours is not None
    assert library is not None
    return ours, _picked(in_graph, machine), library


def _picked(in_graph: Sequence[Row], machine: str) -> Row | None:
    """The row of what dispatch picks today: its own, if it picked the same then; or any."""
    problem = recorded_problem(in_graph[0].op, in_graph[0].problem)
    assert problem is not None
    pick = _dispatcher(machine).choose(in_graph[0].op, problem)
    config = {"variant": pick.variant, **pick.config}
    rows = sorted(in_graph, key=lambda row: row.variant != DISPATCH)
    return next((row for row in rows if {"variant": row.variant} | row.config == config), None)


@cache
def _dispatcher(machine: str) -> Dispatcher:
    hardware = next(x for x in KNOWN.values() if machine.startswith(machine_name(x.name)))
    return Dispatcher(Table(shipped=shipped_records()), hardware, Settings())


def scaled(paths: Sequence[Path], machine: str) -> str:
    """What dispatch picks for problems in fp8, and in 16 bits, by rows, in Markdown.

    Args:
        paths: of result files, a problem in one of them.
    """
    lines: dict[str, dict[int, str]] = {}
    every = []
    for path in paths:
        results = load(path)
        rows = [row for row in rows_of(results) if row.mode == "graph"]
        every += rows
        created = results.environment["created"]
        for group in by_problem(rows):
            of_problem = {
                x: v for x, v in group[0].problem.items() if x not in (*_COMMON, "x_dtype")
            }
            size = of_problem.pop("m")
            kind = of_problem.pop("scales").replace("none", "bfloat16")
            name = f"{group[0].op} {format_problem(group[0].op, of_problem)}, {kind}"
            ours, library = _finals(group[0], machine, created) or _benched(group, machine)
            if ours and library:
                lines.setdefault(name, {})[size] = f"{ours:.1f} ({library / ours:.2f})"
    sizes = sorted({size for by_size in lines.values() for size in by_size})
    cells = [[name, *(by_size.get(m, "") for m in sizes)] for name, by_size in lines.items()]
    header = ["", *(f"m={m}" for m in sizes)]
    return f"{table(header, cells, text=[0])}\n{FP8_CAPTION}{_age(every)}\n"


def _benched(group: Sequence[Row], machine: str) -> tuple[float | None, float | None]:
    """Times of what dispatch picks today, and of the library's fastest path."""
    ours, library = _picked(group, machine), fastest([row for row in group if row.is_library])
    return ours.median_us if ours else None, library.median_us if library else None


def _finals(row: Row, machine: str, created: str) -> tuple[float, float] | None:
    """The same from the last round of a search that found the problem's record since."""
    problem = recorded_problem(row.op, row.problem)
    for record in shipped_records():
        if (
            record.op == row.op
            and machine.startswith(machine_name(record.hardware.gpu))
            and record.provenance["created"] > created
            and recorded_problem(record.op, record.problem) == problem
        ):
            every = (record.baseline, record.winner, *record.runners_up)
            library = min(x.median_us["graph"] for x in every if is_library(row.op, x.variant))
            return record.winner.median_us["graph"], library
    return None


def models(documents: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> str:
    """Tokens per second of whole models, by phase and mode, in Markdown.

    Args:
        documents: of ``taxfree bench --model --out``, all on as many GPUs of one kind.
        wanted: these modes.
    """
    every = (row for document in documents for row in document["rows"])
    rows = sorted((row for row in every if row["mode"] in wanted), key=_of_phase)
    modes = sorted(
        {(row["path"], row["mode"]) for row in rows},
        key=lambda mode: (mode[0] != "torch", wanted.index(mode[1])),
    )
    cells = []
    for (model, layers, phase), of_phase in groupby(
        rows, key=lambda row: (row["model"], row["layers"], row["phase"])
    ):
        by_mode = {(row["path"], row["mode"]): row for row in of_phase}
        called = f"{phase['name']}, batch {phase['batch']}, {phase['length']} tokens"
        times = (_tokens(by_mode.get(mode)) for mode in modes)
        cells.append([f"{model}, {layers} layers", called, *times])
    environments = [document["environment"] for document in documents]
    days = sorted({environment["created"][:10] for environment in environments})
    where = f"{rows[0]['world_size']} {environments[0]['hardware']['gpu']}, {', '.join(days)}"
    said = "Tokens per second with the head, in brackets as a multiple of torch's"
    header = ["model", "phase", *map(", ".join, modes)]
    return f"{table(header, cells, text=[0, 1])}\n{said}. {where}.\n"


def _of_phase(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Prompts of a model come before its decode, and small before large."""
    phase = row["phase"]
    is_decode = phase["name"] == "decode"
    return row["model"], row["layers"], is_decode, phase["batch"], phase["length"]


def _tokens(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    speedup = "" if row["speedup"] is None else f" ({row['speedup']:.2f})"
    return f"{row['tokens_per_s']:,.0f}{speedup}"


def acceptance(record: Mapping[str, Any], where: Mapping[str, str]) -> str:
    """What a user ran on a machine beside the library, in Markdown.

    Args:
        record: of ``benchmarks/accept``.
        where: with "rows": "models", operations by themselves are left out.
    """
    figures = {step["name"]: step["figures"] for step in record["steps"] if "figures" in step}
    lines = []
    for row in figures["bench"]:
        if row["mode"] == "graph" and where.get("rows") != "models":
            fields = {name: v for name, v in row["problem"].items() if name not in _COMMON}
            theirs, ours = f" ({row['library']})", f" ({row['config']['variant']})"
            problem = f"{row['op']} {format_problem(row['op'], fields)}"
            lines.append((problem, row["library_us"], theirs, row["median_us"], ours, 0.0))
    for phase, rows in groupby(figures["PyTorch"], key=lambda row: row["phase"]):
        timed = {(row["path"], row["mode"]): row for row in rows}
        mode = "graph" if ("torch", "graph") in timed else "eager"
        library = timed["torch", mode]
        called = f"Llama 8B's shape, 2 layers: {phase['name']} batch={phase['batch']} "
        called += f"length={phase['length']}{', in a graph' if mode == 'graph' else ''}"
        for way, said in ((mode, ""), ("step", ", by `decode_step`")):
            if row := timed.get(("taxfree", way)):
                times = library["median_us"], "", row["median_us"], ""
                lines.append((called + said, *times, max(library["iqr_us"], row["iqr_us"])))
    for row in figures["Transformers"]["rows"]:
        called = f"Transformers, a token of `generate`: {row['cache']} cache, batch={row['batch']}"
        least, most = row["library_range_us"]
        lines.append((called, row["library_us"], "", row["taxfree_us"], "", (most - least) / 2))
    for row in figures.get("training", {"rows": ()})["rows"]:
        called = f"a training step of an MLP: {'compiled' if row['is_compiled'] else 'eager'}"
        lines.append((called, row["torch_us"], "", row["taxfree_us"], "", row["torch_iqr_us"]))
    cells = [
        [
            called,
            f"{us(theirs)}{whose}",
            f"{us(ours)}{ran}",
            f"{theirs / ours:.2f}{' (within spread)' * (abs(theirs - ours) <= spread)}",
        ]
        for called, theirs, whose, ours, ran, spread in lines
    ]
    header = ["", "library, us", "taxfree, us", "speed-up"]
    beyond = [
        f"{step['name']} ({len(step['failures'])})" for step in record["steps"] if step["failures"]
    ]
    said = f" Beyond limits of the script, as the record says: {', '.join(beyond)}." * bool(beyond)
    machine = f"{record['ranks']} {record['gpu']}, {record['created'][:10]}"
    for step in record["steps"]:
        if "created" in step:
            machine += f"; {step['name']}: {step['created'][:10]}, another run"
    return f"{table(header, cells, text=[0])}\n{machine}.{said}\n"


def _age(rows: Iterable[Row]) -> str:
    """Sentences that name the variants of rows that have changed or were removed since, if any."""
    said: dict[str, set[str]] = {"Changed": set(), "Removed": set()}
    for row in rows:
        if not is_current(row):
            said["Removed" if is_removed(row) else "Changed"].add(ran(row))
    return "".join(f" {what} since: {', '.join(sorted(x))}." for what, x in said.items() if x)


def _cells(group: Sequence[Row]) -> list[str]:
    mode = "graph" if any(row.mode == "graph" for row in group) else "eager"
    library = [row for row in group if row.is_library]
    timed = [row for row in group if row.mode == mode and row not in library]
    others = [row for row in timed if row.variant != DISPATCH]
    dispatch = fastest([row for row in timed if row.variant == DISPATCH])
    best_library = fastest(library)
    speedup = best_library.median_us / dispatch.median_us if best_library and dispatch else None
    return [
        str(_size(group)),
        _us(fastest([row for row in library if row.mode == "eager"])),
        _us(fastest([row for row in library if row.mode == "graph"])),
        _us(fastest([row for row in others if not row.fused])),
        _named(fastest([row for row in others if row.fused])),
        _named(dispatch),
        "-" if speedup is None else f"{speedup:.2f}",
        "-" if dispatch is None else f"{dispatch.x_bound:.2f}",
        _us(fastest([row for row in group if (row.variant, row.mode) == (DISPATCH, "eager")])),
    ]


def _us(row: Row | None) -> str:
    return us(None if row is None else row.median_us)


def _named(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.median_us:.1f} ({ran(row)})"


if __name__ == "__main__":
    sys.exit(main())
