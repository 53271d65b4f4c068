"""Copies on side streams: each edge that orders them is missed when it is taken away."""

from __future__ import annotations

import pytest

from taxfree_check.checker import Reason, SimulatedFabric, Simulation, check_variant
from taxfree_check.checker.streams import Stream
from taxfree_kernels import copies
from taxfree_kernels.variant import Ready, operation, problem_class, variants
from tests.check.checker.mutate import mutants

OP = "all_gather_matmul"
SEEDS = range(6)


def reasons(op: str = OP) -> set:
    """Reasons of the schedules' violations; None for a schedule without one."""
    found = [check_variant(op, "overlap", seeds=[seed]).violation for seed in SEEDS]
    return {None if violation is None else violation.reason for violation in found}


def test_copies_that_do_not_wait_for_the_caller_s_stream_are_reported(monkeypatch):
    monkeypatch.setattr(Stream, "fork", lambda stream: None)
    assert reasons() <= {Reason.LIFETIME, Reason.NO_WAIT, Reason.STALE_SIGNAL}


def test_copies_that_do_not_wait_for_their_matmul_are_reported(monkeypatch):
    assert reasons("matmul_reduce_scatter") == {None}
    monkeypatch.setattr(copies.PeerCopies, "follow", lambda copies: None)
    assert reasons("matmul_reduce_scatter") == {Reason.NO_WAIT}


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
