"""all_gather_matmul on real ranks of the host fabric: every variant, whatever the problem."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.ranks import gather_dims, on_every_fabric, our_names, served_names

OP = "all_gather_matmul"
TASKS = "tests.kernels.tasks"
SERVED, OURS = served_names(), our_names()

ALIGNED = ("push_tma",)  # wants rows that start at multiples of 16 bytes
COPIED = ("overlap",)  # wants rows on each rank
EACH_WAY = [(name, dim) for name in OURS for dim in gather_dims(name)]

#: odd and ragged in every dimension, for both ways to gather
SMALL = {"m": 17, "n": 37, "k": 66}


def case(variant, gather_dim, config=None, padded=False, **fields):
    from tests.kernels.tasks import Case

    fields = SMALL | {"gather_dim": gather_dim} | fields
    if variant in ALIGNED:
        fields |= {"n": -(-fields["n"] // 8) * 8, "k": 8 * fields["k"]}
    if variant in COPIED and fields["m"] < 16:
        fields |= {"m": 8 * fields["m"]}
    return Case(variant, fields, config, padded)


def complaints(ranks, world_size, cases):
    found = ranks.run(world_size, f"{TASKS}:complaints", cases=cases)
    return [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]


class TestServing:
    def test_every_known_variant_but_those_of_gpus_serves_the_host(self, ranks):
        aligned = SMALL | {"k": 64}
        for dim in (0, 1):
            fields = aligned | {"gather_dim": dim}
            refusals = ranks.run(2, f"{TASKS}:refusals", fields=fields)[0]
            served = sorted(name for name, why in refusals.items() if why is None)
            assert served == [name for name in SERVED if dim in gather_dims(name)]
        assert {"one_shot", "pull", "push", "push_two_kernel"} <= set(OURS)

    def test_a_single_rank_has_only_the_library(self, ranks):
        refusals = ranks.run(1, f"{TASKS}:refusals", fields=SMALL)[0]
        assert [name for name, why in refusals.items() if why is None] == ["baseline"]
        assert complaints(ranks, 1, [case("baseline", dim) for dim in (0, 1)]) == []


@on_every_fabric
@pytest.mark.parametrize("variant", SERVED)
class TestEveryVariant:
    def test_is_right_for_all_types_layouts_and_biases(self, ranks, variant):
        cases = [
            case(variant, dim, padded=padded, dtype=dtype, weight_layout=layout, bias=bias)
            for dim, dtype, layout, bias, padded in product(
                gather_dims(variant),
                ("float16", "bfloat16"),
                ("nk", "kn"),
                (False, True),
                (False, True),
            )
            if padded == (bias and dtype == "bfloat16")  # half of the pairs: the rest is alike
        ]
        assert complaints(ranks, ranks.few, cases) == []

    def test_is_right_for_few_and_ragged_rows_and_odd_sizes(self, ranks, variant):
        cases = [
            case(variant, dim, m=m, n=n, k=k, dtype="bfloat16")
            for m, n, k in [(1, 1, 3), (2, 33, 9), (4, 16, 387), (34, 5, 33)]
            for dim in gather_dims(variant)
        ]
        assert complaints(ranks, 3, cases) == []


@pytest.mark.parametrize(("variant", "gather_dim"), EACH_WAY)
class TestConfigs:
    def test_the_ends_of_the_space_are_right(self, ranks, variant, gather_dim):
        # of 16 rows a shard is a whole tile, of 32 it shares one
        self.check(ranks, case(variant, gather_dim, m=31), slice(0, 4))

    @pytest.mark.soak
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_many_drawn_configs_are_right(self, ranks, variant, gather_dim, world_size):
        tried = case(variant, gather_dim, m=35, n=70, k=35 * world_size, dtype="bfloat16")
        self.check(ranks, tried, slice(0, 60), world_size)

    @staticmethod
    def check(ranks, tried, which, world_size=2):
        configs = ranks.run(world_size, f"{TASKS}:extreme_configs", case=tried)[0][which]
        assert len(configs) >= 2
        cases = [replace(tried, config=config) for config in configs]
        assert complaints(ranks, world_size, cases) == []


class TestEightRanks:
    def test_every_variant_is_right_also_where_ranks_have_no_rows(self, ranks):
        """Eight ranks share few cores: one small problem each way."""
        cases = [
            case(variant, dim, m=9, n=16, k=40, dtype="bfloat16")
            for variant in SERVED
            for dim in gather_dims(variant)
        ]
        found = ranks.run(8, f"{TASKS}:complaints", cases=cases, random_data=False)
        assert [text for texts in found for text in texts] == []


@pytest.mark.parametrize("variant", OURS)
class TestBackToBack:
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_calls_without_a_barrier_see_only_their_own_inputs(self, ranks, variant, world_size):
        for dim in gather_dims(variant):
            rows = 5 if dim == 1 else world_size - 1  # the last rank has none to send
            tried = case(variant, dim, m=rows, n=16, k=12)
            assert self.run(ranks, world_size, [tried], generations=8) == []

    def test_generations_cross_the_wrap_of_32_bits(self, ranks, variant):
        cases = [case(variant, dim, m=5, n=16, k=12) for dim in gather_dims(variant)]
        found = self.run(ranks, 2, cases, generations=6, first_generation=2**31 - 3)
        assert found == []

    @on_every_fabric
    def test_results_repeat_bit_for_bit(self, ranks, variant):
        space_end = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 1, "SPLIT_K": 4,
                     "SWAP_AB": False, "SOURCES_PER_WAIT": 1, "CHUNKS": 2, "SENDERS": 1,
                     "SEND_BLOCK": 1024}  # fmt: skip
        tried = case(variant, gather_dims(variant)[-1], space_end)
        for bits in ranks.run(ranks.several, f"{TASKS}:bits_of_calls", case=tried, calls=3):
            assert len(set(bits)) == 1

    @pytest.mark.soak
    @pytest.mark.parametrize("seed", range(10))
    def test_many_schedules(self, ranks, variant, seed):
        cases = [case(variant, dim, m=5, n=16, k=12) for dim in gather_dims(variant)]
        assert self.run(ranks, 3, cases, generations=60, seed=seed) == []

    @staticmethod
    def run(ranks, world_size, cases, **options):
        found = ranks.run(world_size, f"{TASKS}:back_to_back", cases=cases, **options)
        return [text for texts in found for text in texts]


@on_every_fabric
class TestOnePool:
    def test_variants_and_problems_take_turns(self, ranks):
        cases = [
            case(variant, dim, **size)
            for size, variant in product(
                ({"m": 5, "n": 16, "k": 12}, {"m": 20, "n": 8, "k": 30}), SERVED
            )
            for dim in gather_dims(variant)
        ]
        found = ranks.run(
            ranks.several, f"{TASKS}:back_to_back", cases=cases, generations=len(cases)
        )
        assert [text for texts in found for text in texts] == []
