"""Problems that ran without a record of their own, for `taxfree tune --shapes`."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from taxfree_kernels.variant import op_of


class MetProblems:
    """Counts problems, and writes them as a YAML list of shapes, the most frequent first.

    What the file held before is counted along, so that several runs add up.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._calls: Counter[Any] = Counter()

    def add(self, problem: Any) -> None:
        """Count one call."""
        self._calls[problem] += 1

    def write(self) -> None:
        """Add what was counted to the file; another run never sees half of it."""
        if not self._calls:
            return
        counts = Counter({_key(op_of(each), dataclasses.asdict(each)): calls
                          for each, calls in self._calls.items()})  # fmt: skip
        self._calls.clear()
        counts.update(_read(self._path))
        entries = [dict(key) | {"calls": calls} for key, calls in counts.most_common()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        temporary.write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
        temporary.replace(self._path)


def _key(op: str, fields: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return ("op", op), *((name, value) for name, value in fields.items())


def _read(path: Path) -> dict[tuple[tuple[str, Any], ...], int]:
    """What a file of this kind holds; nothing if there is none, or if it is something else."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        found = {}
        for entry in entries:
            calls = entry.pop("calls")
            found[_key(entry.pop("op"), entry)] = int(calls)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return {}
    return found
