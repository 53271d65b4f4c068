"""The part of a long list that one run takes; the date decides which.

`make test` takes a part of each, `make test-all` takes all. A test that wants a part has the
fixture `sample`, and thereby the mark `sampled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TypeVar
from zlib import crc32

ALL = "all"
PARTS = 14  # in the fourteen days from a Monday on, each entry is in one part

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Sample:
    """What one test takes of its lists.

    Args:
        first: index of the first entry taken, below `PARTS`; None takes every entry.
    """

    first: int | None

    @classmethod
    def of_test(cls, sample: str, test: str) -> Sample:
        """The sample of a test.

        Tests begin at different places, so that days have equal work. From week to week a day of
        the week moves on to the next part: who tests on Mondays only meets everything, too.

        Args:
            sample: a date as in 2026-11-23, or "all".
            test: its node id.

        Raises:
            ValueError: `sample` is neither.
        """
        if sample == ALL:
            return cls(None)
        try:
            day = date.fromisoformat(sample)
        except ValueError:
            raise ValueError(f"{sample!r} is neither a date as in 2026-11-23 nor {ALL!r}") from None
        week, weekday = divmod(day.toordinal() - 1, 7)
        return cls((2 * weekday + week + crc32(test.encode())) % PARTS)

    @property
    def is_all(self) -> bool:
        return self.first is None

    def of(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """This run's part of a list, or all of it."""
        return entries if self.first is None else entries[self.first :: PARTS]

    def one_of(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """One entry of a short list, or all of it."""
        assert len(entries) <= PARTS
        return entries if self.first is None else [entries[self.first % len(entries)]]
