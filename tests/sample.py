"""The part of a long list that one run takes; the date decides which.

`make test` takes a part of each, `make test-all` takes all. A test that wants a part has
the fixture `sample`, and thereby the mark `sampled`. Of a test with the mark `dealt`, which names
parameters, a run takes one combination of their values; tests of one file take the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TypeVar
from zlib import crc32

ALL = "all"
REST = "rest:"
PARTS = 14  # in the fourteen days from a Monday on, each entry is in one part

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Sample:
    """What one test takes of its lists.

    Args:
        first: index of the first entry of the part, below `PARTS`; None for every entry.
        fortnight: of the date.
        is_rest: take what the part leaves.
    """

    first: int | None
    fortnight: int = 0
    is_rest: bool = False

    @classmethod
    def of_test(cls, sample: str, test: str) -> Sample:
        """The sample of a test.

        Tests begin at different places, so that days have equal work. From week to week a day of
        the week moves on to the next part: who tests on Mondays only meets everything, too.

        Args:
            sample: a date as in 2026-11-23; "rest:" and a date; or "all".
            test: its node id.

        Raises:
            ValueError: `sample` is none of these.
        """
        if sample == ALL:
            return cls(None)
        try:
            day = date.fromisoformat(sample.removeprefix(REST))
        except ValueError:
            expected = f"a date as in 2026-11-23, {REST}2026-11-23, or {ALL}"
            raise ValueError(f"{sample!r} is not {expected}") from None
        week, weekday = divmod(day.toordinal() - 1, 7)
        first = (2 * weekday + week + crc32(test.encode())) % PARTS
        return cls(first, week // 2, sample.startswith(REST))

    @property
    def is_part(self) -> bool:
        """Whether this is the small part that each run of `make test` takes."""
        return self.first is not None and not self.is_rest

    def of(self, entries: Sequence[Entry], fortnights: int = 1) -> Sequence[Entry]:
        """This run's part of a list, all of which the runs of so many fortnights take."""
        return self._taken(entries, PARTS * fortnights, PARTS * self.fortnight)

    def one_of(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """One entry of a short list, or the others, or all of it."""
        assert len(entries) <= PARTS
        return self._taken(entries, len(entries))

    def _taken(self, entries: Sequence[Entry], parts: int, skipped: int = 0) -> Sequence[Entry]:
        if self.first is None:
            return entries
        mine = (self.first + skipped) % parts
        return [each for at, each in enumerate(entries) if (at % parts == mine) != self.is_rest]


Turn = tuple[str, tuple[str, ...]]


def turns_of(sample: str, turns: Iterable[Turn]) -> set[Turn]:
    """Which turns of tests that are dealt a run takes; in one file they go together.

    Args:
        sample: see `Sample.of_test`.
        turns: node ids without parameters, and the values of the dealt parameters.
    """
    of_tests: dict[str, set[Turn]] = {}
    for turn in turns:
        of_tests.setdefault(turn[0], set()).add(turn)
    taken: set[Turn] = set()
    for test, own in of_tests.items():
        taken.update(Sample.of_test(sample, test.partition("::")[0]).one_of(sorted(own)))
    return taken


def split(entries: Sequence[Entry], part: str) -> tuple[list[Entry], list[Entry]]:
    """The entries of a part, which processes run beside those of the others, and the rest.

    Args:
        part: as in 2/3: from the second on every third.

    Raises:
        ValueError: it is none.
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ValueError(f"{part!r} is no part, as 2/3 is")
    taken: tuple[list[Entry], list[Entry]] = [], []
    for at, entry in enumerate(entries, 1 - int(number)):
        taken[at % int(parts) != 0].append(entry)
    return taken
