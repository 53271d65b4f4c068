"""What models run on two H100s has a shipped record, or stands here with the reason why not."""

from __future__ import annotations

import pytest

from taxfree import MatmulAllReduce
from taxfree._runtime.dispatch import Dispatcher
from taxfree_kernels.hardware import KNOWN
from taxfree_tune.shapes import ShapeRequest, expand
from taxfree_tune.shapes.models import load_model
from taxfree_tuning_db import Table, shipped_records

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b", "mistral-7b")
ROWS = "model m=1,4,16,64,256,1024,4096"
SHAPES = {
    "matmul_all_reduce": ROWS,
    "all_gather_matmul": ROWS,
    "matmul_reduce_scatter": ROWS,
    "flash_decode": "model",
}


def reason_for_none(op, model, problem):
    """Why a problem has no record; None where it should have one."""
    if op in ("all_gather_matmul", "matmul_reduce_scatter") and problem.m < 8:
        return "so few rows are decoded, and decoding shards none"
    if op == "flash_decode" and problem.page_size:
        return "paged caches: not measured yet"
    if op != "all_gather_matmul":
        return None
    if problem.n == model.head.features(2):
        return "the head, once a step"
    joint = {sum(each.features(2) for each in block.columns) for block in model.blocks}
    if problem.n not in joint:
        return "one of the weights on the same rows: compiled code gathers once for all"
    return None


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_problem_of_a_model_has_a_record_within_a_factor_of_two(name, op):
    dispatcher = Dispatcher(Table(shipped=shipped_records()), KNOWN["h100"])
    model, request = load_model(name), ShapeRequest([SHAPES[op]], name, world_sizes=(2,))
    asked = expand(op, request)
    lacking = [each for each in asked if not dispatcher.answer(op, each).is_recorded]
    assert [each for each in lacking if reason_for_none(op, model, each) is None] == []
    assert len(lacking) < len(asked)


@pytest.mark.parametrize("k", [4096, 14336])
def test_a_record_without_residual_does_not_make_a_sum_with_one_spill(k):
    """Two programs add a tile of 8192 rows with the residual; without, one does."""
    dispatcher = Dispatcher(Table(shipped=shipped_records()), KNOWN["h100"])
    problem = MatmulAllReduce(m=8192, n=8192, k=k, dtype="bfloat16", world_size=2, residual=True)
    choice = dispatcher.choose("matmul_all_reduce", problem)
    assert (choice.variant, choice.config["PIECES"]) == ("push_two_shot", 2)
