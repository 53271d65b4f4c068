"""Files that are written whole or not at all. A pipe or a device is written into."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

_SQLITE = b"SQLite format 3\0"


def read_text(path: Path, most: int = 1 << 28) -> str:
    """Return the text of a file that a user names, in UTF-8, perhaps with a mark of that.

    Args:
        most: characters; a device may have no end.

    Raises:
        OSError: it cannot be read, or has more.
        UnicodeDecodeError: it is not text.
    """
    with path.open(encoding="utf-8-sig") as file:
        return read_all(file, most)


def read_all(stream: IO[str], most: int = 1 << 28) -> str:
    """As above, of an open one."""
    text = stream.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return text


def users_folder(find: Callable[[str], Path]) -> Path:
    """taxfree's folder of a kind, such as `platformdirs.user_data_path`.

    A user without a home, as in containers, has one in the temporary folder.
    """
    try:
        return find("taxfree")
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"taxfree-{os.getuid()}")


def replaced_by(path: Path) -> Path | None:
    """Return the file that a write replaces, behind all links; None for a device or a pipe."""
    if path.exists() and not path.is_file():
        return None
    return Path(os.path.realpath(path))


def is_database(path: Path) -> bool:
    """Whether a path is a SQLite file, which nobody wants replaced by text."""
    if not path.is_file():  # opening a pipe would disturb its reader
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def write(path: Path, text: str) -> None:
    """Replace a file atomically, or write into a device or a pipe.

    Raises:
        OSError: it cannot be written, or is a database; the file is unchanged.
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
