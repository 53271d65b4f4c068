"""Bags of embedding_all_to_all that are wrong, and sums that are the same in each run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taxfree_kernels.embedding_all_to_all.problem import EmbeddingAllToAll
from taxfree_kernels.errors import PlanError
from tests.kernels.tasks import Case, everybodys

OP = "embedding_all_to_all"
FIELDS = {"batch": 4, "bag": 3, "tables": 3, "rows": 5, "dim": 6, "dtype": "float32"}
TASKS = __name__


def wrong_bags(fabric: Any, config: dict[str, Any], **fields: Any) -> list[str]:
    """What is wrong with calls in which one bag of rank 0 is, for each way to be wrong."""
    case = Case("push", FIELDS | fields, config, op=OP)
    plan, problem, found = case.plan(fabric), case.problem(fabric.world_size), []
    weight, indices, offsets, weights = case.tensors(fabric, 1, integers=True)
    offsets[:] = torch.tensor([0, 1, 3, 3, 5])
    good = plan(weight, indices, offsets, weights, _empty(problem))
    for table in (0, 2):  # by tables, rank 0 has the first, its peer the last
        for name, index, begins in (
            ("too large", problem.all_rows, [0, 1, 3, 3, 5]),
            ("negative", -1, [0, 1, 3, 3, 5]),
            ("too long", 0, [0, 1, problem.capacity + 1, 3, 5]),
            ("out of order", 0, [0, 1, -1, 3, 5]),
        ):
            changed, moved = indices.clone(), offsets.clone()
            if fabric.rank == 0:
                moved[table] = torch.tensor(begins)
                changed[table, 2] = index
            out = plan(weight, changed, moved, weights, _empty(problem))
            is_nan = out.isnan().all(2)
            wanted = torch.zeros_like(is_nan)
            if fabric.rank == 0:
                wanted[1, table] = True
                wanted[2, table] = begins[2] != 3  # it begins where the other does not end
            if not torch.equal(is_nan, wanted) or not torch.equal(out[~is_nan], good[~is_nan]):
                found.append(f"table {table}, {name}: NaN at {is_nan.nonzero().tolist()}")
    fabric.pool.check()
    return found


def bags_after_the_first(fabric: Any, **fields: Any) -> bool:
    """Whether indices before the first bag are left out, wrong or not."""
    case = Case("push", FIELDS | fields, op=OP)
    plan, problem = case.plan(fabric), case.problem(fabric.world_size)
    weight, indices, offsets, weights = case.tensors(fabric, 1, integers=True)
    offsets[:] = torch.tensor([0, 1, 3, 3, 5])
    good = plan(weight, indices, offsets, weights, _empty(problem)).clone()
    moved = torch.cat([torch.full_like(indices[:, :2], problem.all_rows), indices[:, :-2]], 1)
    out = plan(weight, moved.contiguous(), offsets + 2, weights, _empty(problem))
    return torch.equal(out, good)


def rows_nobody_asks_for(fabric: Any, mode: str) -> bool:
    """Whether bags are right where rows that nobody asks for are infinite."""
    case = Case("push", FIELDS | {"shard_dim": 1, "mode": mode}, op=OP)
    plan, problem = case.plan(fabric), case.problem(fabric.world_size)
    weight, indices, offsets, weights = case.tensors(fabric, 1, integers=True)
    weight.fill_(float("inf"))
    weight[:, 2] = 1 + fabric.rank
    indices.copy_(torch.arange(indices.numel()).view_as(indices) % 2 * problem.rows + 2)
    offsets[:] = torch.tensor([0, 2, 4, 8, 8])
    out = plan(weight, indices, offsets, weights, _empty(problem))
    wanted = torch.tensor([3, 3, 6, 0] if mode == "sum" else [1.5, 1.5, 1.5, 0])
    return torch.equal(out, wanted[:, None, None].expand_as(out))


def large_means(fabric: Any) -> bool:
    """Whether means of rows are right whose sums are more than float16 holds."""
    fields = {"shard_dim": 1, "mode": "mean", "dtype": "float16"}
    case = Case("push", FIELDS | fields, op=OP)
    plan, problem = case.plan(fabric), case.problem(fabric.world_size)
    weight, indices, offsets, weights = case.tensors(fabric, 1, integers=True)
    weight.fill_(50000)
    offsets[:] = torch.tensor([0, 1, 3, 6, 10])
    out = plan(weight, indices, offsets, weights, _empty(problem).half())
    return bool(((out - 50000).abs() <= 32).all())  # one place


def _empty(problem: Any) -> torch.Tensor:
    return torch.zeros(problem.batch, problem.tables, problem.dim)


def bits(fabric: Any, configs: list[dict[str, Any]]) -> list[bool]:
    """Whether random sums by rows have the same bits with each config as with the first."""
    cases = [Case("push", FIELDS | {"shard_dim": 1}, config, op=OP) for config in configs]
    tensors = cases[0].tensors(fabric, 1, integers=False)
    problem = cases[0].problem(fabric.world_size)
    outputs = [case.plan(fabric)(*tensors, _empty(problem)).clone() for case in cases]
    everybodys(fabric, None)
    return [torch.equal(outputs[0], output) for output in outputs]


@pytest.mark.parametrize("shard_dim", [0, 1])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("words", [False, True])
def test_a_bag_that_is_wrong_is_nan_and_no_other(ranks, shard_dim, mode, words):
    fields = {"shard_dim": shard_dim, "mode": mode, "config": {"WORDS": words}}
    found = ranks.run(2, f"{TASKS}:wrong_bags", **fields)
    assert found == [[], []]


@pytest.mark.parametrize("shard_dim", [0, 1])
def test_indices_before_the_first_bag_are_left_out(ranks, shard_dim):
    assert all(ranks.run(2, f"{TASKS}:bags_after_the_first", shard_dim=shard_dim))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_rows_of_others_add_nothing(ranks, mode):
    assert all(ranks.run(2, f"{TASKS}:rows_nobody_asks_for", mode=mode))


def test_means_by_rows_do_not_overflow(ranks):
    assert all(ranks.run(2, f"{TASKS}:large_means"))


def test_rows_that_32_bits_do_not_count_are_refused():
    fields = {"batch": 1, "bag": 1, "dim": 2}
    for shard_dim, tables, rows in [(0, 4, 1 << 30), (1, 2, 1 << 30), (1, 1, 1 << 30)]:
        with pytest.raises(PlanError, match="32 bits"):
            EmbeddingAllToAll(tables=tables, rows=rows, shard_dim=shard_dim, world_size=2, **fields)
    EmbeddingAllToAll(tables=2, rows=1 << 30, world_size=2, **fields)


def test_sums_have_the_same_bits_with_each_config(ranks):
    configs = [
        {"WORDS": words, "AHEAD": ahead, "BAGS": bags, "CHUNKS": chunks}
        for words, ahead, bags, chunks in [(False, 1, 2, 1), (True, 2, 4, 2), (True, 1, 4, 1)]
    ]
    assert all(all(same) for same in ranks.run(3, f"{TASKS}:bits", configs=configs))
