"""Bags of embedding_all_to_all that are wrong, and sums that are the same in each run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.tasks import Case, everybodys

OP = "embedding_all_to_all"
FIELDS = {"batch": 4, "bag": 3, "tables": 3, "rows": 5, "dim": 6, "dtype": "float32"}
TASKS = __name__


def wrong_bags(fabric: Any, shard_dim: int, config: dict[str, Any]) -> list[str]:
    """What is wrong with calls in which one bag of rank 0 is, for each way to be wrong."""
    case = Case("push", FIELDS | {"shard_dim": shard_dim}, config, op=OP)
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
@pytest.mark.parametrize("words", [False, True])
def test_a_bag_that_is_wrong_is_nan_and_no_other(ranks, shard_dim, words):
    found = ranks.run(2, f"{TASKS}:wrong_bags", shard_dim=shard_dim, config={"WORDS": words})
    assert found == [[], []]


def test_sums_have_the_same_bits_with_each_config(ranks):
    configs = [
        {"WORDS": words, "AHEAD": ahead, "BAGS": bags, "CHUNKS": chunks}
        for words, ahead, bags, chunks in [(False, 1, 2, 1), (True, 2, 4, 2), (True, 1, 4, 1)]
    ]
    assert all(all(same) for same in ranks.run(3, f"{TASKS}:bits", configs=configs))
