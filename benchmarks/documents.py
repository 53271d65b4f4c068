"""What the scripts that write documents share: tables in Markdown, and how old a row is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from taxfree.fingerprints import kernel_hashes
from taxfree.measuring.results import DISPATCH, Row, load


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table in Markdown.

    Args:
        header, rows: of as many cells each.
        text: the columns of words, which stand left; numbers stand right.
    """
    columns = range(len(header))
    named = [columns[each] for each in text]
    rule = ["---" if column in named else "---:" for column in columns]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *rows))


def us(time: float | None) -> str:
    """Microseconds, or nothing."""
    return "-" if time is None else f"{time:.1f}"


def rows_of(path: Path) -> list[Row]:
    """The rows of a result file, but for those of variants of ours that were removed since."""
    return [
        row
        for row in load(path).rows
        if not row.kernel_hash or row.variant in (DISPATCH, *kernel_hashes(row.op))
    ]


def is_todays(row: Row) -> bool:
    """Whether what was measured is what stands in the sources today; or no kernel of ours."""
    variant = row.config.get("variant", row.variant)
    return row.kernel_hash == kernel_hashes(row.op).get(variant, "")
