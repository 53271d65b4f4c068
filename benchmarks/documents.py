"""What the scripts that write documents share: tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
