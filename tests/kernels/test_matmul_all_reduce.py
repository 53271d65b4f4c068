"""matmul_all_reduce on real ranks of the host fabric: every variant, whatever the problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks import on_every_fabric, our_names, require, served_names

OP = "matmul_all_reduce"
TASKS = "tests.kernels.tasks"
SERVED, OURS = served_names(OP), our_names(OP)
NORMALISING = ("baseline", "one_shot", "push", "push_two_shot_lamport")

#: odd and ragged in every dimension
SMALL = {"m": 17, "n": 37, "k": 33}
#: cheap to interpret many times
TINY = {"m": 3, "n": 20, "k": 12}


def case(variant, config=None, padded=False, **fields):
    from tests.kernels.tasks import Case

    fields = SMALL | fields
    if variant == "overlap":  # its parts have aligned rows
        fields["n"] = 48
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
        few_rows = {"one_shot", "one_shot_ll", "two_shot", "push", "push_in_place", "push_lamport"}
        assert few_rows <= set(served)

    def test_a_single_rank_has_only_the_library(self, ranks):
        refusals = ranks.run(1, f"{TASKS}:refusals", fields=SMALL, op=OP)[0]
        assert [name for name, why in refusals.items() if why is None] == ["baseline"]
        assert complaints(ranks, 1, [case("baseline", bias=True, residual=True)]) == []


@on_every_fabric
@pytest.mark.parametrize("variant", SERVED)
class TestEveryVariant:
    def test_is_right_for_all_types_layouts_and_addends(self, ranks, variant):
        cases = [
            case(variant, padded=bias, dtype=dtype, weight_layout=layout, bias=bias, residual=other)
            for dtype, layout, bias, other in [
                ("float16", "nk", False, True),
                ("bfloat16", "nk", True, False),
                ("bfloat16", "kn", True, True),
            ]
        ]
        assert complaints(ranks, ranks.few, cases) == []

    def test_is_right_for_few_and_ragged_rows_and_odd_sizes(self, ranks, variant):
        cases = [
            case(variant, m=m, n=n, k=k, dtype="bfloat16") for m, n, k in [(1, 1, 1), (34, 5, 129)]
        ]
        assert complaints(ranks, ranks.several, cases) == []


@on_every_fabric
@pytest.mark.parametrize("variant", NORMALISING)
class TestRMSNorm:
    def test_is_right_for_all_types_addends_and_sizes(self, ranks, variant):
        cases = [
            case(variant, rms_norm=True, m=m, n=n, dtype=dtype, bias=bias, residual=other)
            for m, n, dtype, bias, other in [
                (1, 1, "float16", False, True),
                (17, 37, "bfloat16", True, False),
                (3, 64, "float16", True, True),
            ]
        ]
        assert complaints(ranks, ranks.few, cases) == []

    def test_both_outputs_are_no_less_exact_than_the_librarys(self, ranks, variant):
        """Each alone, as the error of both could be that of one."""
        tried = case(variant, rms_norm=True, m=4, n=256, k=64, dtype="bfloat16", residual=True)
        for errors, of_library in ranks.run(ranks.few, f"{TASKS}:errors_by_output", case=tried):
            for error, allowed in zip(errors, of_library, strict=True):
                assert 0 < error <= 1.25 * allowed


class TestWhoNormalises:
    def test_who_has_no_whole_rows_says_so(self, ranks):
        refusals = ranks.run(2, f"{TASKS}:refusals", fields=SMALL | {"rms_norm": True}, op=OP)[0]
        assert {name for name, why in refusals.items() if why is None} == set(NORMALISING)
        for variant in ("one_shot_ll", "two_shot", "push_two_shot"):
            assert "whole rows" in refusals[variant]

    def test_rows_beyond_the_registers_are_the_librarys(self, ranks):
        fields = {"m": 1, "n": (1 << 14) + 1, "k": 8, "rms_norm": True}
        refusals = ranks.run(2, f"{TASKS}:refusals", fields=fields, op=OP)[0]
        assert [name for name, why in refusals.items() if why is None] == ["baseline"]
        assert "16384 elements at most" in refusals["push"]


@pytest.mark.parametrize("fabric", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(
    ("variant", "config"),
    [("registered", None), ("torch_symm_mem", {"SHOTS": 1}), ("torch_symm_mem", {"SHOTS": 2})],
)
class TestLibrariesOfGpus:
    def test_is_right_with_and_without_addends(self, ranks, variant, config):
        require(ranks.few, ranks.fabric)
        cases = [
            case(variant, config, m=m, n=40, k=64, dtype="bfloat16", bias=adds, residual=adds)
            for m, adds in [(1, False), (34, True)]
        ]
        assert complaints(ranks, ranks.few, cases) == []


@pytest.mark.parametrize("variant", OURS)
class TestConfigs:
    def test_the_ends_of_the_space_are_right(self, ranks, variant):
        self.check(ranks, case(variant), slice(0, 4))

    @pytest.mark.soak
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_many_drawn_configs_are_right(self, ranks, variant, world_size):
        tried = case(variant, m=35, n=70, k=35, dtype="bfloat16", bias=True, residual=True)
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
            case(variant, {"TMA": True}, m=34, n=40, k=40, weight_layout=layout, bias=True)
            for variant, layout in (
                ("push", "nk"),
                ("push", "kn"),
                ("push_in_place", "kn"),
                ("push_lamport", "nk"),
                ("push_two_shot", "kn"),
            )
        ]
        assert complaints(ranks, 2, cases) == []


class TestEightRanks:
    def test_blocks_and_tiles_are_right_also_where_ranks_own_nothing(self, ranks):
        """Eight ranks share few cores: one small problem."""
        cases = [
            case(variant, m=1, n=40, k=5, dtype="bfloat16")
            for variant in (
                "one_shot_ll",
                "two_shot",
                "push",
                "push_in_place",
                "push_lamport",
                "push_two_shot",
            )
        ]
        assert complaints(ranks, 8, cases, random_data=False) == []


@pytest.mark.parametrize("variant", OURS)
class TestBackToBack:
    def test_calls_without_a_barrier_see_only_their_own_inputs(self, ranks, variant):
        assert back_to_back(ranks, 3, [case(variant, **TINY)], generations=6) == []

    def test_generations_cross_the_wrap_of_32_bits(self, ranks, variant):
        tried = [case(variant, **TINY)]
        found = back_to_back(ranks, 2, tried, generations=4, first_generation=2**31 - 3)
        assert found == []

    def test_all_ranks_have_the_same_bits_each_time(self, ranks, variant):
        normalises = variant in NORMALISING
        tried = case(variant, dtype="bfloat16", bias=True, residual=True, rms_norm=normalises)
        found = ranks.run(3, f"{TASKS}:bits_of_calls", case=tried, calls=2)
        assert len({bits for calls in found for bits in calls}) == 1

    @pytest.mark.soak
    @pytest.mark.parametrize("seed", range(10))
    def test_many_schedules(self, ranks, variant, seed):
        tried = [case(variant, **TINY)]
        assert back_to_back(ranks, 3, tried, generations=60, seed=seed) == []


class TestOnePool:
    def test_variants_take_turns_also_with_another_operation(self, ranks):
        from tests.kernels.tasks import Case

        cases = [
            *(case(name, **TINY) for name in SERVED),
            *(case(name, **TINY, rms_norm=True) for name in NORMALISING),
            Case("push", {"m": 5, "n": 16, "k": 12}),
        ]
        assert back_to_back(ranks, 3, cases, generations=len(cases)) == []
