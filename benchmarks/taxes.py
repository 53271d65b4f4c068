"""Writes the tables of docs/lab/taxes.md, and its pictures, from committed files.

    python benchmarks/taxes.py           # update
    python benchmarks/taxes.py --check   # fail if a table differs from its file

A table is between two markers. The first names a file: of `explain --json`; for the cost of the
trace, of `benchmarks.timeline_cost`; for the validation of the instrument, of `make test-gpu`. If
the file is missing, the document says that nothing was measured. Pictures are named after the file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents import (
    ROOT,
    Block,
    blocks,
    check_parser,
    table,
    us,
    with_blocks,
    write_changed,
)
from taxfree.profiling.timeline import Timeline
from taxfree.shapes import format_problem
from taxfree_cli.explain_views import varying
from taxfree_cli.pictures import plot_taxes, plot_timelines

DOCUMENT = ROOT / "docs/lab/taxes.md"
PICTURES = ROOT / "docs/lab/pictures"
NOTHING = "Nothing was measured yet.\n"
COLUMNS = {
    "eager": "t_eager_us",
    "graph": "t_graph_us",
    "launch": "launch_us",
    "bulk synchronous": "bulk_synchronous_us",
    "locality": "locality_us",
    "graph penalty": "graph_penalty_us",
    "residual": "residual_us",
    "kernel work": "kernel_us",
    "bound": "t_bound_us",
}
#: field -> values of the rows of a second, smaller picture
FEW: Mapping[str, Sequence[int]] = {"gather_dim": (1,), "m": (1, 16, 64, 256, 1024)}


def main() -> int:
    """Update the document and its pictures, or check it; returns the exit code."""
    options = check_parser(__doc__).parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    is_outdated = write_changed({DOCUMENT: update(text, ROOT)}, check=options.check)
    if options.check:
        return int(is_outdated)
    PICTURES.mkdir(exist_ok=True)
    for kind, draw in (("taxes", _draw_taxes), ("timeline", _draw_timelines)):
        for file in (ROOT / block["file"] for block in blocks(text, kind)):
            if file.exists():
                for path in draw(_document(file), file):
                    print(f"drew {path.relative_to(ROOT)}")
    return 0


def _draw_taxes(document: Mapping[str, Any], file: Path) -> Iterator[Path]:
    rows = document["rows"]
    few = [row for row in rows if all(row["problem"].get(f) in v for f, v in FEW.items())]
    plot_taxes(rows, picture(file))
    yield picture(file)
    if few and len(few) < len(rows):
        plot_taxes(few, picture(file, "-few"))
        yield picture(file, "-few")


def _draw_timelines(document: Mapping[str, Any], file: Path) -> Iterator[Path]:
    for index, drawn in enumerate(document["pictures"]):
        path = timeline_picture(file, index)
        timelines = [Timeline.from_json(each) for each in drawn["timelines"]]
        title = f"{format_problem(drawn['op'], drawn['problem'])}, {drawn['hardware']}"
        plot_timelines(timelines, title, path)
        yield path


def update(text: str, root: Path) -> str:
    """A document with new tables.

    Args:
        text: Markdown.
        root: that the names of files start from.
    """

    makers = {"taxes": section, "timeline": cost_section, "instrument": instrument_section}

    def made(block: Block) -> str:
        file = root / block["file"]
        return makers[block["kind"]](_document(file), file) if file.exists() else NOTHING

    return with_blocks(text, dict.fromkeys(makers, made))


def _document(file: Path) -> dict[str, Any]:
    """The content of a file."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def picture(file: Path, which: str = "") -> Path:
    """The path of the picture of a file, or of a few of its rows."""
    return PICTURES / f"taxes-{file.stem}{which}.png"


def timeline_picture(file: Path, index: int) -> Path:
    """The path of a timeline's picture."""
    return PICTURES / f"timeline-{file.stem}-{index}.png"


