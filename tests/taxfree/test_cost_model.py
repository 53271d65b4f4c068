"""The cost model: its formulas, and how far it is from what was measured."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import Counter

import pytest

from benchmarks import model_error as errors
from taxfree import cost_model
from taxfree.cost_model import H200, MACHINES, modelled, modelled_variants, times
from taxfree.errors import UsageError
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.cost import pieces
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import variants

PROBLEM = AllGatherMatmul(m=256, n=3584, k=8192, world_size=8)
COPIES = {"CHUNKS": 1, "CHUNKS_PER_WAIT": 4, "STREAMS": 2}
TMA = {"CHUNKS": 16, "SEND_BLOCK": 16384, "K_PARTS": 1, "SOURCES_PER_WAIT": 8}
PUSH = variants("all_gather_matmul")["push"].seed_configs(PROBLEM, H200.hardware)[0]
PROBLEMS = {
    "all_gather_matmul": PROBLEM,
    "matmul_all_reduce": MatmulAllReduce(m=64, n=8192, k=3584, world_size=8),
    "matmul_reduce_scatter": MatmulReduceScatter(m=256, n=8192, k=3584, world_size=8),
    "flash_decode": FlashDecode(1, 96, 12, 128, 32768, world_size=8),
    "attention": Attention(1, 32768, 64, 8, 128, world_size=8),
}
MODELLED = [(op, name) for op in PROBLEMS for name in modelled_variants(op)]


def collective_of(machine, problem, variant, config):
    pieces = times(machine, problem, variant, config).pieces
    return next(piece for piece in pieces if piece.kind == "collective")


class TestFormulas:
    def test_the_matmul_is_a_roofline_behind_its_start(self):
        machine = dataclasses.replace(H200, split_us=0.0)
        flops = 2 * PROBLEM.m * PROBLEM.n * PROBLEM.k / H200.flops_per_s * 1e6
        found = cost_model.vendor_us(machine, PROBLEM)
        assert found == pytest.approx(H200.matmul_start_us + flops)
        few_rows = dataclasses.replace(PROBLEM, m=1)
        memory = few_rows.cost.memory_bytes / H200.memory_bytes_per_s * 1e6
        found = cost_model.vendor_us(machine, few_rows)
        assert found == pytest.approx(H200.matmul_start_us + memory)

    def test_a_matmul_of_few_tiles_splits_k(self):
        narrow, wide = (pieces.matmul_us(H200, 1, n, 1 << 20) for n in (64 * 65, 64 * 66))
        assert narrow + 0.9 * H200.split_us > wide * 65 / 66

    def test_a_faster_library_shortens_the_transfer_alone(self):
        double = 2 * H200.collective_bytes_per_s
        fast = dataclasses.replace(H200, collective_bytes_per_s=double)
        before, after = (times(each, PROBLEM, "baseline", {}) for each in (H200, fast))
        collective = collective_of(H200, PROBLEM, "baseline", {})
        transfer = collective.us - collective.latency_us
        assert before.t_graph_us - after.t_graph_us == pytest.approx(transfer / 2)

    def test_tiles_beyond_a_wave_take_another(self):
        config = {**PUSH, "BLOCK_M": 128, "BLOCK_N": 128, "SPLIT_K": 1}
        units = H200.hardware.compute_units
        full = dataclasses.replace(PROBLEM, m=128, n=128 * units)
        more = dataclasses.replace(full, n=full.n + 128)
        (one, wave), (two, _) = (
            pieces.tiles_us(H200, each, config, tma=False) for each in (full, more)
        )
        assert one == wave
        assert two == pytest.approx(2 * one, rel=0.01)

    def test_what_tma_loads_comes_faster(self):
        config = {**PUSH, "BLOCK_M": 64, "BLOCK_N": 64}
        by_threads, by_tma = (
            pieces.tiles_us(H200, PROBLEM, config, tma=tma)[0] for tma in (False, True)
        )
        assert by_threads / by_tma == pytest.approx(H200.tma_bytes_per_s / H200.loads_bytes_per_s)

    def test_a_sender_has_a_block_under_way_at_a_time(self):
        narrow_link = pieces.exchange_us(H200, H200.link_bytes_per_s * 1e-6, 0.0, 1)
        assert narrow_link == pytest.approx(H200.signal_us + 1.0)
        one_block = pieces.exchange_us(H200, 0.0, 10.0, 10)
        assert one_block == H200.signal_us
        one_sender = pieces.exchange_us(H200, 0.0, 100.0, 10, rounds=3)
        assert one_sender == pytest.approx(H200.signal_us + 29 * H200.round_trip_us)

    def test_a_second_wave_of_rows_hides_what_it_waits_for(self):
        problem = AllGatherMatmul(m=1024, n=3584, k=8192, gather_dim=0, world_size=2)
        config = {**TMA, "BLOCK_M": 128, "BLOCK_N": 256, "SPLIT_K": 1, "SENDERS": 16}
        tiles, wave = pieces.tiles_us(H200, problem, config, tma=True)
        assert tiles == wave
        halves = config | {"SPLIT_K": 2}
        assert pieces.tiles_us(H200, problem, halves, tma=True)[1] < wave
        one, two = (times(H200, problem, "push_tma", each).t_graph_us for each in (config, halves))
        assert two < one

    @pytest.mark.parametrize(("gather_dim", "parameter"), [(0, "K_PARTS"), (1, "SOURCES_PER_WAIT")])
    def test_tiles_that_wait_for_one_part_after_the_other_hide_the_rest(
        self, gather_dim, parameter
    ):
        problem = AllGatherMatmul(m=1024, n=3584, k=8192, gather_dim=gather_dim, world_size=8)
        config = {**TMA, "BLOCK_M": 128, "BLOCK_N": 256, "SPLIT_K": 1, "SENDERS": 16}
        once, in_turns = (
            times(H200, problem, "push_tma", config | each).t_graph_us
            for each in ({}, {parameter: 4 if parameter == "K_PARTS" else 2})
        )
        tiles, _ = pieces.tiles_us(H200, problem, config, tma=True)
        assert tiles < in_turns < once - 15

    def test_eager_calls_take_what_the_host_takes(self):
        slow_host = dataclasses.replace(H200, host_call_us=1000.0)
        found = times(slow_host, PROBLEM, "push", PUSH)
        assert found.t_eager_us == 1000.0 + H200.host_kernel_us
        assert found.t_graph_us == times(H200, PROBLEM, "push", PUSH).t_graph_us

    def test_re_layout_is_for_columns_of_several_rows_only(self):
        for fields, copies in (({}, 1), ({"gather_dim": 0}, 0), ({"m": 1}, 0),
                               ({"gather_dim": 0, "m": 257}, 1)):  # fmt: skip
            found = times(H200, dataclasses.replace(PROBLEM, **fields), "baseline", {})
            kinds = [piece.kind for piece in found.pieces]
            assert kinds.count("copy") == copies
            assert found.kernels == 2 + copies

    @pytest.mark.parametrize(
        "problem",
        [
            AllGatherMatmul(1, 3584, 8192, gather_dim=0, world_size=2),
            MatmulReduceScatter(1, 8192, 3584, world_size=2),
        ],
        ids=["gathered", "scattered"],
    )
    def test_copy_engines_hide_behind_the_own_rows_where_those_are_many(self, problem):
        slow = dataclasses.replace(H200, engine_us=H200.engine_us + 5)
        few, many = (dataclasses.replace(problem, m=m) for m in (64, 4096))
        later = [
            times(slow, each, "overlap", COPIES).t_graph_us
            - times(H200, each, "overlap", COPIES).t_graph_us
            for each in (few, many)
        ]
        assert later == pytest.approx([5.0, 0.0])

    def test_the_last_rank_multiplies_once_where_no_rows_are_its_own(self):
        two_rows, one_row = (
            times(H200, AllGatherMatmul(m, 3584, 8192, 0, world_size=2), "overlap", COPIES)
            for m in (2, 1)
        )
        assert two_rows.kernels == one_row.kernels + 1
        assert two_rows.t_eager_us == pytest.approx(one_row.t_eager_us + H200.host_op_us)

    def test_sums_travel_behind_the_tiles_of_later_waves(self):
        variant = variants("matmul_all_reduce")["push_two_shot"]
        for m, is_faster in ((128, False), (4096, True)):
            problem = MatmulAllReduce(m, 8192, 3584, world_size=8)
            config = variant.seed_configs(problem, H200.hardware)[0]
            meanwhile, behind = (
                times(H200, problem, "push_two_shot", {**config, "AHEAD": ahead}).t_graph_us
                for ahead in (1, 64)
            )
            assert (meanwhile < behind) == is_faster

    def test_torchs_two_shots_are_for_large_sums(self):
        for m, best in ((1, 1), (1024, 2)):
            problem = MatmulAllReduce(m, 8192, 3584, world_size=8)
            found = {
                shots: times(H200, problem, "torch_symm_mem", {"SHOTS": shots}).t_graph_us
                for shots in (1, 2)
            }
            assert min(found, key=found.get) == best

    @pytest.mark.parametrize("variant", ["baseline", "registered", "torch_symm_mem"])
    def test_the_library_adds_a_residual_by_itself(self, variant):
        problem = PROBLEMS["matmul_all_reduce"]
        config = variants("matmul_all_reduce")[variant].seed_configs(problem, H200.hardware)[0]
        without, added = (
            times(H200, dataclasses.replace(problem, residual=residual), variant, config)
            for residual in (False, True)
        )
        assert added.kernels == without.kernels + (variant != "registered")
        assert added.t_graph_us > without.t_graph_us

    @pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
    def test_what_torch_composes_in_python_takes_the_host_that_much_longer(self, op):
        slow = dataclasses.replace(H200, host_composed_us=H200.host_composed_us + 1000)
        before, after = (times(each, PROBLEMS[op], "torch_fused", {}) for each in (H200, slow))
        assert after.t_eager_us == pytest.approx(before.t_eager_us + 1000)
        assert after.t_graph_us == before.t_graph_us

    @pytest.mark.parametrize("op", PROBLEMS)
    def test_every_variant_has_a_model(self, op):
        assert set(modelled_variants(op)) == set(variants(op))

    def test_what_has_no_model_is_refused(self):
        with pytest.raises(UsageError, match="no cost model of another"):
            times(H200, PROBLEM, "another", {})
        with pytest.raises(UsageError, match="no cost model for 'b200'"):
            cost_model.machine("b200")


class TestAccounts:
    @pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
    @pytest.mark.parametrize(("op", "variant"), MODELLED)
    def test_the_parts_sum_and_each_says_that_it_is_modelled(self, machine, op, variant):
        problem = PROBLEMS[op]
        if variant == "push_lamport":  # for few rows
            problem = dataclasses.replace(problem, m=16)
        config = variants(op)[variant].seed_configs(problem, H200.hardware)[0]
        account = modelled(machine, problem, variant, config).account
        assert all(part.method.startswith("modelled: ") for part in account.parts)
        assert all(part.iqr_us is None for part in account.parts)
        known = account.t_bound_us + sum(part.us for part in account.parts)
        assert known + account.residual_us == pytest.approx(account.t_eager_us)
        assert not account.is_below_bound()


class TestOneRank:
    @pytest.mark.parametrize(("op", "name"), MODELLED)
    def test_the_library_of_one_rank_is_modelled(self, op, name):
        alone = dataclasses.replace(PROBLEMS[op], world_size=1)
        if variants(op)[name].unsupported_reason(alone, H200.hardware) is None:
            (config, *_) = variants(op)[name].seed_configs(alone, H200.hardware) or [{}]
            assert times(H200, alone, name, config).t_graph_us > 0


class TestError:
    def test_the_median_on_rows_that_nothing_was_fitted_to_is_below_20_percent(self):
        measured = errors.rows()
        held_out = [each for each in measured if not each.is_fitted]
        assert len(held_out) > len(measured) / 2
        by_visit = errors.machines(H200, measured)
        for op in {each.row.op for each in measured}:
            own = [each for each in held_out if each.row.op == op]
            found = [abs(errors.error(by_visit[each.visit], each)) for each in own]
            assert statistics.median(found) <= 0.2, op

    def test_the_table_says_what_the_result_files_say(self):
        text = errors.DOCUMENT.read_text()
        found = re.search(r"<!-- model error -->\n\n(.*?)\n<!--", text, re.DOTALL)[1]
        assert found == errors.tables(H200, errors.rows())

    def test_the_host_of_a_file_is_told_by_its_fitted_rows(self):
        host = errors.Host(slowness=2.0, launches=1.5)
        slow = host.of(H200)
        assert slow.host_kernel_us == 3 * H200.host_kernel_us
        assert slow.signal_us == H200.signal_us

        def on(machine, each):
            found = times(machine, each.problem, each.row.variant, each.row.config)
            return dataclasses.replace(
                each, row=dataclasses.replace(each.row, median_us=found.t_eager_us)
            )

        measured = [each for each in errors.rows() if each.row.mode == "eager"]
        last = measured[-1].visit
        others = Counter(each.visit for each in measured if each.is_fitted and each.visit != last)
        ((first, _),) = others.most_common(1)
        rows = [
            on(slow if each.visit == first and each.is_fitted else H200, each)
            for each in measured
            if each.visit in (first, last)
        ]
        found = errors.hosts(H200, rows)
        assert found[last] == errors.Host()
        assert found[first].slowness == pytest.approx(2.0, rel=0.1)
        assert found[first].launches == pytest.approx(1.5, rel=0.1)
