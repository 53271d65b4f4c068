"""The run-time dispatcher on real ranks: of the host fabric, and what depends on it on GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from taxfree.errors import UsageError
from tests.ranks import Ranks, on_every_fabric
from tests.taxfree.runtime_tasks import M, problem_of, record_of, runtime_of, tensors_of

WORLD = 2  # of ranks of the host; on GPUs those that are there


def run(ranks: Ranks, scenario: str, **arguments: Any) -> list[Any]:
    return ranks.run(ranks.few, f"{__name__}:on_rank", scenario=scenario, **arguments)


def on_rank(fabric: Any, scenario: str, **arguments: Any) -> Any:
    return globals()[scenario](fabric, **arguments)


# -- what runs on the ranks --------------------------------------------------------------------


def call_neighbour(fabric: Any) -> Any:
    near = problem_of(m=M + 1)
    rt = runtime_of(fabric, record_of(fabric, problem_of()))
    (a, weight, _), expected = tensors_of(fabric, near)
    y = rt.all_gather_matmul(a, weight, gather_dim=1)
    return torch.equal(y, expected), rt.choice(near).kind


def choose_differently(fabric: Any) -> Any:
    problem = problem_of()
    rt = runtime_of(fabric, *([record_of(fabric, problem)] if fabric.rank == 0 else []))
    (a, weight, _), expected = tensors_of(fabric, problem)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = rt.all_gather_matmul(a, weight, gather_dim=1)
    said = any("ranks choose differently" in str(each.message) for each in caught)
    return torch.equal(y, expected), rt.choice(problem).variant, said


def call_in_a_graph(fabric: Any) -> Any:
    problem = problem_of()
    rt = runtime_of(fabric, record_of(fabric, problem))
    (a, weight, _), _ = tensors_of(fabric, problem)
    rt.prepare([problem])
    rt.all_gather_matmul(a, weight, gather_dim=1)
    fabric.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [rt.all_gather_matmul(a, weight, gather_dim=1) for _ in range(3)]
    right = []
    for seed in range(5):
        (new_a, new_weight, _), expected = tensors_of(fabric, problem, seed)
        a.copy_(new_a)
        weight.copy_(new_weight)
        graph.replay()
        right += [torch.equal(out, expected) for out in outputs]
    rt.check()
    return right


def normalise_in_a_graph(fabric: Any) -> Any:
    """With an eps that an eager call had before, and one that is new."""
    problem = problem_of("matmul_all_reduce", residual=True, rms_norm=True)
    rt = runtime_of(fabric, record_of(fabric, problem))
    tensors, _ = tensors_of(fabric, problem)
    x, weight, _, residual, norm_weight, eps = tensors
    known = float(eps)
    new = known / 2  # no result depends on it
    rt.matmul_all_reduce_rms_norm(x, weight, norm_weight, None, residual, known)
    rt.prepare([problem])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [
            rt.matmul_all_reduce_rms_norm(x, weight, norm_weight, None, residual, each)
            for each in (known, new, known)
        ]
    right = []
    for seed in range(5):
        changed, expected = tensors_of(fabric, problem, seed)
        for tensor, other in zip(tensors, changed, strict=True):
            if tensor is not None:
                tensor.copy_(other)
        graph.replay()
        right += [torch.equal(torch.stack(both), expected) for both in outputs]
    rt.check()
    return right


def call_alike_but_for_one(fabric: Any) -> str:
    rt = runtime_of(fabric)
    problem = problem_of(m=M + (fabric.rank == 0))
    (a, weight, _), _ = tensors_of(fabric, problem)
    try:
        rt.all_gather_matmul(a, weight, gather_dim=1)
    except UsageError as error:
        return error.message
    return "no error"


def plan_off(fabric: Any) -> Any:
    from taxfree._runtime.dispatch import Dispatcher
    from taxfree._runtime.runtime import Runtime
    from taxfree_tuning_db import Table

    problem = problem_of()
    table = Table(user=[record_of(fabric, problem)])
    rt = Runtime(fabric, Dispatcher(table, fabric.hardware), plan_on_first_call=False)
    (a, weight, _), expected = tensors_of(fabric, problem)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = rt.all_gather_matmul(a, weight, gather_dim=1)
        y = rt.all_gather_matmul(a, weight, gather_dim=1)
    unprepared = rt.stats()
    rt.prepare([problem])
    rt.all_gather_matmul(a, weight, gather_dim=1)
    said = [str(each.message) for each in caught if "prepare()" in str(each.message)]
    return torch.equal(y, expected), len(said), unprepared, rt.choice(problem).variant


def faster_in_graphs_only(fabric: Any) -> Any:
    from unittest import mock

    problem = problem_of()
    record = record_of(fabric, problem)
    slow = dataclasses.replace(record.winner, median_us={"eager": 3.0})
    rt = runtime_of(fabric, dataclasses.replace(record, winner=slow))
    (a, weight, _), expected = tensors_of(fabric, problem)
    rt.prepare([problem])
    generations = [int(fabric.pool.control[0])]
    right = []
    for capturing in (False, True):
        with mock.patch.object(type(rt), "_follow", lambda _, is_so=capturing: is_so):
            right.append(torch.equal(rt.all_gather_matmul(a, weight, gather_dim=1), expected))
        rt.check()
        generations.append(int(fabric.pool.control[0]))
    moved = [after > before for before, after in itertools.pairwise(generations)]
    return right, moved, rt.memory().plans, rt.explain(problem)


def lose_one_of_two(fabric: Any) -> Any:
    """What would run in graphs cannot be planned, what would in eager calls can."""
    from taxfree_kernels.errors import PlanError
    from taxfree_kernels.variant import variants

    problem = problem_of()
    record, second = (record_of(fabric, problem, each) for each in ("push", "one_shot"))
    slow = dataclasses.replace(record.winner, median_us={"eager": 3.0})
    record = dataclasses.replace(record, winner=slow, runners_up=(second.winner,))
    rt = runtime_of(fabric, record)
    (a, weight, _), expected = tensors_of(fabric, problem)
    push = type(variants("all_gather_matmul")["push"])
    with (
        mock.patch.object(push, "plan", side_effect=PlanError("no room")),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        y = rt.all_gather_matmul(a, weight, gather_dim=1)
    return torch.equal(y, expected), rt.choice(problem).variant, len(caught)


def heap_too_small(fabric: Any) -> Any:
    problem = problem_of(m=40_000, k=64)
    rt = runtime_of(fabric, record_of(fabric, problem))
    with pytest.warns(RuntimeWarning, match="runs the library: push: .* does not fit"):
        rt.prepare([problem])
    choice = rt.choice(problem)
    return choice.variant, choice.why


def init_with_a_large_shipped_record(fabric: Any) -> Any:
    """What runs for a problem that needs more than the default heap."""
    import taxfree

    problem = problem_of(m=600, k=64_000)
    of_eight = dataclasses.replace(problem, m=60_000, world_size=8)
    records = [record_of(fabric, each) for each in (problem, of_eight)]
    with mock.patch("taxfree._runtime.startup.shipped_records", return_value=tuple(records)):
        rt = taxfree.init(db="/nowhere/tuning.sqlite", timeout_s=10)
    rt.prepare([problem])
    choice, memory = rt.choice(problem), rt.memory()
    rt.close()
    return choice.variant, memory.slot_bytes / problem.slot_bytes


def init_from(fabric: Any, db: str, disable_on: int | None) -> Any:
    import os

    import taxfree

    if fabric.rank == disable_on:
        os.environ["TAXFREE_DISABLE"] = "1"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rt = taxfree.init(db=db, timeout_s=10)
    finally:
        os.environ.pop("TAXFREE_DISABLE", None)
    problem = problem_of()
    (a, weight, _), expected = tensors_of(fabric, problem)
    right = torch.equal(rt.all_gather_matmul(a, weight, gather_dim=1), expected)
    choice, memory = rt.choice(problem), rt.memory()
    text = rt.explain(problem)
    for _ in range(2):
        rt.close()
        with pytest.raises(UsageError, match="the runtime is closed"):
            rt.all_gather_matmul(a, weight, gather_dim=1)
        with pytest.raises(UsageError, match="the runtime is closed"):
            rt.prepare([problem])
    said = [str(each.message) for each in caught if "differ from rank 0" in str(each.message)]
    return right, choice.kind, choice.variant, memory.plans, text, said


def on_a_group(fabric: Any) -> Any:
    import taxfree

    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    rt = taxfree.init(group=groups[fabric.rank], db="/nowhere/tuning.sqlite")
    a = torch.ones(4, 8, dtype=torch.float16)
    weight = torch.ones(3, 8, dtype=torch.float16).t()
    return rt.world_size, rt.all_gather_matmul(a, weight, gather_dim=0).tolist()


# -- tests -------------------------------------------------------------------------------------


class TestCalls:
    def test_a_similar_problem_borrows_a_config(self, ranks: Ranks) -> None:
        assert run(ranks, "call_neighbour") == [(True, "neighbour")] * WORLD

    @pytest.mark.gpu
    @pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
    @pytest.mark.parametrize("scenario", ["call_in_a_graph", "normalise_in_a_graph"])
    def test_a_captured_graph_sees_the_inputs_of_each_replay(
        self, ranks: Ranks, scenario: str
    ) -> None:
        assert all(all(right) for right in run(ranks, scenario))

    @on_every_fabric
    def test_a_rank_that_comes_with_another_shape_is_named_by_all(self, ranks: Ranks) -> None:
        first, *others = run(ranks, "call_alike_but_for_one")
        assert f"rank 0 calls with AllGatherMatmul(m={M + 1}," in first
        assert all(f"rank 0 calls with AllGatherMatmul(m={M + 1}," in said for said in others)


class TestPlanning:
    def test_ranks_that_choose_differently_run_the_baseline(self, ranks: Ranks) -> None:
        assert run(ranks, "choose_differently") == [(True, "baseline", True)] * WORLD

    def test_an_unprepared_problem_runs_the_baseline_with_one_warning(self, ranks: Ranks) -> None:
        for right, warned, stats, variant in run(ranks, "plan_off"):
            assert right
            assert warned == 1
            assert list(stats.values()) == [{"unprepared": 2}]
            assert variant == "push"

    def test_what_is_faster_in_graphs_only_runs_there_only(self, ranks: Ranks) -> None:
        for right, fused, plans, text in run(ranks, "faster_in_graphs_only"):
            assert right == [True, True]
            assert fused == [False, True]
            assert plans == 2
            assert "in eager calls baseline: outside of graphs 2 us, push 3" in text

    def test_what_one_mode_lacks_runs_in_none(self, ranks: Ranks) -> None:
        assert run(ranks, "lose_one_of_two") == [(True, "baseline", 1)] * WORLD

    def test_a_problem_too_large_for_the_heap_runs_the_baseline(self, ranks: Ranks) -> None:
        for variant, why in run(ranks, "heap_too_small"):
            assert variant == "baseline"
            assert "does not fit" in why


class TestInit:
    def test_the_heap_has_room_for_what_is_shipped(self, ranks: Ranks) -> None:
        for variant, slots in run(ranks, "init_with_a_large_shipped_record"):
            assert variant == "push"
            assert 1 <= slots < 2

    def test_it_works_without_a_database(self, ranks: Ranks, tmp_path: Any) -> None:
        for right, kind, variant, plans, text, said in run(
            ranks, "init_from", db=str(tmp_path / "none.sqlite"), disable_on=None
        ):
            assert right
            assert (kind, variant, plans, said) == ("baseline", "baseline", 1, [])
            assert "not measured on this hardware" in text

    def test_ranks_that_disagree_run_the_baseline_with_one_warning(
        self, ranks: Ranks, tmp_path: Any
    ) -> None:
        results = run(ranks, "init_from", db=str(tmp_path / "none.sqlite"), disable_on=1)
        assert [each[1] for each in results] == ["disabled", "disabled"]
        assert [len(each[-1]) for each in results] == [1, 0]
        assert all(each[0] for each in results)

    def test_each_group_has_a_runtime_of_its_own(self, ranks: Ranks) -> None:
        assert run(ranks, "on_a_group") == [(1, [[8.0] * 3] * 4)] * WORLD
