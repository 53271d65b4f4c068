"""What commands need before they draw with Altair."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from taxfree.errors import TaxfreeError, UsageError
from taxfree.files import require_writable


def require_drawing(what: str, extra: str) -> None:
    """Check that what draws is installed.

    Args:
        what: needs it.
        extra: of taxfree, that has it.

    Raises:
        TaxfreeError: it is not.
    """
    for module in ("altair", "vl_convert"):
        if importlib.util.find_spec(module) is None:
            raise TaxfreeError(
                f"{what} needs {module}, which is not installed", f"pip install 'taxfree[{extra}]'"
            )
    if os.path.expanduser("~") == "~":  # of a container's user: Altair asks for it, and raises
        os.environ["HOME"] = tempfile.gettempdir()


def require_picture(path: Path, option: str = "--plot") -> None:
    """Check, before anything is measured, that there can be a picture.

    Args:
        option: that names it.

    Raises:
        TaxfreeError: what draws is not installed, or the file cannot be written.
        UsageError: there are no such pictures.
    """
    require_drawing(option, "plot")
    from taxfree_tune.reporting.pictures import KINDS

    if path.suffix not in KINDS:
        raise UsageError(f"{option} {path}: no such kind of picture", f"one of: {', '.join(KINDS)}")
    require_writable(path)
