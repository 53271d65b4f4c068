"""The errors of taxfree, each with its exit code on the command line.

    TaxfreeError              1  failed
    ├── UsageError            2  the request is invalid
    ├── HardwareError         3  the requested fabric or hardware is not available
    ├── WrongResult           4  a result differs from the reference
    ├── WorkerLost            5  a rank died or hung
    ├── NoRecord              1  TAXFREE_STRICT, and the problem has no record of its own
    ├── BelowTarget           1  slower than was asked for
    └── Interrupted         130  Ctrl-C, or what a scheduler sends

The kernels and the tuning database know nothing of this module. Their errors have the same shape,
a `message`, a `hint` and perhaps an `exit_code`, and pass through unchanged.
"""

from __future__ import annotations

from typing import ClassVar


class TaxfreeError(Exception):
    """Base of the library's errors.

    Args:
        message: one line, what happened, without a trailing full stop.
        hint: one line, what the user can do next; may be empty.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TaxfreeError):
    """An argument, a shape or an environment variable is invalid."""

    exit_code = 2


class HardwareError(TaxfreeError):
    """The requested fabric or hardware is not available."""

    exit_code = 3


class WrongResult(TaxfreeError):
    """A result differs from the reference by more than the library's own does."""

    exit_code = 4


class WorkerLost(TaxfreeError):
    """A rank died, or did not answer in time.

    Args:
        is_late: it did not answer.
    """

    exit_code = 5

    def __init__(self, message: str, hint: str = "", is_late: bool = False) -> None:
        super().__init__(message, hint)
        self.is_late = is_late


class NoRecord(TaxfreeError):
    """A problem has no record of its own, and `TAXFREE_STRICT` allows nothing else."""


class BelowTarget(TaxfreeError):
    """A measured speed-up is below the required one."""


class Interrupted(TaxfreeError):
    """Ctrl-C, or what a scheduler sends."""

    exit_code = 130


def one_line(error: BaseException) -> str:
    """An error as one line, without its type if its message was written for users."""
    text = " ".join(str(error).split())[:300]
    if hasattr(error, "hint"):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")
