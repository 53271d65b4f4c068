"""Writes docs/cli.md: `python -m tests.bad_input.document`, or `make docs`.

The commands come from the command line itself, the exit codes from where they are defined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from taxfree.settings import VARIABLES
from taxfree_cli.app import app
from taxfree_cli.exits import MEANINGS

PATH = Path(__file__).parents[2] / "docs" / "cli.md"
_WIDTH = 100
_SEVERAL = 3  # commands with the same option

_HEAD = """\
# The command line

<!-- Written by `make docs`: change the code or the table of bad inputs, not this page. -->

Results go to stdout, as tables or with `--json` as one document; progress and warnings go to
stderr. An error is one line `error: ...` and one line `hint: ...` at the end of stderr, never a
traceback unless `TAXFREE_DEBUG=1` asks for one.
"""
_BAD_INPUT = """\
## What can go wrong

Some 300 commands and calls that are refused are rows of `tests/bad_input/table.py`. Each is a test:
the command ends with the code of the row, says its words in the two lines, and leaves the database
and its folder as they were, byte for byte. What is spoiled at random by
`tests/bad_input/test_fuzz.py` is held to the same. Errors of calls from Python have a `message` and
a `hint`; the code is what a command would end with.
"""


def document() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        "## Exit codes\n",
        _table(("code", "meaning"), ((f"{c.value}", text) for c, text in MEANINGS.items())),
        "## Environment\n",
        _table(("variable", "meaning"), ((f"`{n}`", text) for n, text in VARIABLES.items())),
        "## Commands\n",
        *_commands(),
        _BAD_INPUT,
    ]
    return "\n".join(parts)


def _commands() -> Iterator[str]:
    """The help of each command; options that several have are explained once, before them."""
    group: Any = typer.main.get_command(app)
    commands = dict(_leaves("taxfree", group))
    contexts = {name: _context(name, command) for name, command in commands.items()}
    listed = {
        name: [(record, option) for option in command.get_params(contexts[name])
               if (record := option.get_help_record(contexts[name])) is not None]
        for name, command in commands.items()
    }  # fmt: skip
    counts = Counter(record for options in listed.values() for record, _ in options)
    named = Counter(name for (name, _), count in counts.items() if count >= _SEVERAL)
    shared = sorted(
        record for record, count in counts.items() if count >= _SEVERAL and named[record[0]] == 1
    )
    formatter = contexts["taxfree tune"].make_formatter()
    formatter.write_dl(shared)
    yield f"### Options of several commands\n\n{_fenced(formatter.getvalue())}"
    for name, command in commands.items():
        also = []
        for record, option in listed[name]:
            if record in shared:
                option.hidden = True
                also.append(option.opts[0])
        said = command.get_help(contexts[name]).removeprefix(f"Usage: {name} [OPTIONS]\n")
        others = "  Also" if "\nOptions:" in said else "\nOptions"
        said += f"\n{others}: {', '.join(also)}"
        yield f"### {name}\n\n{_fenced(said)}"


def _context(name: str, command: Any) -> typer.Context:
    return typer.Context(command, info_name=name, terminal_width=_WIDTH)


def _fenced(text: str) -> str:
    lines = (line.rstrip() for line in text.strip("\n").splitlines())
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands that do something, with what is typed for them."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for child in command.commands:
        yield from _leaves(f"{name} {child}", command.commands[child])


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(headings)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    os.environ.pop("COLUMNS", None)
    PATH.write_text(document(), encoding="utf-8")
