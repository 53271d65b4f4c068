"""flash_decode on real ranks: every variant, whatever the problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ranks import on_every_fabric, variant_names

OP = "flash_decode"
TASKS, DECODE_TASKS = "tests.kernels.tasks", "tests.kernels.decode_tasks"
LIBRARY = ("baseline", "library")
VARIANTS = variant_names(OP)
EXCHANGING = [name for name in VARIANTS if name not in LIBRARY]
#: variants that push flag-in-data words if told to
WORDS = [
    (name, {"IN_DATA": True, "PACKED": packed})
    for name in ("fused", "persistent")
    for packed in (False, True)
]

SMALL = {"batch": 2, "q_heads": 3, "kv_heads": 1, "head_dim": 16, "kv_len_per_rank": 20}
#: what a problem can differ in; each is also ragged somewhere
KINDS = [
    {"dtype": "bfloat16", "q_heads": 6, "kv_heads": 2},
    {"q_heads": 2, "kv_heads": 2, "v_head_dim": 24, "soft_cap": True},
    {"q_heads": 18, "head_dim": 20, "window": 25, "batch": 1},
    {"page_size": 1, "kv_len_per_rank": 17, "window": 3},
    {"page_size": 7, "batch": 3, "dtype": "bfloat16"},
    {"page_size": 16, "soft_cap": True, "window": 40},
]


def case(variant, config=None, **fields):
    from tests.kernels.tasks import Case

    return Case(variant, SMALL | fields, config, op=OP)


def complaints(ranks, world_size, cases, **options):
    found = ranks.run(world_size, f"{TASKS}:complaints", cases=cases, **options)
    return [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]


class TestReference:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_the_softmax_over_what_the_ranks_hold(self, ranks, kind):
        found = ranks.run(2, f"{DECODE_TASKS}:reference_error", case=case("baseline", **kind))
        assert max(found) < 1e-12


class TestOneRank:
    def test_the_library_paths_are_right_without_a_collective(self, ranks):
        assert complaints(ranks, 1, [case(name, **KINDS[0]) for name in LIBRARY]) == []


@on_every_fabric
class TestEveryVariant:
    def test_one_is_right_for_every_kind_of_problem(self, ranks):
        """All variants call the same function on their keys: one stands for them."""
        assert complaints(ranks, 2, [case("persistent", **kind) for kind in KINDS]) == []

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_is_right_on_several_ranks(self, ranks, variant):
        assert complaints(ranks, ranks.several, [case(variant)]) == []

    @pytest.mark.parametrize("variant", ["library", "fused", "persistent"])
    def test_lengths_are_read_at_each_call(self, ranks, variant):
        """The others launch the same splits, and merge them with what these merge them with."""
        lengths = [[[20, 3], [0, 20]], [[1, 0], [19, 0]], [[0, 0], [0, 0]]]
        run = {"case": case(variant), "lengths": lengths}
        assert ranks.run(2, f"{DECODE_TASKS}:lengths_change", **run) == [[], []]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "baseline"])
class TestConfigs:
    def test_the_ends_of_the_space_are_right(self, ranks, variant):
        tried = case(variant, q_heads=10, kv_heads=2, batch=1)
        configs = ranks.run(2, f"{TASKS}:extreme_configs", case=tried)[0][:2]
        cases = [replace(tried, config=config) for config in configs]
        assert complaints(ranks, 2, cases, random_data=False) == []


class TestEightRanks:
    def test_exchanging_variants_are_right(self, ranks):
        """Eight ranks share few cores: one small problem, of fewer rows than ranks."""
        cases = [case(name, batch=1) for name in ("persistent", "two_shot")]
        assert complaints(ranks, 8, cases, random_data=False) == []


@on_every_fabric
class TestBackToBack:
    """The checker tries many orders of each variant; here all share a pool of real memory."""

    def test_variants_take_turns_without_a_barrier_while_generations_cross_32_bits(self, ranks):
        cases = [case(name, batch=1) for name in EXCHANGING]
        cases += [case(*tried, batch=1) for tried in WORDS]
        run = {"cases": cases, "generations": 2 * len(cases), "first_generation": 2**31 - 5}
        found = ranks.run(ranks.several, f"{TASKS}:back_to_back", **run)
        assert [text for texts in found for text in texts] == []

    @pytest.mark.parametrize("tried", [*((name, {}) for name in EXCHANGING), *WORDS], ids=str)
    def test_all_ranks_have_the_same_bits_each_time(self, ranks, tried):
        run = {"case": case(*tried), "calls": 2}
        bits = ranks.run(2, f"{TASKS}:bits_of_calls", **run)
        assert len({each for calls in bits for each in calls}) == 1
