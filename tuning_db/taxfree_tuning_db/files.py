"""Files that are written whole or not at all; what is no file, such as a pipe, stays what it is."""

from __future__ import annotations

import os
from pathlib import Path


def replaced_by(path: Path) -> Path | None:
    """Return the file that writing to a path replaces: the one that its links lead to.

    Args:
        path: a file, perhaps one to be made; else, such as for a device, None is returned.
    """
    if path.exists() and not path.is_file():
        return None
    return Path(os.path.realpath(path))


def write(path: Path, text: str) -> None:
    """Replace a file at once, or write into what is no file.

    Raises:
        OSError: it cannot be written; a file is as it was.
    """
    file = replaced_by(path)
    if file is None:
        path.write_text(text, encoding="utf-8")
        return
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
