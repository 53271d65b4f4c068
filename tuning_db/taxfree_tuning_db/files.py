"""Files that are written whole or not at all; what is no file, such as a pipe, stays what it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_SQLITE = b"SQLite format 3\0"


def replaced_by(path: Path) -> Path | None:
    """Return the file that writing to a path replaces: the one that its links lead to.

    Args:
        path: a file, perhaps one to be made; else, such as for a device, None is returned.
    """
    if path.exists() and not path.is_file():
        return None
    return Path(os.path.realpath(path))


def is_database(path: Path) -> bool:
    """Whether a path leads to a file of SQLite, which nobody wants replaced by text."""
    if not path.is_file():  # a pipe is not opened: its reader would see that
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def write(path: Path, text: str) -> None:
    """Replace a file at once, or write into what is no file.

    Raises:
        OSError: it cannot be written, or is a database; a file is as it was.
    """
    file = replaced_by(path)
    if file is None:
        path.write_text(text, encoding="utf-8")
        return
    if is_database(file):
        raise FileExistsError(errno.EEXIST, "it is a database", str(path))
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
