"""Every mutant of the real synchronisation is reported, but for those that change nothing."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

import taxfree_kernels
from taxfree_kernels.device import sync
from tests.check.checker.document import PATH
from tests.check.checker.mutate import mutants
from tests.check.checker.mutated import GROUPS, HARMLESS, without_place

EVERY = [(name, without_place(each)) for name, group in GROUPS.items() for each in group.mutants()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", GROUPS)
def test_a_mutant_that_is_not_reported_changes_nothing(name, sample):
    group = GROUPS[name]
    # An entry is one mutant: others of the same text, at another place, have to be reported.
    harmless = Counter(each for at, each, _ in HARMLESS if at == name)
    tried = Counter(map(without_place, group.mutants()))
    may_survive = {each for each, count in harmless.items() if count == tried[each]}
    survivors = Counter(
        without_place(each)
        for each in sample.of(group.mutants())
        if without_place(each) not in may_survive and not is_reported(group, each)
    )
    assert survivors <= harmless


def is_reported(group, mutant):
    """A few seeds of all variants first: what one variant never shows, another does at once."""
    return any(group.find(mutant, seeds) is not None for seeds in (group.seeds[:2], group.seeds))


def test_a_harmless_mutant_is_still_a_mutant():
    """The list has no entry that the sources no longer have."""
    assert {each[:2] for each in HARMLESS} <= set(EVERY)


def test_19_of_20_mutants_are_reported():
    """All but the harmless ones are: the tests above."""
    assert len(EVERY) > 180
    assert len(HARMLESS) <= 0.05 * len(EVERY)


def test_the_page_lists_all_of_them():
    listed = [line for line in PATH.read_text().splitlines() if line.startswith("| all ")]
    reported = len(EVERY) - len(HARMLESS)
    assert listed == [f"| all |  | {len(EVERY)} | {reported} |  |"], "run `make docs`"


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_has_mutants(name):
    assert len(GROUPS[name].mutants()) >= 4


def test_whatever_can_be_mutated_in_a_kernel_of_a_variant_is():
    """All but what the rooms `device` and `fabric` hold for measurements, and for waits in vain."""
    listed = {_name(function) for group in GROUPS.values() for function in group.functions}
    left_out = [
        _name(function)
        for function in _functions_of_variants()
        if _name(function) not in listed and any(mutants([function]))
    ]
    advice = "add them to GROUPS in mutated.py, then run `python -m tests.check.checker.document`"
    assert left_out == [], advice


def _functions_of_variants() -> Iterator[Any]:
    package = "taxfree_kernels."
    for found in pkgutil.walk_packages(taxfree_kernels.__path__, package):
        if not found.name.removeprefix(package).startswith(("device", "fabric")):
            for member in vars(importlib.import_module(found.name)).values():
                is_kernel = isinstance(member, InterpretedFunction)
                if is_kernel and member.fn.__module__ == found.name:
                    yield member


def _name(function: Any) -> str:
    return f"{function.fn.__module__}.{function.fn.__name__}"


def test_the_original_is_back_after_a_mutant():
    mutant = next(mutants([sync.signal]))
    original = sync.signal.rewrite()
    with mutant.installed():
        assert sync.signal.rewrite() is not original
    assert sync.signal.rewrite() is original
