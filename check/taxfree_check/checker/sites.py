"""Source lines of accesses."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import torch
import triton

import taxfree_kernels

_PACKAGE = Path(taxfree_kernels.__file__).parent
_NOT_KERNELS = tuple(
    f"{folder}/"
    for folder in (
        Path(triton.__file__).parent,
        Path(torch.__file__).parent,
        Path(__file__).parent,
        sysconfig.get_path("stdlib"),
    )
) + (str(_PACKAGE / "interpreter.py"),)
#: The files of the primitives, with all raw atomics.
SYNC_FILES = {str(_PACKAGE / "device" / name) for name in ("packets.py", "sync.py")}


def is_primitive(file: str) -> bool:
    """Whether a file has device functions whose calls count, not their lines: primitives."""
    return file in SYNC_FILES or file.startswith(_NOT_KERNELS)


@dataclass(frozen=True)
class Line:
    """A line of a source file."""

    file: str
    number: int
    function: str

    @property
    def where(self) -> str:
        path = Path(self.file)
        if path.is_relative_to(_PACKAGE):
            path = path.relative_to(_PACKAGE)
        return f"{path if not path.is_absolute() else path.name}:{self.number}"

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.number).strip()


@dataclass(frozen=True)
class Site:
    """The lines of an access: its own, then its callers', outwards."""

    lines: tuple[Line, ...]

    @property
    def in_kernel(self) -> Line:
        """The innermost line outside the synchronisation functions."""
        return next((line for line in self.lines if line.file not in SYNC_FILES), self.lines[-1])


_NOWHERE = Site((Line("<unknown>", 0, "?"),))


@cache
def _is_kernels(file: str) -> bool:
    return not file.startswith((*_NOT_KERNELS, "<"))


@cache
def _site(key: tuple[tuple[str, int, str], ...]) -> Site:
    return Site(tuple(Line(*line) for line in key)) if key else _NOWHERE


def current_site() -> Site:
    """The site of the code that is running, seen from inside the checker."""
    return site_of(sys._getframe(1))


def site_of_error(error: BaseException) -> Site | None:
    """The site at which an exception was raised; None outside of kernels."""
    key: list[tuple[str, int, str]] = []
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if _is_kernels(code.co_filename):
            key.insert(0, (code.co_filename, step.tb_lineno, code.co_name))
        step = step.tb_next
    return _site(tuple(key)) if key else None


def site_of(frame: FrameType | None) -> Site:
    """The site of a suspended frame."""
    key = []
    while frame is not None:
        code = frame.f_code
        if _is_kernels(code.co_filename):
            key.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return _site(tuple(key))
