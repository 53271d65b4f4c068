"""Operations, problems and variants as they are found, without ranks."""

from __future__ import annotations

import ast
from itertools import product

import pytest

from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.reduction import spaces
from taxfree_kernels.variant import operation_names, problem_class, variants
from tests.ranks import KERNELS, OP, variant_names

PROBLEMS = [
    {"m": m, "n": 3584, "k": 8192, "gather_dim": dim, "world_size": 8}
    for m in (1, 64, 1024)
    for dim in (0, 1)
] + [
    {"m": 17, "n": 37, "k": 66, "gather_dim": 1, "world_size": 2},
    {"m": 5, "n": 32, "k": 32, "gather_dim": 1, "world_size": 2},  # too short a K to be split
    {"m": 4, "n": 16, "k": 3096, "gather_dim": 1, "world_size": 3},  # halves of K are unaligned
]
SPACED = {
    OP: PROBLEMS,
    "matmul_all_reduce": [
        *(
            {"m": m, "n": 8192, "k": k, "world_size": 8}
            for m in (1, 64, 1024)
            for k in (1024, 3584)
        ),
        {"m": 8192, "n": 8192, "k": 3584, "world_size": 4, "dtype": "bfloat16"},
        {"m": 17, "n": 37, "k": 33, "world_size": 2},
        *(
            {"m": m, "n": n, "k": 3584, "world_size": 8, "rms_norm": True}
            for m, n in [(1, 16384), (64, 7168)]
        ),
    ],
    "matmul_reduce_scatter": [
        *({"m": m, "n": 8192, "k": 3584, "world_size": 8} for m in (1, 64, 1024, 16384)),
        {"m": 256, "n": 4096, "k": 1792, "world_size": 4, "scatter_dim": 1, "dtype": "bfloat16"},
        {"m": 17, "n": 37, "k": 33, "world_size": 2},
    ],
    "stencil": [
        *(
            {"rows": side, "columns": side, "depth": depth, "world_size": 2}
            for side in (4, 128, 1024)
            for depth in (1, 3, 256)
        ),
        {"rows": 8192, "columns": 8192, "across": 2, "world_size": 4},
        {"rows": 3, "columns": 3},
    ],
    "attention": [
        {"batch": 1, "length": length, "q_heads": 8, "kv_heads": 2, "head_dim": dim, "packed": each}
        for length in (1, 100, 131072)
        for dim in (16, 70, 96, 128, 256)
        for each in (False, True)
    ],
}


def problem(**fields):
    return problem_class(OP)(**{"m": 16, "n": 32, "k": 64, "world_size": 4} | fields)


class TestDiscovery:
    def test_operations_are_the_folders_with_problems(self):
        assert OP in operation_names()
        assert "device" not in operation_names()

    def test_an_unknown_operation_is_refused_with_the_known_ones(self):
        with pytest.raises(PlanError) as caught:
            problem_class("all_gather_softmax")
        assert OP in caught.value.hint

    def test_variants_are_the_modules_that_define_one(self):
        found = variants(OP)
        assert next(iter(found)) == "baseline"
        assert sorted(found) == variant_names()
        assert list(found)[1:] == sorted(list(found)[1:])
        assert all(name == variant.name for name, variant in found.items())

    def test_the_baseline_serves_everything_and_is_no_fused_kernel(self):
        baseline = variants(OP)["baseline"]
        assert not baseline.fused
        assert all(
            baseline.unsupported_reason(problem_class(OP)(**fields), hardware) is None
            for fields in PROBLEMS
            for hardware in KNOWN.values()
        )


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in SPACED for name in variant_names(op)]
)
@pytest.mark.parametrize("hardware", KNOWN.values(), ids=list(KNOWN))
class TestSpaces:
    def test_first_configs_lie_in_the_space_and_are_not_refused(self, op, name, hardware):
        variant = variants(op)[name]
        for fields in SPACED[op]:
            tried = problem_class(op)(**fields)
            if variant.unsupported_reason(tried, hardware) is not None:
                continue
            space, first = variant.space(tried, hardware), variant.seed_configs(tried, hardware)
            assert first, fields
            assert all(space.values())
            for config in first:
                assert config.keys() == space.keys()
                assert all(config[parameter] in values for parameter, values in space.items()), (
                    config
                )
                assert variant.illegal_reason(tried, hardware, config) is None, config

    def test_parameters_have_no_value_twice(self, op, name, hardware):
        for fields in SPACED[op]:
            space = variants(op)[name].space(problem_class(op)(**fields), hardware)
            assert all(len(set(values)) == len(values) for values in space.values())


