"""Running the drivers' command-line tools, and reading what they print."""

from __future__ import annotations

import re
import subprocess

_DEADLINE_S = 15.0  # rocm-smi takes seconds on eight GPUs
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def output(*command: str) -> str:
    """Output of a tool.

    Raises:
        RuntimeError: it failed; with the last line it printed.
        OSError, subprocess.TimeoutExpired: it is not there, or hangs.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, errors="replace"
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {said[-1]}")
    return _ESCAPES.sub("", done.stdout)


def number(text: object) -> float | None:
    """The first number in a cell such as `(132Mhz)`; None in `[N/A]`."""
    match = _NUMBER.search(str(text))
    return float(match[0]) if match else None


def whole(text: object, unit: int = 1) -> int | None:
    """The first number in a cell, times `unit`, as an integer."""
    value = number(text)
    return None if value is None else int(value * unit)


def link_matrix(text: str) -> tuple[tuple[str, ...], ...]:
    """The part between GPUs of a matrix as the tools print it, with a row `GPU0 ...` per GPU."""
    lines = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    rows = [cells[1:] for cells in lines if len(cells) > 1 and not cells[1].startswith("GPU")]
    return tuple(
        tuple("self" if a == b else row[b] for b in range(len(rows))) for a, row in enumerate(rows)
    )
