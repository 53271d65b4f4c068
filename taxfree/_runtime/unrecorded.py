"""Problems that ran without a record of their own, to be tuned in the run or after it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from taxfree.errors import TaxfreeError, one_line
from taxfree.files import require_writable, write
from taxfree.fingerprints import interpolated_fields
from taxfree.problems import recorded_problem
from taxfree_kernels.variant import Problem, op_of, resized
from taxfree_tuning_db.files import read_text


class MetProblems:
    """Counts calls.

    One problem stands for all sizes between two powers of two, with the largest of them that was
    called. Its record serves them all, since a record serves sizes down to half its own. With one
    for each size, an engine with 2000 different row counts would get a list that no search
    finishes; an engine with few gets these as they are.

    Args:
        on_new: is told a problem when the first of those that it stands for is met.
    """

    def __init__(self, on_new: Callable[[Any], None] = lambda problem: None) -> None:
        self._counts: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}
        self._on_new = on_new

    def add(self, problem: Problem, *sizes: int, calls: int = 1) -> None:
        """Count calls.

        Args:
            problem: of any size.
            sizes: of the calls: rows, or sequences and keys, as in `interpolated_fields`.
            calls: how many; none where a problem is to be listed behind those that are called.
        """
        key = (problem, *map(_octave, sizes))
        if key not in self._counts:
            self._on_new(_sized(problem, sizes))
        before, largest = self._counts.get(key, (0, sizes))
        self._counts[key] = before + calls, tuple(map(max, largest, sizes))

    def _counted(self) -> list[tuple[Any, int]]:
        counted = self._counts.items()
        return [(_sized(problem, sizes), calls) for (problem, *_), (calls, sizes) in counted]

    def most_frequent_first(self) -> list[Any]:
        """The problems; of equally frequent ones the first that was met comes first."""
        calls = _merged(self._counted())
        return sorted(calls, key=lambda problem: -calls[problem])


class UnrecordedProblems(MetProblems):
    """Adds the calls to a YAML list of shapes, the most frequent first, for `taxfree tune --from`.

    Runs add up in one file, also processes that write at the same time. A file that holds something
    else is left alone. Where it cannot be written, one warning says so, and serving goes on.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._process = os.getpid()
        self._has_warned = False
        with self._warning():  # now, and not after a day of serving
            require_writable(path)
            _read(path)
        atexit.register(self.write)  # also for a runtime that nobody closed

    def write(self) -> None:
        """Add what was counted to the file; a fork of the process has nothing to add."""
        if not self._counts or self._process != os.getpid():
            return
        with self._warning():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path):
                _write(self._path, _merged([*_read(self._path), *self._counted()]))
            self._counts.clear()

    def close(self) -> None:
        """Write for the last time."""
        atexit.unregister(self.write)
        self.write()

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn errors of the file into a warning, once."""
        try:
            yield
        except (OSError, TaxfreeError) as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"TAXFREE_LOG collects no problems: {one_line(error)}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _octave(size: int) -> int:
    """The power of two that a size is rounded up to, as its exponent."""
    return (size - 1).bit_length()


def _sized(problem: Problem, sizes: Iterable[int]) -> Any:
    return resized(problem, **dict(zip(interpolated_fields(op_of(problem)), sizes, strict=True)))


def _merged(counted: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    """Problems and their calls, one problem for all sizes between two powers of two."""
    known: dict[Any, tuple[list[int], int]] = {}
    for problem, calls in counted:
        sizes = [getattr(problem, name) for name in interpolated_fields(op_of(problem))]
        family = _sized(problem, map(_octave, sizes))
        largest, before = known.get(family, (sizes, 0))
        known[family] = list(map(max, largest, sizes)), before + calls
    return {_sized(family, sizes): calls for family, (sizes, calls) in known.items()}


# -- the file --


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from reading a file that is about to be replaced; made if it is missing.

    The lock is on the file itself, so whoever waited for one that was replaced tries again.
    """
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                return


def _read(path: Path) -> list[tuple[Any, int]]:
    """The problems and calls of a file; none if it is empty, or missing.

    Raises:
        TaxfreeError: it holds something else.
    """
    try:
        entries = yaml.safe_load(read_text(path)) or []
        return [_parsed(**entry) for entry in entries]
    except FileNotFoundError:
        return []
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise TaxfreeError(
            f"{path} holds something else than problems of a run", "give another file"
        ) from error


def _parsed(op: str, calls: int, **fields: Any) -> tuple[Any, int]:
    problem = recorded_problem(op, fields)
    if problem is None or type(calls) is not int:
        raise ValueError(op)
    return problem, calls


def _write(path: Path, calls: dict[Any, int]) -> None:
    entries = [
        {"op": op_of(problem)} | dataclasses.asdict(problem) | {"calls": calls[problem]}
        for problem in sorted(calls, key=lambda problem: -calls[problem])
    ]
    write(path, yaml.safe_dump(entries, sort_keys=False))
