"""Two ranks emulate more: protocols work, and what cannot be emulated says so."""

from __future__ import annotations

import pytest

from benchmarks import emulate
from taxfree.errors import UsageError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_names, operation_shapes, problem_class
from tests.benchmarks import emulate_tasks

OP = "matmul_all_reduce"
NOT_EMULATED = {"overlap"}  # its copies go to ranks that do not exist


@pytest.mark.parametrize("op", operation_names())
def test_two_ranks_emulate_four(op):
    problem = operation_shapes(op).tiny(4)[0]
    ((asked, emulated),) = emulate.emulations(op, [problem], "host", [], repetitions=1)
    assert asked == problem
    timed = {each.candidate.variant for each in emulated if each.timing is not None}
    left_out = {each.candidate.variant: each.reason for each in emulated if each.reason}
    assert timed
    assert timed | left_out.keys() == {each.candidate.variant for each in emulated}
    assert left_out.keys() <= NOT_EMULATED, left_out


@pytest.mark.parametrize("op", operation_names())
def test_one_rank_alone_waits_for_nobody(op):
    problem = operation_shapes(op).tiny(3)[-1]
    ((_, alone),) = emulate.emulations(op, [problem], "host", [], repetitions=1, here=1)
    assert {each.candidate.variant for each in alone if each.timing is None} <= {"overlap"}


def test_a_wait_that_times_out_is_a_reason_and_not_the_end(monkeypatch):
    monkeypatch.setattr(emulate, "emulate_ranks", emulate_tasks)
    problem = operation_shapes(OP).tiny(4)[0]
    ((_, emulated),) = emulate.emulations(OP, [problem], "host", ["push"], 1)
    assert emulated[0].timing is None
    assert "waited" in emulated[0].reason


def test_meta_parameters_are_combined():
    problem = problem_class(OP)(m=1024, n=8192, k=3584, world_size=8)
    attempts = ["push_two_shot STAGGERED=True,False PIECES=2,4", "push"]
    found = emulate.candidates(OP, problem, KNOWN["h200"], attempts)
    tried = [(each.config["STAGGERED"], each.config["PIECES"]) for each in found[:4]]
    assert tried == [(True, 2), (True, 4), (False, 2), (False, 4)]
    assert [each.variant for each in found[4:]] == ["push"]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("pusch", "no variant 'pusch'"),
        ("push SIGNALS=3", "SIGNALS cannot be '3'"),
        ("push SIGNALS", "SIGNALS cannot be ''"),
        ("push FOO=3", "FOO cannot be '3'"),
    ],
)
def test_what_makes_no_sense_is_said(attempt, message):
    problem = problem_class(OP)(m=16, n=64, k=64, world_size=4)
    with pytest.raises(UsageError, match=message):
        emulate.candidates(OP, problem, KNOWN["cpu"], [attempt])
