"""Two ranks that play more: protocols go through, and what cannot be played says so."""

from __future__ import annotations

import pytest

from benchmarks import emulate
from taxfree.errors import UsageError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_names, operation_shapes, problem_class

OP = "matmul_all_reduce"
#: their copies go to ranks that are not there; whom a signal is from stands in its channel
NOT_PLAYED = {"overlap", "two_shot"}


@pytest.mark.parametrize("op", operation_names())
def test_two_ranks_play_four(op):
    problem = operation_shapes(op).tiny(4)[0]
    ((asked, emulated),) = emulate.emulations(op, [problem], "host", [], repetitions=1)
    assert asked == problem
    timed = {each.candidate.variant for each in emulated if each.timing is not None}
    left_out = {each.candidate.variant: each.reason for each in emulated if each.reason}
    assert timed
    assert timed | left_out.keys() == {each.candidate.variant for each in emulated}
    assert left_out.keys() <= NOT_PLAYED, left_out


@pytest.mark.parametrize("op", operation_names())
def test_one_rank_alone_waits_for_nobody(op):
    problem = operation_shapes(op).tiny(3)[-1]
    ((_, alone),) = emulate.emulations(op, [problem], "host", [], repetitions=1, here=1)
    assert {each.candidate.variant for each in alone if each.timing is None} <= {"overlap"}


def test_a_wait_for_who_is_not_there_is_a_reason_and_not_the_end():
    problem = operation_shapes("flash_decode").tiny(4)[0]
    attempts = ["two_shot", "fused"]
    ((_, emulated),) = emulate.emulations("flash_decode", [problem], "host", attempts, 1)
    fused, two_shot = emulated
    assert (fused.candidate.variant, fused.reason) == ("fused", "")
    assert two_shot.timing is None
    assert "waited" in two_shot.reason


def test_knobs_are_combined():
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
