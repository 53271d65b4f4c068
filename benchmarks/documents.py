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
    """The rows of a result file, but for those of variants that were removed since.

    What dispatch ran stays.
    """
    return [row for row in load(path).rows if row.variant == DISPATCH or not is_removed(row)]


def ran(row: Row) -> str:
    """The variant of a row, or what dispatch ran."""
    return str(row.config.get("variant", row.variant))


def is_removed(row: Row) -> bool:
    """Whether a row is of a variant of ours that is no more."""
    return bool(row.kernel_hash) and ran(row) not in kernel_hashes(row.op)


def is_todays(row: Row) -> bool:
    """Whether what was measured is what stands in the sources today; or no kernel of ours."""
    return row.kernel_hash == kernel_hashes(row.op).get(ran(row), "")
