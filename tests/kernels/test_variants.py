"""Operations, problems and variants as they are found, without ranks."""

from __future__ import annotations

import pytest

from taxfree_kernels.errors import PlanError
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation_names, problem_class, variants
from tests.ranks import OP, variant_names

PROBLEMS = [
    {"m": m, "n": 3584, "k": 8192, "gather_dim": dim, "world_size": 8}
    for m in (1, 64, 1024)
    for dim in (0, 1)
] + [{"m": 17, "n": 37, "k": 66, "gather_dim": 1, "world_size": 2}]


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
            baseline.refuses_problem(problem_class(OP)(**fields), hardware) is None
            for fields in PROBLEMS
            for hardware in KNOWN.values()
        )


@pytest.mark.parametrize("name", variant_names())
@pytest.mark.parametrize("hardware", KNOWN.values(), ids=list(KNOWN))
class TestSpaces:
    def test_first_configs_lie_in_the_space_and_are_not_refused(self, name, hardware):
        variant = variants(OP)[name]
        for fields in PROBLEMS:
            tried = problem_class(OP)(**fields)
            if variant.refuses_problem(tried, hardware) is not None:
                continue
            space, first = variant.space(tried, hardware), variant.first_configs(tried, hardware)
            assert first, fields
            assert all(space.values())
            for config in first:
                assert config.keys() == space.keys()
                assert all(config[knob] in values for knob, values in space.items()), config
                assert variant.refuses_config(tried, hardware, config) is None, config

    def test_knobs_have_no_value_twice(self, name, hardware):
        for fields in PROBLEMS:
            space = variants(OP)[name].space(problem_class(OP)(**fields), hardware)
            assert all(len(set(values)) == len(values) for values in space.values())


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
