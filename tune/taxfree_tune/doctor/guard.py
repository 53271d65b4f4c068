"""Nothing that fails may keep the rest from being reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from taxfree.errors import one_line

_T = TypeVar("_T")


class Guard:
    """Runs probes; one that raises leaves its reason in `problems`.

    Attributes:
        problems: what was looked at -> why it could not be found out, in one line.
    """

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}

    def __call__(self, what: str, probe: Callable[[], _T], default: _T) -> _T:
        """Return the probe's result, or `default` if it raises."""
        try:
            return probe()
        except Exception as error:
            self.problems[what] = one_line(error)
            return default
