"""Ranks that are there already: rank 0 leads, and what fails on one ends the task on all."""

from __future__ import annotations

from typing import Any

import pytest

from taxfree._runtime.collectives import vote
from taxfree_tune.workers.group import TaskFailed
from taxfree_tune.workers.local import LocalGroup, together
from tests.ranks import Ranks
from tests.taxfree.fault_tasks import fail


def run(ranks: Ranks, scenario: str) -> list[Any]:
    return ranks.run(2, f"{__name__}:on_rank", scenario=scenario)


def on_rank(fabric: Any, scenario: str) -> Any:
    return globals()[scenario](fabric)


# -- what runs on the ranks --------------------------------------------------------------------


def add(fabric: Any, number: int, to: int) -> int:
    return number + to + int(fabric.rank)


def fail_on(fabric: Any, rank: int, votes: int) -> None:
    """Vote, and raise on one rank after so many votes."""
    for vote_ in range(4):
        if (fabric.rank, vote_) == (rank, votes):
            raise OSError(f"no {rank}")
        vote(fabric.group, vote_)


def calls(fabric: Any) -> Any:
    def work(group: LocalGroup) -> Any:
        return group.call(add, 0.0, 1, to=2), group.group().call(add, 0.0, 10, to=20)

    return together(fabric, work)


def failures(fabric: Any) -> Any:
    def work(group: LocalGroup) -> Any:
        said = []
        for rank, votes in ((0, 0), (1, 0), (0, 2), (1, 3)):
            with pytest.raises(TaskFailed) as caught:
                group.call(fail_on, 0.0, rank, votes)
            said.append((caught.value.rank, caught.value.message))
        with pytest.raises(TaskFailed) as caught:
            group.call(fail, 0.0, message="on all")
        return [*said, (caught.value.rank, caught.value.message)], group.call(add, 0.0, 1, to=2)

    return together(fabric, work)


def the_leader_fails(fabric: Any) -> Any:
    def work(group: LocalGroup) -> Any:
        group.call(add, 0.0, 1, to=2)
        raise KeyError("of the leader")

    with pytest.raises(TaskFailed if fabric.rank else KeyError) as caught:
        together(fabric, work)
    return str(caught.value), together(fabric, lambda group: group.call(add, 0.0, 1, to=2))


# -- tests -------------------------------------------------------------------------------------


def test_all_ranks_run_what_rank_0_calls_and_have_its_result(ranks: Ranks) -> None:
    assert run(ranks, "calls") == [([3, 4], [30, 31])] * 2


def test_a_rank_that_fails_ends_the_task_on_all_and_the_next_one_runs(ranks: Ranks) -> None:
    expected = [(rank, f"OSError: no {rank}") for rank in (0, 1, 0, 1)]
    expected.append((0, "RuntimeError: on all"))
    assert run(ranks, "failures") == [(expected, [3, 4])] * 2


def test_an_error_of_rank_0_releases_the_others(ranks: Ranks) -> None:
    (own, later), (others, same) = run(ranks, "the_leader_fails")
    assert own == "'of the leader'"
    assert "of the leader" in others
    assert later == same == [3, 4]
