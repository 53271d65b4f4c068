"""What flash_decode alone promises: every kind of problem, and lengths that are on the device."""

from __future__ import annotations

import pytest

from taxfree_check.cross_compile.record import GhostFabric
from taxfree_kernels.fabric.heap import arena_bytes
from taxfree_kernels.flash_decode import plans
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import launching_through
from taxfree_kernels.meta import meta_tensors
from taxfree_kernels.variant import Ready, problem_class, variants
from tests.kernels.contract import DECODE, case, complaints
from tests.ranks import on_every_fabric

DECODE_TASKS = "tests.kernels.decode_tasks"

#: what a problem can differ in; each is also ragged somewhere
KINDS = [
    {"dtype": "bfloat16", "q_heads": 6, "kv_heads": 2},
    {"q_heads": 2, "kv_heads": 2, "v_head_dim": 24, "soft_cap": True},
    {"q_heads": 18, "head_dim": 20, "window": 25, "batch": 1},
    {"page_size": 1, "kv_len_per_rank": 17, "window": 3},
    {"page_size": 7, "batch": 3, "dtype": "bfloat16"},
    {"page_size": 16, "soft_cap": True, "window": 40},
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_softmax_over_what_the_ranks_hold(ranks, kind):
    tried = case(DECODE, "baseline", **kind)
    errors = ranks.run(2, f"{DECODE_TASKS}:reference_error", case=tried)
    assert all(error < 1e-12 for error in errors)


@on_every_fabric
def test_one_is_right_for_every_kind_of_problem(ranks):
    """All variants call the same function on their keys: one stands for them."""
    assert complaints(ranks, 2, [case(DECODE, "persistent", **kind) for kind in KINDS]) == []


@on_every_fabric
@pytest.mark.parametrize("variant", ["splits", "fused", "persistent"])
def test_lengths_are_read_at_each_call(ranks, variant):
    """The others launch the same splits, and merge them with what these merge them with."""
    lengths = [[[20, 3], [0, 20]], [[1, 0], [19, 0]], [[0, 0], [0, 0]]]
    run = {"case": case(DECODE, variant), "lengths": lengths}
    assert ranks.run(2, f"{DECODE_TASKS}:lengths_change", **run) == [[], []]


@pytest.mark.parametrize("fabric", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(("world_size", "variant"), [(1, "splits"), (2, "fused")])
def test_calls_in_a_chain_wait_for_what_comes_before(ranks, world_size, variant):
    tried = case(DECODE, variant, {"CHAINED": True, "launch_pdl": True}, kv_len_per_rank=400)
    for found in ranks.run(world_size, f"{DECODE_TASKS}:chained", case=tried, replays=20):
        assert found == []


#: a call by warp, which the interpreter does not run
BY_WARP = {
    "BY_WARP": True, "CHAINED": True, "launch_pdl": True, "BLOCK_H": 16, "BLOCK_N": 64,
    "num_warps": 4, "num_stages": 4, "SPLITS": 3, "OUT_ROWS": 1, "MERGE_WARPS": 2,
}  # fmt: skip
GPU = pytest.mark.parametrize(
    "fabric", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
HEADS = {"q_heads": 16, "kv_heads": 2, "head_dim": 64, "kv_len_per_rank": 1100}


@GPU
@pytest.mark.parametrize(
    "kind",
    [
        {"batch": 1},
        {"batch": 3, "head_dim": 128, "dtype": "bfloat16"},
        {"batch": 1, "page_size": 16, "soft_cap": True},
        {"batch": 2, "page_size": 7},
        {"q_heads": 40, "batch": 2},  # a program has 16 of the 20 heads
        {"batch": 1, "kv_len_per_rank": 5},
    ],
)
def test_splits_by_warp_are_right(ranks, kind):
    assert complaints(ranks, 1, [case(DECODE, "splits", BY_WARP, **HEADS | kind)]) == []


@GPU
@pytest.mark.parametrize("kind", [{}, {"page_size": 16}, {"kv_len_per_rank": 200}])
@pytest.mark.parametrize("num_stages", [3, 7])
def test_with_the_promise_only_queries_and_the_newest_key_are_waited_for(ranks, kind, num_stages):
    config = BY_WARP | {"num_stages": num_stages}
    tried = case(DECODE, "splits", config, **HEADS | {"batch": 1} | kind)
    for found in ranks.run(1, f"{DECODE_TASKS}:newest_keys", case=tried, steps=7):
        assert found == []


@pytest.mark.parametrize(("padding", "function"), [(16, "attend_by_warp"), (8, "_attend")])
def test_a_cache_that_splits_by_warp_cannot_load_is_read_in_place_by_the_others(padding, function):
    problem = problem_class(DECODE)(**HEADS, batch=2)
    fabric = GhostFabric(1, KNOWN["h200"], arena_bytes(problem.slot_bytes))
    plan = Ready(variants(DECODE)["splits"].plan(problem, fabric, BY_WARP))
    q, k, *others = meta_tensors(problem)
    k = k.new_empty(*k.shape[:3], problem.head_dim + padding)[..., : problem.head_dim]
    launched = []
    with launching_through(lambda *launch: launched.append(launch)):
        plan(q, k, *others)
    (kernel, args), _ = launched
    assert kernel.function is getattr(plans, function)
    assert kernel.options["num_stages"] == (4 if function == "_attend" else 1)
    assert args[1] is k
