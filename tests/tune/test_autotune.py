"""Tuning on a runtime's own ranks: what is met is tuned, and serves from then on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import subprocess
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import taxfree
from taxfree.errors import UsageError
from tests.ranks import PYTHON, Ranks, copy_of_kernels, environment, on_every_fabric
from tests.taxfree.runtime_tasks import problem_of, tensors_of
from tests.tune import candidates

HEAP_BYTES = 16 << 20
SECONDS = 120.0


def run(ranks: Ranks, scenario: str, world_size: int = 2, **arguments: Any) -> list[Any]:
    return ranks.run(world_size, f"{__name__}:on_rank", scenario=scenario, **arguments)


def on_rank(fabric: Any, scenario: str, **arguments: Any) -> Any:
    with without_records(), few_trials():
        return globals()[scenario](fabric, **arguments)


# -- what runs on the ranks --------------------------------------------------------------------


@contextlib.contextmanager
def without_records() -> Iterator[None]:
    """Nothing is shipped, and of what is tuned one of ours wins and runs."""
    from taxfree_tune.tuning import winner

    def ours(baseline: Any, ranked: Any, *_: Any) -> Any:
        return ranked[0]

    with (
        mock.patch("taxfree._runtime.startup.shipped_records", return_value=()),
        mock.patch.object(winner, "_winner", ours),
        mock.patch("taxfree._runtime.dispatch._WORTH_A_PLAN", 0.0),
    ):
        yield


@contextlib.contextmanager
def few_trials() -> Iterator[None]:
    from taxfree_tune.tuning import in_ranks

    with mock.patch.object(in_ranks, "TRIALS", 2):
        yield


def init(db: str, **arguments: Any) -> Any:
    import taxfree

    return taxfree.init(**{"db": db, "heap_bytes": HEAP_BYTES, "timeout_s": 30} | arguments)


def is_right(rt: Any, problem: Any, seed: int = 1) -> bool:
    (a, weight, bias), expected = tensors_of(rt._fabric, problem, seed)
    y = rt.all_gather_matmul(a, weight, bias, gather_dim=problem.gather_dim, m=problem.m)
    return torch.equal(y, expected)


def met_and_tuned(fabric: Any, db: str) -> Any:
    rare, often, prepared = problem_of(m=3), problem_of(m=8), problem_of(m=20)
    every = (rare, often, prepared)
    with init(db) as rt:
        with taxfree.autotune(SECONDS) as tuned:
            right = [is_right(rt, each) for each in (rare, often, often)]
            rt.prepare([prepared])
            before = [rt.choice(each).kind for each in every]
            assert tuned == []
            plans = [weakref.ref(rt._plans.find(each).plan) for each in every]
        replaced = [
            plan() is not None and rt._plans.find(each).plan is not plan()
            for plan, each in zip(plans, every, strict=True)
        ]  # and kept, for graphs that hold their addresses
        in_order = [each.problem for each in tuned] == [often, rare, prepared]
        choices = [rt.choice(each) for each in every]
        right += [is_right(rt, each, seed) for each in every for seed in (2, 3)] + replaced
        calls = rt.stats()
        rt.check()
    with init(db) as again:
        later = [again.choice(each) for each in every]
    return right, before, in_order, choices, later, calls


def tuned_already(fabric: Any, db: str) -> Any:
    """What has a record, and what is near one, beside what has none."""
    known, near, new = problem_of(m=8), problem_of(m=7), problem_of(m=8, n=48)
    with init(db) as rt, taxfree.autotune(SECONDS):
        is_right(rt, known)
    with init(db) as rt, taxfree.autotune(SECONDS) as tuned:
        right = [is_right(rt, each) for each in (known, near, new)]
    return all(right), [each.problem for each in tuned] == [new]


def a_block_raises(fabric: Any, db: str, on: list[int]) -> Any:
    begun, problem, raised = time.monotonic(), problem_of(), None
    with init(db) as rt, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with taxfree.autotune(SECONDS) as tuned:
                right = is_right(rt, problem)
                if fabric.rank in on:
                    raise KeyError("of the caller")
        except KeyError as error:
            raised = str(error)
        right = right and is_right(rt, problem) and rt.choice(problem).kind == "baseline"
    said = [str(each.message) for each in caught if "tunes nothing" in str(each.message)]
    return raised, right, tuned, time.monotonic() - begun, said


def by_environment(fabric: Any, db: str, budget: str) -> Any:
    called, near, prepared = problem_of(m=8), problem_of(m=4), problem_of(m=3)
    with mock.patch.dict(os.environ, TAXFREE_AUTOTUNE=budget):
        rt = init(db)
    with rt:
        right = is_right(rt, called)
        rt.prepare([prepared.for_rows(3, 8)])
        right = right and is_right(rt, prepared)
        kinds = [rt.choice(each).kind for each in (called, near, prepared)]
        is_over = rt._autotuning is None
    return right, kinds, is_over


def of_two_groups(fabric: Any, db: str) -> Any:
    """Each rank alone, at the same time, into one database; and both together."""
    alone = [dist.new_group([rank]) for rank in range(fabric.world_size)][fabric.rank]
    mine, ours = problem_of("attention", world_size=1, causal=False), problem_of()
    q, k, v, *_ = tensors_of(fabric, mine)[0]
    with init(db, group=alone) as one, init(db) as both:
        with taxfree.autotune(SECONDS) as tuned:
            before = one.attention(q, k, v)
            is_right(both, ours)
        right = is_right(both, ours) and torch.allclose(one.attention(q, k, v), before, atol=1e-2)
        kinds = one.choice(mine).kind, both.choice(ours).kind
    return right, kinds, [each.record for each in tuned]


def opened_and_closed_within(fabric: Any, db: str) -> Any:
    with taxfree.autotune(SECONDS) as tuned:
        with init(db) as closed:
            is_right(closed, problem_of(m=9))
        rt = init(db)
        is_right(rt, problem_of())
    kind = rt.choice(problem_of()).kind
    rt.close()
    return [each.problem.m for each in tuned], kind


def trained(fabric: Any, db: str) -> Any:
    x = torch.ones(4, 8, dtype=torch.float16, device=fabric.device, requires_grad=True)
    weight = torch.ones(8, 16, dtype=torch.float16, device=fabric.device)
    with init(db) as rt:
        with taxfree.autotune(SECONDS) as tuned:
            rt.all_gather_matmul(x, weight).sum().backward()
        before, x.grad = x.grad, None
        rt.all_gather_matmul(x, weight).sum().backward()
    ops = sorted(each.record.op for each in tuned if each.record is not None)
    return ops, torch.equal(x.grad, before)


def without_a_database(fabric: Any, db: str) -> Any:
    problem = problem_of()
    with init(db) as rt:
        Path(db).mkdir(exist_ok=True)
        with taxfree.autotune(SECONDS) as tuned:
            is_right(rt, problem)
        right = is_right(rt, problem, 2)
    return right, [(each.record, each.reason) for each in tuned]


def within_a_budget(fabric: Any, db: str, seconds: float, each_s: float) -> Any:
    """Twenty problems, each of which takes so long."""
    from taxfree_tune.tuning import in_ranks, session

    def tune_one(tuner: Any, problem: Any, budget: Any) -> Any:
        time.sleep(each_s)
        return session.NotTuned(problem, "not tried", f"{budget.seconds:.3f}")

    problems = [problem_of(n=16 * n) for n in range(1, 21)]
    with init(db) as rt, mock.patch.object(in_ranks, "tune_one", tune_one):
        with taxfree.autotune(seconds) as tuned:
            for problem in problems:
                is_right(rt, problem)
            begun = time.monotonic()
        took = time.monotonic() - begun
    assert [each.problem for each in tuned] == problems
    return took, [each.reason for each in tuned]


def with_bad_candidates(fabric: Any, db: str, names: list[str]) -> Any:
    """How each has ended, whether the process goes on, and how long it took."""
    from taxfree.fingerprints import hardware_fingerprint
    from taxfree_tune.tuning import in_ranks
    from taxfree_tuning_db import Database, record_key

    problem, begun = problem_of(), time.monotonic()
    tuner = functools.partial(in_ranks.Tuner, only=names)
    with init(db, timeout_s=1.5) as rt:
        with (
            mock.patch.multiple(in_ranks, TRIALS=10, Tuner=tuner, _MOST_S=SECONDS),
            taxfree.autotune(SECONDS) as tuned,
        ):
            right = is_right(rt, problem)
        right = right and is_right(rt, problem, 2)
        rt.check()
        kind, seconds = rt.choice(problem).kind, time.monotonic() - begun
        with Database(db, read_only=True) as database:
            place = record_key(
                "all_gather_matmul",
                dataclasses.asdict(problem),
                hardware_fingerprint(fabric.hardware),
            )
            trials = database.trials(place)
    ends = [(each.variant, each.config.get("PHASE"), each.state, each.reason) for each in trials]
    return right, kind, ends, seconds, tuned[0].reason


def in_a_graph(fabric: Any, db: str) -> Any:
    """A graph of one of our variants, captured while other problems are met, and then replayed."""
    problem, other = problem_of(), problem_of(m=20)
    with init(db) as rt:
        with taxfree.autotune(SECONDS) as before:
            is_right(rt, problem)
        assert [each.reason for each in before if each.record is None] == []
        (a, weight, _), _ = tensors_of(rt._fabric, problem)
        with taxfree.autotune(SECONDS) as tuned:
            is_right(rt, other)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = rt.all_gather_matmul(a, weight, gather_dim=1)
                unprepared = rt.all_gather_matmul(a[:2], weight, gather_dim=1)
        right = []
        for seed in range(3):
            (new_a, new_weight, _), expected = tensors_of(rt._fabric, problem, seed)
            a.copy_(new_a)
            weight.copy_(new_weight)
            graph.replay()
            right += [torch.equal(out, expected), torch.equal(unprepared, expected[:2])]
            right += [is_right(rt, problem, seed), is_right(rt, other, seed)]
        rt.check()
    return all(right), [each.problem.m for each in tuned]


# -- tests -------------------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "tuning.sqlite")


class TestBlock:
    @on_every_fabric
    def test_what_is_met_is_tuned_and_serves_from_then_on(self, ranks: Ranks, db: str) -> None:
        """The most frequent first, and what was only prepared last."""
        told = run(ranks, "met_and_tuned", db=db)
        for right, before, in_order, choices, later, calls in told:
            assert right == [True] * 12
            assert before == ["baseline"] * 3
            assert in_order
            assert {each.kind for each in choices} == {"exact"}
            assert "baseline" not in {each.variant for each in choices}
            assert choices == later == told[0][3]
            assert sum(n for kinds in calls.values() for n in kinds.values()) == 9

    def test_what_has_a_record_is_not_tuned_again(self, ranks: Ranks, db: str) -> None:
        assert run(ranks, "tuned_already", db=db) == [(True, True)] * 2

    @pytest.mark.parametrize("on", [[0, 1], [0], [1]], ids=str)
    def test_after_an_error_nothing_is_tuned_and_nobody_waits(
        self, ranks: Ranks, db: str, on: list[int]
    ) -> None:
        told = run(ranks, "a_block_raises", db=db, on=on)
        for rank, (raised, right, tuned, seconds, said) in enumerate(told):
            assert raised == ("'of the caller'" if rank in on else None)
            assert (right, tuned) == (True, [])
            assert seconds < SECONDS / 2
            expected = f"taxfree tunes nothing: ranks {on} left the block by an error"
            assert said == ([] if rank in on else [expected])

    def test_groups_tune_one_after_another_and_each_problem_once(
        self, ranks: Ranks, db: str
    ) -> None:
        told = run(ranks, "of_two_groups", db=db)
        assert [(right, kinds) for right, kinds, _ in told] == [(True, ("exact", "exact"))] * 2
        assert told[0][2] == told[1][2]
        assert len(told[0][2]) == 2

    def test_runtimes_may_be_opened_and_closed_within(self, ranks: Ranks, db: str) -> None:
        assert run(ranks, "opened_and_closed_within", db=db) == [([5], "exact")] * 2

    def test_backwards_count(self, ranks: Ranks, db: str) -> None:
        expected = ["all_gather_matmul", "matmul_reduce_scatter"]
        assert run(ranks, "trained", db=db) == [(expected, True)] * 2

    def test_where_nothing_can_be_stored_nothing_is_tuned(self, ranks: Ranks, db: str) -> None:
        for right, tuned in run(ranks, "without_a_database", db=db):
            assert right
            ((record, reason),) = tuned
            assert record is None
            assert db in reason

    @pytest.mark.gpu
    def test_captured_graphs_stay_as_they_are(self, started: dict[str, Ranks], db: str) -> None:
        ranks = started["cuda"]
        for right, tuned in run(ranks, "in_a_graph", ranks.few, db=db):
            assert right
            assert sorted(tuned) == [2, 20]

    @pytest.mark.parametrize("budget", ["60", "soon", 0, -1.0, math.inf, math.nan, None, True])
    def test_what_is_no_time_is_refused(self, budget: Any) -> None:
        with pytest.raises(UsageError, match="budget"):
            taxfree.autotune(budget)

    def test_a_block_in_another_is_refused(self) -> None:
        inner = taxfree.autotune("2m")
        with taxfree.autotune(1.5), pytest.raises(UsageError, match="within another"), inner:
            raise AssertionError


class TestBudget:
    def test_it_ends_the_tuning_and_is_shared(self, ranks: Ranks, db: str) -> None:
        for took, reasons in run(ranks, "within_a_budget", db=db, seconds=2.0, each_s=0.3):
            tried = [float(each.rpartition(" ")[2]) for each in reasons if "budget" not in each]
            assert 2 <= len(tried) <= 6
            assert reasons[len(tried) :] == ["out of budget"] * (20 - len(tried))
            assert took < 4.0
            assert tried[0] == pytest.approx(2.0 / 20, rel=0.2)

    def test_of_one_problem_it_is_a_part(self, ranks: Ranks, db: str) -> None:
        for _, reasons in run(ranks, "within_a_budget", db=db, seconds=600.0, each_s=0.0):
            assert {each.rpartition(" ")[2] for each in reasons} == {"3.000"}


class TestEnvironment:
    def test_what_is_planned_is_tuned_before(self, ranks: Ranks, db: str) -> None:
        told = run(ranks, "by_environment", db=db, budget="10m")
        assert told == [(True, ["exact", "neighbour", "exact"], False)] * 2

    def test_when_its_time_is_over_the_rest_is_planned_as_always(
        self, ranks: Ranks, db: str
    ) -> None:
        right, kinds, is_over = run(ranks, "by_environment", db=db, budget="0.001s")[0]
        assert (right, is_over) == (True, True)
        assert kinds == ["baseline"] * 3


def test_bad_candidates_cost_their_trials_and_not_the_process(db: str, tmp_path: Path) -> None:
    """One is wrong, one cannot be planned, two fail on a rank that others wait for, one hangs."""
    expected = {
        ("works", None): ("measured", ""),
        ("is_wrong", None): ("wrong", "values wrong on rank 1"),
        ("illegal_reason", None): ("failed", "the moon is wrong"),
        ("raises_alone", "check"): ("failed", "OSError: no"),
        ("raises_alone", "time"): ("failed", "OSError: no"),
        ("hangs", None): ("hung", "waited 1.5 s for rank"),
    }
    names = sorted({name for name, _ in expected})
    bad = candidates.EVERY | candidates.RAISES_ALONE
    kernels = copy_of_kernels(tmp_path, **{name: bad[name] for name in names})
    code = (
        "import json\n"
        "from taxfree_tune.workers.group import WorkerGroup\n"
        "from tests.tune.test_autotune import on_rank\n"
        f"arguments = {{'scenario': 'with_bad_candidates', 'db': {db!r}, 'names': {names}}}\n"
        "with WorkerGroup(2, 'host', 4 << 20, 1.5) as group:\n"
        "    print(json.dumps(group.call(on_rank, 300.0, **arguments)))\n"
    )
    said = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", code],
        env=environment(kernels),
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    for right, kind, ends, seconds, reason in json.loads(said.stdout):
        assert (right, kind, reason) == (True, "exact", ""), ends
        found = {(name, phase): (state, reason) for name, phase, state, reason in ends}
        assert found.keys() == expected.keys()
        for each, (state, why) in expected.items():
            assert found[each][0] == state, found[each]
            assert why in found[each][1]
        assert seconds < 60.0


def test_a_runtime_loads_no_tuner() -> None:
    code = (
        "import sys, taxfree, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "with taxfree.init(heap_bytes=1 << 20, db='/nowhere') as rt:\n"
        "    taxfree.autotune('1s')\n"
        "    print({'optuna', 'taxfree_tune', 'taxfree_check'} & sys.modules.keys())\n"
        "dist.destroy_process_group()\n"
    )
    variables = environment(TRITON_INTERPRET="1", TAXFREE_AUTOTUNE="1s")
    said = subprocess.run([PYTHON, "-c", code], env=variables, capture_output=True, text=True)
    assert said.stdout == "set()\n", said.stderr
