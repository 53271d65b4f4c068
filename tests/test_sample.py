"""Samples repeat, and those of two weeks meet everything."""

from __future__ import annotations

from datetime import date, timedelta
from itertools import chain, product

import pytest

from tests.sample import PARTS, Sample, split, turns_of

MONDAY = date(2026, 11, 23)
ENTRIES = range(40)


def days(count: int, step: int = 1) -> list[str]:
    return [str(MONDAY + timedelta(days=step * day)) for day in range(count)]


def taken(days: list[str], fortnights: int = 1) -> list[int]:
    return sorted(chain(*(Sample.of_test(day, "test").of(ENTRIES, fortnights) for day in days)))


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("fortnights", [1, 2, 4])
def test_fortnights_of_days_and_as_many_mondays_meet_each_entry_once(
    step: int, fortnights: int
) -> None:
    assert taken(days(PARTS * fortnights, step), fortnights) == list(ENTRIES)


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("count", [1, 2, 5, PARTS])
def test_they_meet_each_entry_of_a_short_list_one_at_a_time(step: int, count: int) -> None:
    met = [Sample.of_test(day, "test").one_of(range(count)) for day in days(PARTS, step)]
    assert all(len(each) == 1 for each in met)
    assert set(chain(*met)) == set(range(count))
    assert list(Sample.of_test("all", "test").one_of(range(count))) == list(range(count))


@pytest.mark.parametrize("day", days(PARTS))
def test_the_rest_is_what_a_part_leaves(day: str) -> None:
    assert sorted(taken([day]) + taken([f"rest:{day}"])) == list(ENTRIES)
    part, rest = (Sample.of_test(each, "test") for each in (day, f"rest:{day}"))
    assert sorted([*part.one_of(range(5)), *rest.one_of(range(5))]) == list(range(5))
    assert part.is_part
    assert not rest.is_part


def test_tests_begin_at_different_places() -> None:
    firsts = {Sample.of_test(str(MONDAY), f"test {number}").first for number in range(150)}
    assert firsts == set(range(PARTS))


def test_all_is_everything() -> None:
    assert taken(["all"]) == list(ENTRIES)


def test_anything_else_is_refused() -> None:
    for given in ("yesterday", "rest:yesterday", "rest:all"):
        with pytest.raises(ValueError, match=f"'{given}' is not a date"):
            Sample.of_test(given, "test")


@pytest.mark.parametrize("day", days(PARTS))
def test_of_a_test_that_is_dealt_one_turn_is_taken_and_of_its_file_the_same(day: str) -> None:
    values = list(product("abc", "xy"))
    turns = [(test, each) for test in ("a.py::one", "a.py::two", "b.py::one") for each in values]
    taken, rest = turns_of(day, turns), turns_of(f"rest:{day}", turns)
    assert sorted(test for test, _ in taken) == ["a.py::one", "a.py::two", "b.py::one"]
    assert len({each for test, each in taken if test.startswith("a.py")}) == 1
    assert sorted([*taken, *rest]) == sorted(turns)
    assert turns_of("all", turns) == set(turns)


def test_parts_have_each_entry_once() -> None:
    taken = [split(ENTRIES, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(chain(*(part for part, _ in taken))) == list(ENTRIES)
    assert taken[1][0][:2] == [1, 4]
    for part, others in taken:
        assert sorted([*part, *others]) == list(ENTRIES)
    assert split(ENTRIES, "1/1") == (list(ENTRIES), [])


@pytest.mark.parametrize("part", ["0/3", "4/3", "2", "one", "1/0", "-1/3"])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match=f"'{part}' is no part"):
        split(ENTRIES, part)
