"""Problems and spaces of flash_decode, without ranks."""

from __future__ import annotations

import pytest
import torch

from taxfree_check.cross_compile.record import record
from taxfree_kernels.device.peers import CHANNELS
from taxfree_kernels.errors import PlanError
from taxfree_kernels.flash_decode import spaces
from taxfree_kernels.flash_decode.operation import make_inputs, reference
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.flash_decode.spaces import chunk_rows
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import variants
from tests.ranks import variant_names

CPU = torch.device("cpu")
NAMES = variant_names("flash_decode")
PROBLEMS = [
    FlashDecode(batch, 96, 12, 128, kv_len, world_size=8)
    for batch in (1, 8, 64)
    for kv_len in (1, 8192, 1 << 19)
] + [
    FlashDecode(1, 1, 1, 16, 5, world_size=2),
    FlashDecode(3, 10, 2, 70, 999, page_size=5, world_size=2),
    FlashDecode(2, 64, 1, 256, 1 << 14, page_size=64, soft_cap=True, window=4096, world_size=4),
    FlashDecode(4, 32, 32, 64, 1 << 13, v_head_dim=256, world_size=4),
]


def problem(**fields):
    whole = {"batch": 2, "q_heads": 6, "kv_heads": 2, "head_dim": 64, "kv_len_per_rank": 100}
    return FlashDecode(**whole | {"world_size": 4} | fields)


class TestProblem:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"batch": 0}, "batch is 0"),
            ({"kv_len_per_rank": 0}, "kv_len_per_rank is 0"),
            ({"head_dim": 8}, "head_dim is 8, must be from 16 to 256"),
            ({"v_head_dim": 512}, "v_head_dim is 512"),
            ({"q_heads": 5}, "q_heads=5 is not divisible by kv_heads=2"),
            ({"page_size": -1}, "page_size is -1"),
            ({"window": -1}, "window is -1"),
            ({"dtype": "float32"}, "float32 is not one of"),
        ],
    )
    def test_impossible_dimensions_are_refused(self, fields, message):
        with pytest.raises(PlanError, match=message):
            problem(**fields)

    def test_the_head_dim_of_values_is_that_of_keys_unless_given(self):
        assert problem().v_head_dim == 64
        assert problem() == problem(v_head_dim=64)
        assert problem(v_head_dim=32).v_head_dim == 32

    def test_the_cost_counts_the_cache_once_and_each_row_in_two_shots(self):
        cost = problem().cost
        assert cost.flops == 2 * 12 * 100 * 128
        assert cost.memory_bytes == 2 * (2 * 100 * 2 * 128 + 12 * 128)
        assert cost.link_bytes == 3 * (12 // 4) * ((2 * 64 + 4) + 2 * 64)

    def test_keys_before_the_window_cost_nothing(self):
        assert problem(window=10).cost.flops == problem(kv_len_per_rank=10).cost.flops

    @pytest.mark.parametrize("tried", PROBLEMS, ids=str)
    def test_a_slot_holds_a_part_of_every_rank(self, tried):
        rows = tried.batch * tried.q_heads
        assert tried.part_elements >= rows * (tried.v_head_dim + 1)
        assert tried.part_elements % 64 == 0  # each part starts aligned
        assert tried.slot_bytes >= 4 * tried.world_size * tried.part_elements


class TestInputs:
    @pytest.mark.parametrize("page_size", [0, 1, 7])
    def test_integers_have_lengths_of_all_kinds(self, page_size):
        tried = problem(page_size=page_size, kv_len_per_rank=20)
        lengths = torch.stack([make_inputs(tried, 0, s, CPU, integers=True)[3] for s in range(9)])
        assert lengths.shape == (9, 4, 2)
        assert {0, 20} < set(lengths.flatten().tolist())
        assert (lengths.sum(1) == 0).any()  # a sequence that is empty on every rank

    def test_random_numbers_fill_the_cache(self):
        assert (make_inputs(problem(), 1, 3, CPU)[3] == 100).all()

    @pytest.mark.parametrize("fields", [{}, {"page_size": 3}, {"window": 30}, {"soft_cap": True}])
    def test_a_result_of_integers_is_the_value_of_one_key(self, fields):
        tried = problem(**fields)
        for seed in range(4):
            out = reference(tried, 0, seed, CPU, integers=True)
            assert set(out.round(decimals=12).flatten().tolist()) <= {-1.0, 0.0, 1.0}

    def test_queries_and_lengths_are_replicated_and_caches_are_not(self):
        first, second = (make_inputs(problem(), rank, 5, CPU, integers=True) for rank in (0, 1))
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[3], second[3])
        assert not torch.equal(first[1], second[1])
        assert not torch.equal(first[2], second[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", KNOWN)
class TestSpaces:
    @pytest.mark.parametrize("tried", PROBLEMS, ids=str)
    def test_first_configs_lie_in_the_space_and_are_not_refused(self, name, device, tried):
        variant, hardware = variants("flash_decode")[name], KNOWN[device]
        space, first = variant.space(tried, hardware), variant.seed_configs(tried, hardware)
        assert first
        assert all(len(set(values)) == len(values) > 0 for values in space.values())
        for config in first:
            assert config.keys() == space.keys()
            assert all(config[parameter] in values for parameter, values in space.items()), config
            assert variant.illegal_reason(tried, hardware, config) is None, config


@pytest.mark.parametrize("tried", PROBLEMS, ids=str)
def test_chunks_of_rows_have_a_channel_each(tried):
    space = spaces.push_space(tried, KNOWN["h200"])
    for rows in space["ROWS"]:
        for chunks in space["CHUNKS"]:
            config = {"ROWS": rows, "CHUNKS": chunks}
            found = chunk_rows(tried, config)
            assert found % rows == 0
            assert -(-tried.rows // found) <= chunks <= CHANNELS


@pytest.mark.parametrize(("name", "world_size"), [("fused", 8), ("splits", 1)])
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_either_kernel_is_launched_early_if_the_config_says_so(name, world_size, chained, early):
    tried, hardware = FlashDecode(1, 96, 12, 128, 8192, world_size=world_size), KNOWN["h200"]
    config = variants("flash_decode")[name].seed_configs(tried, hardware)[0]
    config |= {"launch_pdl": early, "CHAINED": chained}
    launches = record("flash_decode", name, tried, config, hardware)
    options = [launch.kernel.options.get("launch_pdl", False) for launch in launches]
    assert options == [chained, early]


def test_only_a_call_alone_or_of_two_kernels_is_launched_early():
    """The library's path of several ranks stays that of an expert without our kernels."""
    hardware = KNOWN["h200"]
    spaces_of = {
        (name, world_size): variants("flash_decode")[name].space(
            FlashDecode(1, 96, 12, 128, 8192, world_size=world_size), hardware
        )
        for name, world_size in (("splits", 1), ("splits", 2), ("fused", 2), ("persistent", 2))
    }
    early = {key for key, space in spaces_of.items() if "CHAINED" in space}
    assert early == {("splits", 1), ("fused", 2)}


@pytest.mark.parametrize("waves", [1, 2, 4])
def test_splits_fill_the_compute_units_a_whole_number_of_times(waves):
    splits = spaces.splits_of(FlashDecode(1, 96, 12, 128, 1 << 15), KNOWN["h200"], waves)
    assert 12 * splits == 132 * waves