@pytest.mark.parametrize(("m", "block_n"), [(512, 128), (1024, 256), (2048, 256)])
def test_push_tma_begins_with_the_tiles_that_were_fastest(m, block_n):
    """On four H200s, one wave of them and of 16 senders: a neighbour's tiles cost 20 us at 1024."""
    tried = problem(m=m, n=3584, k=8192, dtype="bfloat16")
    first = variants(OP)["push_tma"].seed_configs(tried, KNOWN["h200"])[0]
    assert (first["BLOCK_M"], first["BLOCK_N"], first["SPLIT_K"]) == (128, block_n, 1)
    assert (first["SENDERS"], first["CHUNKS"], first["SOURCES_PER_WAIT"]) == (16, 8, 2)


@pytest.mark.parametrize(
    ("m", "n", "ways"),
    [
        (16, 8192, [True, False]),  # as many words as the slot has
        (17, 8192, [False]),
        (256, 8192, [False]),  # 256 tiles of 128 x 64
        (257, 8192, []),
    ],
)
def test_tiles_that_are_added_in_place_are_few(m, n, ways):
    tried = problem_class("matmul_all_reduce")(m, n, 1024, world_size=8)
    variant, hardware = variants("matmul_all_reduce")["push_in_place"], KNOWN["h200"]
    first = variant.seed_configs(tried, hardware)
    assert list(dict.fromkeys(config["LL"] for config in first)) == ways
    assert (variant.unsupported_reason(tried, hardware) is None) == bool(ways)


@pytest.mark.parametrize("m", [256, 512, 1024])
@pytest.mark.parametrize("name", ["push", "push_two_shot"])
def test_who_adds_a_residual_has_registers_for_it(name, m):
    tried = reduced(m=m, n=8192, k=3584, residual=True)
    first = variants("matmul_all_reduce")[name].seed_configs(tried, KNOWN["h200"])
    elements = [
        each["BLOCK_M"] * each["BLOCK_N"] / (32 * each["num_warps"] * each.get("PIECES", 1))
        for each in first
    ]
    assert first
    assert max(elements) <= 64


class TestProblem:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"m": 0}, "m is 0"),
            ({"world_size": 0}, "world_size is 0"),
            ({"gather_dim": 2}, "gather_dim is 2"),
            ({"dtype": "float32"}, "float32 is not one of"),
            ({"weight_layout": "mn"}, "weight_layout"),
            ({"gather_dim": 1, "k": 66}, "k=66 is not divisible by 4 ranks"),
        ],
    )
    def test_impossible_dimensions_are_refused(self, fields, message):
        with pytest.raises(PlanError, match=message):
            problem(**fields)

    @pytest.mark.parametrize("m", [1, 2, 4, 5, 7, 8, 9, 16])
    def test_row_shards_add_up_to_the_rows(self, m):
        tried = problem(m=m, gather_dim=0)
        rows = [tried.rows_of(rank) for rank in range(4)]
        assert sum(rows) == m
        assert rows == sorted(rows, reverse=True)
        assert rows[0] == tried.shard_rows == -(-m // 4)

    def test_column_shards_have_all_rows(self):
        tried = problem(m=5, gather_dim=1)
        assert [tried.rows_of(rank) for rank in range(4)] == [5] * 4
        assert tried.shard_columns == 16

    def test_the_cost_counts_each_element_once(self):
        cost = problem(gather_dim=1).cost
        assert cost.flops == 2 * 16 * 32 * 64
        assert cost.memory_bytes == 2 * (16 * 64 + 64 * 32 + 16 * 32)
        assert cost.link_bytes == 2 * 16 * 64 * 3 // 4

    def test_the_rank_without_rows_receives_everything(self):
        assert problem(m=5, gather_dim=0).cost.link_bytes == 2 * 5 * 64


class TestReducedProblem:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"k": 0}, "k is 0"),
            ({"world_size": 0}, "world_size is 0"),
            ({"dtype": "float32"}, "float32 is not one of"),
            ({"weight_layout": "mn"}, "weight_layout"),
        ],
    )
    def test_impossible_dimensions_are_refused(self, fields, message):
        with pytest.raises(PlanError, match=message):
            reduced(**fields)

    def test_the_cost_counts_each_element_once_and_what_two_shots_receive(self):
        cost = reduced(residual=True).cost
        assert cost.flops == 2 * 16 * 32 * 64
        assert cost.memory_bytes == 2 * (16 * 64 + 64 * 32 + 2 * 16 * 32)
        assert cost.link_bytes == 2 * 2 * 16 * 32 * 3 // 4
        both = reduced(residual=True, rms_norm=True).cost
        assert both.memory_bytes - cost.memory_bytes == 2 * (16 * 32 + 32)  # out, norm_weight

    def test_a_slot_holds_all_reduction_only_where_one_shot_serves(self):
        small, large = reduced(m=1024, n=8192), reduced(m=1025, n=8192)
        assert small.slot_bytes >= 4 * 4 * 1024 * 8192
        assert large.slot_bytes < small.slot_bytes
        assert large.slot_bytes >= 2 * 2 * 1025 * 8192
        assert large.slot_bytes < 1.2 * 2 * 2 * 1025 * 8192

    @pytest.mark.parametrize("device", ["h200", "mi300x", "cpu"])
    def test_a_slot_holds_whole_tiles_of_any_first_config_unless_columns_are_few(self, device):
        variant, hardware = variants("matmul_all_reduce")["push_two_shot"], KNOWN[device]
        for m, n, k, world in product((1, 65, 130, 4097), (5, 8192), (129, 1024), (2, 3, 8)):
            problem = reduced(m=m, n=n, k=k, world_size=world)
            space = variant.space(problem, hardware)
            wanted = 1 if n == 5 else len(spaces.seed_configs(problem, hardware, space))
            assert len(variant.seed_configs(problem, hardware)) >= wanted


