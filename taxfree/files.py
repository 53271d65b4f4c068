"""Files that users name: checked before anything is measured, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from taxfree.errors import TaxfreeError, UsageError
from taxfree_tuning_db import files


def read_json(path: Path, hint: str) -> Any:
    """The document of a JSON file.

    Raises:
        UsageError: it cannot be read, or is no JSON; with the hint.
    """
    try:
        return json.loads(files.read_text(path))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", f"check the path; {hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON", hint) from error


def require_writable(path: Path) -> None:
    """Check, before anything is measured, that a file can be written; it is not made yet.

    Raises:
        TaxfreeError: it cannot.
    """
    if files.is_database(path):
        raise TaxfreeError(f"{path} cannot be written: it is a database", "give another file")
    obstacle = _obstacle(path)
    if obstacle is not None:
        raise _unwritable(path, os.strerror(obstacle))


def _unwritable(path: Path, why: str) -> TaxfreeError:
    return TaxfreeError(f"{path} cannot be written: {why}", "check the path and its permissions")


def _obstacle(path: Path) -> int | None:
    """Why a file cannot be written, as of `errno`."""
    if path.is_dir():
        return errno.EISDIR
    touched, file = [path], files.replaced_by(path)
    if file is not None:
        folder = next(parent for parent in file.parents if parent.exists())
        if not folder.is_dir():
            return errno.ENOTDIR
        touched = [folder, file]
    is_allowed = all(os.access(entry, os.W_OK) for entry in touched if entry.exists())
    return None if is_allowed else errno.EACCES


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all; folders that are missing are made.

    Raises:
        TaxfreeError: it cannot be written.
    """
    require_writable(path)
    try:
        if (file := files.replaced_by(path)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error
