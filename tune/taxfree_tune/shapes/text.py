"""Parsing of text that users write."""

from __future__ import annotations

import re
from pathlib import Path

from taxfree.errors import UsageError
from taxfree.problems import LARGEST, quoted
from taxfree_tuning_db import files

_MOST_CHARACTERS = 1 << 24  # of a file; a device may have no end


def integer(text: str) -> int | None:
    """The integer that a text is, from 0 to ``LARGEST``; None if it is none."""
    # int() also takes signs, underscores, spaces and the digits of other scripts
    if not re.fullmatch(r"[0-9]{1,10}", text):
        return None
    number = int(text)
    return number if number <= LARGEST else None


def read_text(path: Path, what: str) -> str:
    """The content of a file.

    Raises:
        UsageError: it cannot be read, or is not text; the message calls it `what`.
    """
    try:
        return files.read_text(path, _MOST_CHARACTERS)
    except OSError as error:
        raise UsageError(
            f"{what} {quoted(str(path))} cannot be read: {error.strerror}", "check the path"
        ) from error
    except ValueError as error:  # not UTF-8, or no path at all
        raise UsageError(f"{what} {quoted(str(path))} is not text", "check the path") from error