class TestScatteredProblem:
    def test_columns_that_do_not_split_are_refused(self):
        with pytest.raises(PlanError, match="n=30 is not divisible by 4 ranks"):
            reduced("matmul_reduce_scatter", n=30, scatter_dim=1)
        with pytest.raises(PlanError, match="scatter_dim is 2"):
            reduced("matmul_reduce_scatter", scatter_dim=2)

    @pytest.mark.parametrize("m", [1, 3, 4, 5, 9, 16])
    def test_shards_have_one_size_and_their_rows_add_up(self, m):
        tried = reduced("matmul_reduce_scatter", m=m)
        rows = [tried.rows_of(rank) for rank in range(4)]
        assert sum(rows) == m
        assert max(rows) == tried.shard_rows

    def test_the_cost_counts_what_a_shard_receives(self):
        for dim in (0, 1):
            cost = reduced("matmul_reduce_scatter", scatter_dim=dim).cost
            assert cost.memory_bytes == 2 * (16 * 64 + 64 * 32 + 16 * 32 // 4)
            assert cost.link_bytes == 2 * 3 * 16 * 32 // 4

    def test_large_sums_do_not_travel_as_float32(self):
        assert reduced("matmul_reduce_scatter").wires == ("float16", "float32")
        assert reduced("matmul_reduce_scatter", m=4096, n=8192).wires == ("float16",)


def reduced(op="matmul_all_reduce", **fields):
    sizes = {"m": 16, "n": 32, "k": 64, "world_size": 4}
    return problem_class(op)(**sizes | fields)


class TestOverlap:
    OVERLAP = variants("all_gather_matmul")["overlap"]

    @pytest.mark.parametrize(("world_size", "m"), [(8, 3), (8, 9), (6, 3), (5, 2), (4, 2), (3, 4)])
    def test_ranks_without_rows_would_wait_for_each_other(self, world_size, m):
        problem = problem_class("all_gather_matmul")(m, 16, 16, 0, world_size=world_size)
        assert self.OVERLAP.unsupported_reason(problem, KNOWN["h200"]) == "a shard without rows"

    def test_unequal_shards_are_served(self):
        problem = problem_class("all_gather_matmul")(9, 16, 16, 0, world_size=2)  # 5 and 4 rows
        assert self.OVERLAP.unsupported_reason(problem, KNOWN["h200"]) is None


def test_plans_ask_no_search_space():
    """What a config launches does not depend on what else would be tried."""
    asking = set()
    for path in (KERNELS / "taxfree_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "plan"):
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                if "spaces" in names:
                    asking.add(f"{path.parent.name}/{path.stem}")
    assert asking == {"flash_decode/baseline"}  # which takes what would be tried first
