"""flash_decode on real ranks of the host fabric: every variant, whatever the problem."""

from __future__ import annotations

import pytest

from tests.ranks import variant_names

TASKS = "tests.kernels.decode_tasks"
VARIANTS = variant_names("flash_decode")
EXCHANGING = [name for name in VARIANTS if name not in ("baseline", "library")]

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
    from tests.kernels.decode_tasks import Case

    return Case(variant, SMALL | fields, config)


def complaints(ranks, world_size, cases, **options):
    found = ranks.run(world_size, f"{TASKS}:complaints", cases=cases, **options)
    return [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]


class TestReference:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_the_softmax_over_what_the_ranks_hold(self, ranks, kind):
        for error in ranks.run(2, f"{TASKS}:reference_error", case=case("baseline", **kind)):
            assert error < 1e-12


class TestOneRank:
    def test_the_library_paths_are_right_without_a_collective(self, ranks):
        cases = [case(name, **KINDS[0]) for name in ("baseline", "library")]
        assert complaints(ranks, 1, cases) == []


class TestEveryVariant:
    @pytest.mark.parametrize("kind", KINDS)
    def test_one_is_right_for_every_kind_of_problem(self, ranks, kind):
        """All variants call the same function on their keys: one stands for them."""
        assert complaints(ranks, 2, [case("persistent", **kind)]) == []

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_is_right_on_three_ranks(self, ranks, variant):
        assert complaints(ranks, 3, [case(variant)]) == []

    @pytest.mark.parametrize("variant", ["library", "fused", "persistent"])
    def test_lengths_are_read_at_each_call(self, ranks, variant):
        """The others launch the same splits, and merge them with what these merge them with."""
        lengths = [[[20, 3], [0, 20]], [[1, 0], [19, 0]], [[0, 0], [0, 0]]]
        found = ranks.run(2, f"{TASKS}:lengths_change", case=case(variant), lengths=lengths)
        assert found == [[], []]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "baseline"])
class TestConfigs:
    def test_the_ends_of_the_space_are_right(self, ranks, variant):
        from taxfree_kernels.hardware import KNOWN
        from taxfree_kernels.variant import variants

        fields = SMALL | {"q_heads": 10, "kv_heads": 2, "batch": 1}
        problem = case(variant, **fields).problem(2)
        space = variants("flash_decode")[variant].space(problem, KNOWN["cpu"])
        ends = [{knob: values[end] for knob, values in space.items()} for end in (0, -1)]
        cases = [case(variant, config, **fields) for config in ends]
        assert complaints(ranks, 2, cases, random_data=False) == []


class TestEightRanks:
    def test_exchanging_variants_are_right(self, ranks):
        """Eight ranks share few cores: one small problem, of fewer rows than ranks."""
        cases = [case(name, batch=1) for name in ("persistent", "two_shot")]
        assert complaints(ranks, 8, cases, random_data=False) == []


class TestBackToBack:
    """The checker tries many orders of each variant; here all share a pool of real memory."""

    def test_variants_take_turns_without_a_barrier_while_generations_cross_32_bits(self, ranks):
        cases = [case(name, batch=1) for name in EXCHANGING]
        run = {"cases": cases, "generations": 2 * len(cases), "first_generation": 2**31 - 3}
        found = ranks.run(3, f"{TASKS}:back_to_back", **run)
        assert [text for texts in found for text in texts] == []

    @pytest.mark.parametrize("variant", ["fused", "persistent", "two_shot"])
    def test_results_repeat_bit_for_bit(self, ranks, variant):
        bits = ranks.run(2, f"{TASKS}:bits_of_calls", case=case(variant), calls=2)
        assert len({each for calls in bits for each in calls}) == 1
