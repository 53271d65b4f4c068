"""matmul_reduce_scatter on real ranks of the host fabric: every variant, whatever the problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks import on_every_fabric, our_names, served_names

OP = "matmul_reduce_scatter"
TASKS = "tests.kernels.tasks"
SERVED, OURS = served_names(OP), our_names(OP)

#: odd and ragged in every dimension that may be
SMALL = {"m": 17, "n": 36, "k": 33}
#: cheap to interpret many times; with 3 ranks, the last has no rows
TINY = {"m": 4, "n": 18, "k": 12}


def case(variant, scatter_dim, config=None, padded=False, **fields):
    from tests.kernels.tasks import Case

    fields = SMALL | {"scatter_dim": scatter_dim} | fields
    if variant == "overlap":  # its parts have aligned rows
        fields |= {"n": 96, "m": fields["m"] + 32 * scatter_dim}
    if variant == "push_lamport":  # each rank has rows
        fields |= {"m": max(5, fields["m"])}
    return Case(variant, fields, config, padded, OP)


def complaints(ranks, world_size, cases, **options):
    found = ranks.run(world_size, f"{TASKS}:complaints", cases=cases, **options)
    return [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]


def back_to_back(ranks, world_size, cases, **options):
    found = ranks.run(world_size, f"{TASKS}:back_to_back", cases=cases, **options)
    return [text for texts in found for text in texts]


class TestServing:
    def test_every_variant_that_needs_no_gpu_serves_the_host(self, ranks):
        refusals = ranks.run(2, f"{TASKS}:refusals", fields=SMALL, op=OP)[0]
        served = sorted(name for name, why in refusals.items() if why is None)
        assert served == [name for name in SERVED if name != "overlap"]  # wants aligned rows
        assert {"one_shot", "push", "push_lamport"} <= set(served)

    def test_bare_words_want_rows_on_every_rank(self, ranks):
        for m, why in ((4, "a rank without rows would hear from nobody"), (5, None)):
            refusals = ranks.run(3, f"{TASKS}:refusals", fields=SMALL | {"m": m}, op=OP)[0]
            assert refusals["push_lamport"] == why

    def test_a_single_rank_has_only_the_library(self, ranks):
        refusals = ranks.run(1, f"{TASKS}:refusals", fields=SMALL, op=OP)[0]
        assert [name for name, why in refusals.items() if why is None] == ["baseline"]
        assert complaints(ranks, 1, [case("baseline", dim) for dim in (0, 1)]) == []


@on_every_fabric
@pytest.mark.parametrize("variant", SERVED)
class TestEveryVariant:
    def test_is_right_for_all_types_and_layouts(self, ranks, variant):
        cases = [
            case(variant, dim, padded=dim == 1, dtype=dtype, weight_layout=layout)
            for dim, dtype, layout in [
                (0, "float16", "nk"),
                (0, "bfloat16", "kn"),
                (1, "bfloat16", "nk"),
                (1, "float16", "kn"),
            ]
        ]
        assert complaints(ranks, ranks.few, cases) == []

    @pytest.mark.parametrize("scatter_dim", [0, 1])
    def test_is_right_for_few_and_ragged_rows_and_odd_sizes(self, ranks, variant, scatter_dim):
        cases = [
            case(variant, scatter_dim, m=m, n=n, k=k, dtype="bfloat16")
            for m, n, k in [(1, 3, 1), (49, 6, 129)]
        ]
        assert complaints(ranks, 3, cases) == []


@pytest.mark.parametrize("variant", OURS)
class TestConfigs:
    @pytest.mark.parametrize("scatter_dim", [0, 1])
    def test_the_ends_of_the_space_are_right(self, ranks, variant, scatter_dim):
        self.check(ranks, case(variant, scatter_dim), slice(0, 3))

    @pytest.mark.soak
    @pytest.mark.parametrize("scatter_dim", [0, 1])
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_many_drawn_configs_are_right(self, ranks, variant, scatter_dim, world_size):
        tried = case(variant, scatter_dim, m=70, n=60, k=35, dtype="bfloat16")
        self.check(ranks, tried, slice(0, 60), world_size)

    @staticmethod
    def check(ranks, tried, which, world_size=2):
        configs = ranks.run(world_size, f"{TASKS}:extreme_configs", case=tried)[0][which]
        assert len(configs) >= 2
        cases = [replace(tried, config=config) for config in configs]
        assert complaints(ranks, world_size, cases) == []


class TestTilesOfBoxes:
    def test_what_the_tma_loads_is_right_beyond_the_ends_of_matrices(self, ranks):
        cases = [
            case("push", dim, {"TMA": True}, m=34, n=48, k=40, weight_layout=layout)
            for dim in (0, 1)
            for layout in ("nk", "kn")
        ]
        assert complaints(ranks, 2, cases) == []


@pytest.mark.parametrize("variant", OURS)
class TestBackToBack:
    @pytest.mark.parametrize("scatter_dim", [0, 1])
    def test_calls_without_a_barrier_see_only_their_own_inputs(self, ranks, variant, scatter_dim):
        assert back_to_back(ranks, 3, [case(variant, scatter_dim, **TINY)], generations=6) == []

    def test_generations_cross_the_wrap_of_32_bits(self, ranks, variant):
        cases = [case(variant, dim, **TINY) for dim in (0, 1)]
        found = back_to_back(ranks, 2, cases, generations=4, first_generation=2**31 - 3)
        assert found == []

    def test_results_repeat_bit_for_bit(self, ranks, variant):
        for bits in ranks.run(3, f"{TASKS}:bits_of_calls", case=case(variant, 0, **TINY), calls=2):
            assert len(set(bits)) == 1

    @pytest.mark.soak
    @pytest.mark.parametrize("seed", range(10))
    def test_many_schedules(self, ranks, variant, seed):
        cases = [case(variant, dim, **TINY) for dim in (0, 1)]
        assert back_to_back(ranks, 3, cases, generations=60, seed=seed) == []


class TestOnePool:
    def test_variants_take_turns_also_with_another_operation(self, ranks):
        from tests.kernels.tasks import Case

        sums = Case("two_shot", {"m": 3, "n": 20, "k": 12}, op="matmul_all_reduce")
        cases = [
            each for name in OURS for dim in (0, 1) for each in (case(name, dim, **TINY), sums)
        ]
        assert back_to_back(ranks, 3, cases, generations=len(cases)) == []
