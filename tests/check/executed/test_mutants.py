"""Kernels with one changed instruction, executed, each variant in a process that compiles."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from taxfree_kernels.variant import operation_names
from tests.check.cross_compile.conftest import run_python
from tests.check.executed.mutated import HARMLESS, Outcome, Result, cases, lines_of, why_harmless
from tests.tritons import needs_3_8

pytestmark = needs_3_8
CACHE_CONTROL = ("buffer_wbl2", "buffer_wbl2 sc0", "buffer_inv", "buffer_inv sc0")


def outcomes(*arguments):
    out = run_python("-m", "tests.check.executed.changed", *arguments)
    return Result.of_json(json.loads(out)).outcomes


def test_a_kernel_without_its_write_back_or_invalidation_is_not_right():
    tried = outcomes("all_gather_matmul", "push", "gfx942", "9", *CACHE_CONTROL)
    assert {one.kind for one in tried} == set(CACHE_CONTROL)
    assert {one.verdict for one in tried} <= {"wrong", "hang"}


def test_harmless_lines_are_in_the_sources():
    assert [each for each in HARMLESS if each.line not in lines_of(each.module)] == []


def test_a_kept_result_is_not_judged_by_the_lines_of_later_sources():
    lines = tuple(f"sync.py:{number}" for number in range(500))
    assert why_harmless("s_barrier", lines)
    kept = Result("op", "variant", "gfx942", 1, 1, 1, (
        Outcome("kernel", "s_barrier", "s_barrier", lines, "survives", ""),
    ))  # fmt: skip
    assert Result.of_json(kept.as_json()) == kept


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("op", operation_names())
def test_most_mutants_that_are_not_equivalent_are_found(op, sample):
    kinds = (*CACHE_CONTROL, "s_barrier", "s_waitcnt vmcnt") if sample.is_part else ()
    for case in sample.of([each for each in cases() if each[0] == op], fortnights=2):
        count = Counter(one.verdict for one in outcomes(*case, "1", *kinds))
        matter = count.total() - count["equivalent"]
        assert count["survives"] <= max(2, 0.25 * matter), (case, count)
