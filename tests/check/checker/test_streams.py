"""Copies on side streams: each edge that orders them is missed when it is taken away."""

from __future__ import annotations

import pytest

from taxfree_check.checker import Reason, SimulatedFabric, Simulation, check_variant
from taxfree_check.checker.streams import Stream
from taxfree_kernels import copies
from taxfree_kernels.matmul_reduce_scatter import overlap
from taxfree_kernels.variant import Ready, operation, problem_class, variants
from tests.check.checker.mutate import mutants

OP, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
SEEDS = range(6)


def reasons(op: str = OP) -> set:
    """Reasons of the schedules' violations; None for a schedule without one."""
    found = [check_variant(op, "overlap", seeds=[seed]).violation for seed in SEEDS]
    return {None if violation is None else violation.reason for violation in found}


def test_copies_that_do_not_wait_for_the_caller_s_stream_are_reported(monkeypatch):
    monkeypatch.setattr(Stream, "fork", lambda stream: None)
    assert reasons() <= {Reason.LIFETIME, Reason.NO_WAIT, Reason.STALE_SIGNAL}


def test_copies_that_do_not_wait_for_their_matmul_are_reported(monkeypatch):
    assert reasons(SCATTER) == {None}
    monkeypatch.setattr(copies.PeerCopies, "follow", lambda copies: None)
    assert reasons(SCATTER) == {Reason.NO_WAIT}


def test_copies_that_outlive_their_call_are_reported(monkeypatch):
    monkeypatch.setattr(Stream, "join", lambda stream: None)
    assert reasons() == {Reason.CRASH, Reason.DEADLOCK}


@pytest.mark.parametrize("change", [None, "one payload slot"])
def test_the_call_after_copies_uses_the_other_slot(change):
    """Copies all go to the first slot: if the next call did too, it would overtake slow readers."""
    if change is None:
        assert turns() == []
        return
    (mutant,) = [each for each in mutants([copies._finish]) if each.change == change]
    with mutant.installed():
        assert len(turns()) == len(SEEDS)


def turns() -> list:
    """Violations of calls that take turns between copies and senders."""
    problem = problem_class(OP)(m=6, n=16, k=16, gather_dim=0, world_size=2)
    inputs = [operation(OP).make_inputs(problem, rank, 1, "cpu", True) for rank in range(2)]

    def setup(fabric: SimulatedFabric) -> list:
        out = operation(OP).empty_output(problem, fabric.device)
        calls = []
        for name in ("overlap", "push", "overlap", "one_shot"):
            variant = variants(OP)[name]
            config = variant.seed_configs(problem, fabric.hardware)[0]
            plan = Ready(variant.plan(problem, fabric, config))
            calls.append(lambda plan=plan: plan(*inputs[fabric.rank], out))
        return calls

    simulation = Simulation(2, problem.slot_bytes)
    outcomes = [simulation.run(setup, seed) for seed in SEEDS]
    return [each.violation for each in outcomes if each.violation is not None]


@pytest.mark.parametrize(
    ("split", "world_size", "rows"),
    [(1, 2, [8, 8]), (2, 2, [12, 4]), (4, 2, [14, 2]), (2, 3, [8, 12, 4])],
)
def test_the_matmul_before_the_last_computes_own_rows(monkeypatch, split, world_size, rows):
    """On each rank, so also on the first, whose rows are beside the second's."""
    problem = problem_class(SCATTER)(m=8 * world_size, n=16, k=16, world_size=world_size)
    found = []

    def setup(fabric: SimulatedFabric) -> list:
        plan = Ready(overlap.OverlapPlan(problem, fabric, {"STREAMS": 1, "OWN_SPLIT": split}))
        inputs = operation(SCATTER).make_inputs(problem, fabric.rank, 1, "cpu", True)
        out = operation(SCATTER).empty_output(problem, fabric.device)
        return [lambda: plan(*inputs, out)]

    monkeypatch.setattr(overlap, "multiply_into", lambda out, x, *_, **kind: found.append(len(x)))
    Simulation(world_size, problem.slot_bytes).run(setup, 0)
    assert sorted(found) == sorted(rows * world_size)
