"""What every variant of every operation promises, on real ranks of the host fabric and of GPUs.

What one operation alone promises is tested in a file of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from taxfree_kernels.variant import operation_names
from tests.kernels.contract import (
    ALL_REDUCE,
    BY_ANOTHER,
    BY_ROWS,
    DECODE,
    EMBEDDING,
    GATHER,
    NORMALISING,
    OURS,
    PROBLEMS,
    REPLICATED,
    SCATTER,
    SEARCHED,
    SERVED,
    STENCIL,
    TASKS,
    WORDS,
    back_to_back,
    case,
    complaints,
    tiny,
    unsupported_reasons,
    ways,
)
from tests.ranks import LOCAL, on_every_fabric, require, served_names, variant_names

#: variants of matmul_reduce_scatter whose rows start at multiples of 16 bytes
ALIGNED = ("push_lamport_specialized",)
#: operation, ranks, fields, what each variant says that serves other problems but not this one
REFUSED = [
    (GATHER, 2, {"gather_dim": 1, "k": 64}, {"overlap": ""}),
    (SCATTER, 2, {}, {"overlap": ""} | dict.fromkeys(ALIGNED, "16 bytes")),
    (
        SCATTER,
        3,
        {"n": 96, "m": 4, "k": 64},
        dict.fromkeys(
            ("push_lamport", "push_lamport_specialized"),
            "a rank without rows would hear from nobody",
        ),
    ),
    (
        ALL_REDUCE,
        2,
        {"rms_norm": True},
        dict.fromkeys(set(served_names(ALL_REDUCE)) - set(NORMALISING), "")
        | {"push_two_shot_lamport_specialized": "16 bytes", "overlap": "aligned rows"},
    ),
    (
        ALL_REDUCE,
        2,
        {"m": 1, "n": (1 << 14) + 1, "k": 8, "rms_norm": True},
        dict.fromkeys(set(served_names(ALL_REDUCE)) - {"baseline", *BY_ANOTHER}, "")
        | dict.fromkeys(BY_ROWS, "16384 elements at most")
        | {"overlap": "aligned rows"},
    ),
]


@pytest.mark.parametrize("op", operation_names())
class TestServing:
    def test_every_variant_that_needs_no_gpu_serves_the_host(self, ranks, op):
        served = {
            name
            for name in variant_names(op)
            for way in ways(op, name)
            if unsupported_reasons(ranks, 2, op, case(op, name, **way).fields)[name] is None
        }
        assert served == set(served_names(op))
        assert len(served) >= (2 if op in (*LOCAL, EMBEDDING, STENCIL) else 5)

    def test_a_single_rank_has_only_the_library(self, ranks, op):
        alone = PROBLEMS[op].alone
        found = unsupported_reasons(ranks, 1, op, PROBLEMS[op].small)
        assert [name for name, why in found.items() if why is None] == [*alone]
        cases = [
            case(op, name, **PROBLEMS[op].kinds[-1] | way)
            for name in alone
            for way in ways(op, name)
        ]
        assert complaints(ranks, 1, cases) == []


@pytest.mark.parametrize(("op", "world_size", "fields", "refused"), REFUSED)
def test_who_cannot_serve_a_problem_says_so(ranks, op, world_size, fields, refused):
    found = unsupported_reasons(ranks, world_size, op, PROBLEMS[op].small | fields)
    assert {name for name in served_names(op) if found[name] is not None} == refused.keys()
    for name, why in refused.items():
        assert why in found[name]


@on_every_fabric
@pytest.mark.parametrize(("op", "variant"), SERVED)
class TestEveryVariant:
    def test_is_right_for_all_types_layouts_and_addends(self, ranks, op, variant):
        cases = [
            case(op, variant, padded=number % 2 == 1, **kind | way)
            for way in ways(op, variant)
            for number, kind in enumerate(PROBLEMS[op].kinds)
        ]
        assert complaints(ranks, ranks.few, cases) == []

    @pytest.mark.dealt("op")
    def test_is_right_for_few_and_ragged_rows_and_odd_sizes(self, ranks, op, variant):
        if (op, variant) == (STENCIL, "baseline"):
            require(
                3, ranks.fabric
            )  # ranks that share a GPU have gloo, which sends no GPU's memory
        cases = [
            case(op, variant, **fields | way)
            for way in ways(op, variant)
            for fields in PROBLEMS[op].ragged
        ]
        assert complaints(ranks, 3, cases) == []


@pytest.mark.parametrize(("op", "variant", "way"), SEARCHED)
class TestConfigs:
    def test_the_ends_of_the_space_are_right(self, ranks, op, variant, way, sample):
        tried = case(op, variant, **PROBLEMS[op].ends | way)
        self.check(ranks, 2, tried, sample.of(self.configs(ranks, 2, tried)[:7]))

    @pytest.mark.soak
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_many_drawn_configs_are_right(self, ranks, op, variant, way, world_size):
        tried = case(op, variant, **PROBLEMS[op].drawn | way)
        self.check(ranks, world_size, tried, self.configs(ranks, world_size, tried)[:60])

    @staticmethod
    def configs(ranks, world_size, tried):
        found = ranks.run(world_size, f"{TASKS}:extreme_configs", case=tried)[0]
        assert len(found) >= 2
        return found

    @staticmethod
    def check(ranks, world_size, tried, configs):
        cases = [replace(tried, config=config) for config in configs]
        assert complaints(ranks, world_size, cases) == []


class TestTilesOfBoxes:
    def test_what_the_tma_loads_is_right_beyond_the_ends_of_matrices(self, ranks):
        size = {"m": 34, "k": 40}
        cases = [
            case(ALL_REDUCE, name, {"TMA": True}, **size, n=40, weight_layout=layout, bias=True)
            for name, layout in (
                ("push", "nk"),
                ("push", "kn"),
                ("push_in_place", "kn"),
                ("push_lamport", "nk"),
                ("push_two_shot", "kn"),
            )
        ]
        cases += [
            case(SCATTER, "push", {"TMA": True}, **size, n=48, **way, weight_layout=layout)
            for way in ways(SCATTER, "push")
            for layout in ("nk", "kn")
        ]
        assert complaints(ranks, 2, cases) == []


class TestEightRanks:
    def test_variants_are_right_also_where_ranks_have_nothing(self, ranks, sample):
        """Eight ranks share few cores: one small problem each way."""
        cases = [
            case(op, variant, **PROBLEMS[op].crowd | way)
            for op, variant in sample.of(SERVED)
            for way in ways(op, variant)
        ]
        assert complaints(ranks, 8, cases, random_data=False) == []


class TestBackToBack:
    @pytest.mark.dealt("op")
    @pytest.mark.parametrize(("op", "variant"), OURS)
    def test_calls_without_a_barrier_see_only_their_own_inputs(self, ranks, op, variant):
        """Also where generations cross the wrap of 32 bits; slots and turns come round twice."""
        of_ways = [tiny(op, variant, way, 3) for way in ways(op, variant)]
        cases = [each for each in of_ways for _ in range(6 // len(of_ways))]
        run = {"generations": len(cases), "first_generation": 2**31 - 4}
        assert back_to_back(ranks, 3, cases, **run) == []

    @pytest.mark.soak
    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize(("op", "variant"), OURS)
    def test_many_schedules(self, ranks, op, variant, seed):
        cases = [tiny(op, variant, way, 3) for way in ways(op, variant)]
        assert back_to_back(ranks, 3, cases, generations=60, seed=seed) == []

    @on_every_fabric
    @pytest.mark.dealt("op")
    @pytest.mark.parametrize("op", operation_names())
    def test_variants_take_turns_on_one_pool_also_with_another_operation(self, ranks, op):
        world_size = ranks.several
        other = tiny(GATHER if op != GATHER else ALL_REDUCE, "push", {}, world_size)
        cases = [
            tiny(op, name, way, world_size) for name in served_names(op) for way in ways(op, name)
        ]
        if op == ALL_REDUCE:
            cases += [case(op, name, **PROBLEMS[op].tiny, rms_norm=True) for name in NORMALISING]
        if op == DECODE:
            cases += [case(op, *tried, **PROBLEMS[op].tiny) for tried in WORDS]
        turns = [turn for each in cases for turn in (each, other)]
        run = {"generations": len(turns), "first_generation": 2**31 - 5}
        assert back_to_back(ranks, world_size, turns, **run) == []


#: two chunks, and parts of K
IN_PARTS = {
    "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP_M": 1, "SPLIT_K": 4, "SWAP_AB": False,
    "SOURCES_PER_WAIT": 1, "CHUNKS": 2, "SENDERS": 1, "SEND_BLOCK": 1024,
}  # fmt: skip
REPEATED = [
    (op, name, IN_PARTS if op == GATHER and name != "push_specialized" else None)
    for op, name in OURS
]  # warps with roles have other tiles
REPEATED += [(DECODE, *tried) for tried in WORDS]


@on_every_fabric
@pytest.mark.dealt("op")
@pytest.mark.parametrize(("op", "variant", "config"), REPEATED)
def test_results_repeat_bit_for_bit(ranks, op, variant, config):
    fields = PROBLEMS[op].repeated | ways(op, variant)[-1]
    if op == ALL_REDUCE and variant in NORMALISING:
        fields |= {"rms_norm": True}
    run = {"case": case(op, variant, config, **fields), "calls": 3}
    found = ranks.run(ranks.several, f"{TASKS}:bits_of_calls", **run)
    assert all(len(set(calls)) == 1 for calls in found)
    assert op not in REPLICATED or len({bits for calls in found for bits in calls}) == 1
