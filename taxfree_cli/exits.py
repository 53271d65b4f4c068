"""Exit codes, and how an error becomes one line, one hint and one of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from typer.exceptions import TyperException


class ExitCode(IntEnum):
    """What the exit status of a command says."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_HARDWARE = 3
    WRONG_RESULT = 4
    PEER_LOST = 5
    INTERRUPTED = 130


@dataclass(frozen=True)
class Failure:
    """What a user is told about an error.

    Args:
        message: one line.
        hint: one line, or empty.
        exit_code: the status of the process.
    """

    message: str
    hint: str
    exit_code: int


def failure(error: BaseException) -> Failure:
    """Describe an error.

    The rooms below each have their own errors and share no base class: what counts is that an error
    was made for a user, so that it has a `message`; `hint` and `exit_code` are its to add.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "triton"):
        return Failure(
            f"{error.name} is not installed",
            "pip install 'taxfree[cuda]' or 'taxfree[cpu]'; for AMD, a ROCm build of torch",
            ExitCode.FAILED,
        )
    if isinstance(error, TyperException):
        return Failure(_one_line(error.format_message()), _usage_hint(error), error.exit_code)
    message = getattr(error, "message", None)
    if not isinstance(message, str):
        return Failure(
            _one_line(f"{type(error).__name__}: {error}"),
            "this should not happen; TAXFREE_DEBUG=1 shows where it did",
            ExitCode.FAILED,
        )
    hint = getattr(error, "hint", "")
    return Failure(_one_line(message), _one_line(hint), getattr(error, "exit_code", 1))


def _usage_hint(error: TyperException) -> str:
    """Where to look up what was mistyped; most of typer's errors know the command."""
    context = getattr(error, "ctx", None)
    return f"see `{context.command_path if context else 'taxfree'} --help`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")