def cost_section(document: Mapping[str, Any], file: Path) -> str:
    """The cost of the trace by variant, and links to the pictures."""
    rows = document["rows"]
    header, lines = ["variant", "problems", "median", "worst", "at"], []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        lines.append([variant, *_costs(own)])
    lines.append(["**all**", *_costs(rows)])
    names = [format_problem(each["op"], each["problem"]) for each in document["pictures"]]
    links = [
        f"- [{name}](pictures/{timeline_picture(file, index).name})\n"
        for index, name in enumerate(names)
    ]
    return "\n".join(part for part in (table(header, lines, text=[0, -1]), "".join(links)) if part)


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    worst = max(rows, key=lambda row: row["cost"])
    median = statistics.median(row["cost"] for row in rows)
    where = format_problem(worst["op"], worst["problem"])
    return [str(len(rows)), f"{median:+.1%}", f"{worst['cost']:+.1%}", where]


def section(document: Mapping[str, Any], file: Path) -> str:
    """The table of all rows, steps that take longer alone, and open rows with their reasons."""
    rows = document["rows"]
    differ = varying([row["problem"] for row in rows])
    first = rows[0]
    same = {name: value for name, value in first["problem"].items() if name not in differ}
    lines = []
    for row in rows:
        fields = [str(row["problem"][name]) for name in differ]
        lines.append([*fields, row["variant"], *(us(row.get(field)) for field in COLUMNS.values())])
    parts = [
        f"{first['op']} {format_problem(first['op'], same)}, {first['hardware']}; microseconds per "
        f"call of the slowest rank. [Picture](pictures/{picture(file).name}).\n",
        table([*differ, "variant", *COLUMNS], lines),
        _alone(rows, differ),
        _open(rows, differ),
    ]
    return "\n".join(part for part in parts if part)


def instrument_section(document: Mapping[str, Any], _: Path) -> str:
    """Delays put into pipelines and kernels, and the time found for each."""
    header, lines = ["part", "put", "found", "allowed", "most elsewhere", "in"], []
    for row in sorted(document["rows"], key=lambda row: (row["part"], row["put_us"])):
        times = [f"{row['put_us']:.1f}", f"{row['found_us']:.2f}", f"±{row['allowed_us']:.1f}"]
        lines.append([row["part"], *times, f"{row['elsewhere_us']:+.2f}", row["elsewhere"]])
    made = table(header, lines, text=[0, -1])
    return f"{document['environment']['hardware']['gpu']}; microseconds.\n\n{made}"


def _alone(rows: Sequence[Mapping[str, Any]], differ: Sequence[str]) -> str:
    """Rows whose steps take longer alone than in place, with the clocks of both."""
    lines = []
    for row in rows:
        times = [step["alone_us"] for step in row.get("steps", [])]
        if row["t_graph_us"] is None or not times or None in times:
            continue
        whole, clocks = row["t_graph_us"], [step["alone_mhz"] for step in row["steps"]]
        if sum(times) > 1.02 * whole and None not in clocks:
            in_graph = row["mhz"].get("graph")
            steps = " + ".join(
                f"{step['name']} {step['alone_us']:.1f} at {step['alone_mhz']:.0f} MHz"
                for step in row["steps"]
            )
            lines.append(
                f"- {_named(row, differ)}: {steps} = {sum(times):.1f} us; together {whole:.1f} us "
                f"at {in_graph:.0f} MHz\n"
            )
    return f"Steps that take longer alone than in place:\n\n{''.join(lines)}" if lines else ""


def _open(rows: Sequence[Mapping[str, Any]], differ: Sequence[str]) -> str:
    """Rows whose parts do not add up."""
    lines = [f"- {_named(row, differ)}: {'; '.join(row['open'])}\n" for row in rows if row["open"]]
    return f"Open rows, {len(lines)} of {len(rows)}:\n\n{''.join(lines)}" if lines else ""


def _named(row: Mapping[str, Any], differ: Sequence[str]) -> str:
    fields = " ".join(f"{name}={row['problem'][name]}" for name in differ)
    return f"{fields} {row['variant']}".strip()


if __name__ == "__main__":
    sys.exit(main())
