"""The common parts of scripts that write documents: Markdown tables, updates, the age of rows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from taxfree.fingerprints import versions
from taxfree_tune.measuring.results import DISPATCH, Results, Row

ROOT = Path(__file__).parents[1]
Block = re.Match[str]
#: between `<!-- kind -->` and `<!-- end of kind -->`; the first may be `<!-- kind: file where -->`
_BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>[a-z ]+)(?:: (?P<file>\S+)(?P<where>[^\n]*?))? -->\n)"
    r".*?(?P<end><!-- end of (?P=kind) -->)",
    re.DOTALL,
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table in Markdown.

    Args:
        header, rows: of as many cells each.
        text: the columns of words, which are left-aligned; numbers are right-aligned.
    """
    columns = range(len(header))
    named = [columns[name] for name in text]
    rule = ["---" if column in named else "---:" for column in columns]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *rows))


def us(time: float | None) -> str:
    """Microseconds, or a dash."""
    return "-" if time is None else f"{time:.1f}"


def check_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the first line of a script's docstring, and --check."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--check", action="store_true", help="fail if a document is out of date")
    return made


def with_blocks(text: str, makers: Mapping[str, Callable[[Block], str]]) -> str:
    """A document with new content in its blocks, by kind; those of other kinds stay."""

    def made(block: Block) -> str:
        make = makers.get(block["kind"])
        return block[0] if make is None else f"{block['begin']}\n{make(block)}\n{block['end']}"

    return _BLOCK.sub(made, text)


def write_changed(texts: Mapping[Path, str], *, check: bool = False) -> bool:
    """Write documents whose text has changed, and print their names; returns whether any has.

    With `check`, nothing is written.
    """
    changed = {p: text for p, text in texts.items() if p.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'updated'}")
    return bool(changed)


def rows_of(results: Results) -> list[Row]:
    """The rows of results, without those of our variants that were removed since.

    Rows of the dispatcher stay, whatever it ran.
    """
    return [row for row in results.rows if row.variant == DISPATCH or not is_removed(row)]


def ran(row: Row) -> str:
    """The variant of a row, or what dispatch ran."""
    return str(row.config.get("variant", row.variant))


def is_removed(row: Row) -> bool:
    """Whether a row is of a variant of ours that no longer exists."""
    return row.version is not None and ran(row) not in versions(row.op)


def is_current(row: Row) -> bool:
    """Whether a row is of its variant's current version, or not of a kernel of ours."""
    return row.version == versions(row.op).get(ran(row))
