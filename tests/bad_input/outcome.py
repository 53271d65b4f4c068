"""The required outcome of a refused command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_TRACEBACK = re.compile(r'^Traceback |^ +File "|^Exception ignored', re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """A command's output and exit code."""

    code: int
    out: str
    err: str


def content(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its bytes; None for folders. Not Python's bytecode."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def assert_is_refused(outcome: Outcome, code: int, error: str = "", hint: str = "") -> None:
    """One line of error, one of hint after it, and the code; perhaps notes before."""
    assert not _TRACEBACK.search(outcome.err), outcome.err
    lines = outcome.err.splitlines()
    assert [line.partition(" ")[0] for line in lines[-2:]] == ["error:", "hint:"], outcome.err
    assert not [line for line in lines[:-2] if line.startswith(("error:", "hint:"))], outcome.err
    assert error in lines[-2], outcome.err
    assert hint in lines[-1], outcome.err
    assert len(lines[-1]) > len("hint: "), outcome.err
    assert "should not happen" not in lines[-1], outcome.err
    assert outcome.code == code, outcome.err
