"""`taxfree report`: one HTML page of what was tuned and measured, for a browser without network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from taxfree.files import require_writable, write
from taxfree_cli import options
from taxfree_cli.output import note
from taxfree_cli.pictures import require_drawing

Out: TypeAlias = Annotated[
    Path, typer.Option("--out", metavar="FILE.html", help="The page to write.")
]
ResultFiles: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--results",
        metavar="PATH",
        help="A file of bench --out, explain --json or explain --trace, or a folder of them; "
        "repeatable.",
    ),
]


def report(
    out: Out = Path("report.html"), db: options.Db = None, results: ResultFiles = None
) -> None:
    """Write a page of figures from the database, the shipped records and result files."""
    require_writable(out)
    require_drawing("report", "report")
    path = options.database_path(db)
    from taxfree_tune.reporting import sources
    from taxfree_tune.reporting.page import page

    read = sources.read(path, db is not None, results or ())
    text = page(read)
    write(out, text)
    note(f"wrote {out}, {len(text.encode()) / 1e6:.1f} MB")
