"""Exit codes, and the message, hint and exit code of an error."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from typer.exceptions import TyperException

from taxfree.errors import (
    HardwareError,
    Interrupted,
    TaxfreeError,
    UsageError,
    WorkerLost,
    WrongResult,
)


class ExitCode(IntEnum):
    """The exit status of a command."""

    DONE = 0
    FAILED = TaxfreeError.exit_code
    USAGE = UsageError.exit_code
    NO_HARDWARE = HardwareError.exit_code
    WRONG_RESULT = WrongResult.exit_code
    PEER_LOST = WorkerLost.exit_code
    INTERRUPTED = Interrupted.exit_code


@dataclass(frozen=True)
class CommandFailure:
    """The report of an error to the user.

    Args:
        message: one line.
        hint: one line, or empty.
        exit_code: the status of the process.
    """

    message: str
    hint: str
    exit_code: int


MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed: the database, a file, no record, slower than `--min-speedup`",
    ExitCode.USAGE: "invalid arguments, or an invalid environment variable, which `doctor` lists",
    ExitCode.NO_HARDWARE: "the fabric or the hardware is missing, or does not work",
    ExitCode.WRONG_RESULT: "a kernel gives wrong results, or breaks its protocol",
    ExitCode.PEER_LOST: "a rank died or hung",
    ExitCode.INTERRUPTED: "interrupted",
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def failure(error: BaseException) -> CommandFailure:
    """Describe an error.

    The packages below each have their own errors, without a common base class: an error that is
    written for users has a `message`, and optionally a `hint` and an `exit_code`.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "triton"):
        return CommandFailure(
            f"{error.name} is not installed",
            "pip install 'taxfree[cuda]' or 'taxfree[cpu]'; for AMD, a ROCm build of torch",
            ExitCode.FAILED,
        )
    if isinstance(error, TyperException):
        return CommandFailure(
            _one_line(error.format_message()), _usage_hint(error), error.exit_code
        )
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        room = "free some space, or choose another path"
        hint = room if error.errno in _NO_ROOM else "check the path and its permissions"
        return CommandFailure(_one_line(where + error.strerror), hint, ExitCode.FAILED)
    message = getattr(error, "message", None)
    if not isinstance(message, str):
        return CommandFailure(
            _one_line(f"{type(error).__name__}: {error}"),
            "an internal error; TAXFREE_DEBUG=1 shows where",
            ExitCode.FAILED,
        )
    hint = getattr(error, "hint", "")
    return CommandFailure(_one_line(message), _one_line(hint), getattr(error, "exit_code", 1))


def _usage_hint(error: TyperException) -> str:
    """The help to read; most of typer's errors know the command."""
    context = getattr(error, "ctx", None)
    return f"see `{context.command_path if context else 'taxfree'} --help`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
