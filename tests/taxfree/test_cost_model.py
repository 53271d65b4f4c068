"""The cost model: its formulas, and how far it is from what was measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from taxfree import cost_model
from taxfree.cost_model import H200, MACHINES, modelled, modelled_variants, times
from taxfree.errors import UsageError
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import variants

ROOT = Path(__file__).parents[2]
PROBLEM = AllGatherMatmul(m=256, n=3584, k=8192, world_size=8)
PUSH = variants("all_gather_matmul")["push"].first_configs(PROBLEM, H200.hardware)[0]
PROBLEMS = {
    "all_gather_matmul": PROBLEM,
    "matmul_all_reduce": MatmulAllReduce(m=256, n=8192, k=3584, world_size=8),
    "matmul_reduce_scatter": MatmulReduceScatter(m=256, n=8192, k=3584, world_size=8),
    "flash_decode": FlashDecode(1, 96, 12, 128, 32768, world_size=8),
}
MODELLED = [(op, name) for op in PROBLEMS for name in modelled_variants(op)]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        narrow, wide = (cost_model.matmul_us(H200, 1, n, 1 << 20) for n in (64 * 65, 64 * 66))
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
            cost_model.tiles_us(H200, each, config, tma=False) for each in (full, more)
        )
        assert one == wave
        assert two == pytest.approx(2 * one, rel=0.01)

    def test_what_tma_loads_comes_faster(self):
        config = {**PUSH, "BLOCK_M": 64, "BLOCK_N": 64}
        by_threads, by_tma = (
            cost_model.tiles_us(H200, PROBLEM, config, tma=tma)[0] for tma in (False, True)
        )
        assert by_threads / by_tma == pytest.approx(H200.tma_bytes_per_s / H200.loads_bytes_per_s)

    def test_a_sender_has_a_block_under_way_at_a_time(self):
        narrow_link = cost_model.exchange_us(H200, 357e3, 0.0, 1)
        assert narrow_link == pytest.approx(H200.signal_us + 1.0)
        one_sender = cost_model.exchange_us(H200, 0.0, 100.0, 10, rounds=3)
        assert one_sender == pytest.approx(H200.signal_us + 30 * H200.round_trip_us)

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

    def test_parts_hide_the_latency_of_all_sums_but_the_last(self):
        problem = PROBLEMS["matmul_all_reduce"]
        config = {"CHUNKS": 32, "SEND_BLOCK": 8192, "num_warps": 8}
        whole, parts = (
            times(H200, problem, name, config | {"PARTS": count})
            for name, count in (("two_shot", 1), ("overlap", 4))
        )
        assert (whole.kernels, parts.kernels) == (2, 8)
        assert [piece.latency_us > 0 for piece in parts.pieces[1::2]] == [False] * 3 + [True]

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
        config = variants(op)[variant].first_configs(problem, H200.hardware)[0]
        account = modelled(machine, problem, variant, config).account
        assert all(part.method.startswith("modelled: ") for part in account.parts)
        assert all(part.iqr_us is None for part in account.parts)
        known = account.t_bound_us + sum(part.us for part in account.parts)
        assert known + account.residual_us == pytest.approx(account.t_eager_us)
        assert not account.is_below_bound()


class TestError:
    def test_the_median_on_rows_that_nothing_was_fitted_to_is_below_20_percent(
        self,
    ):
        errors = script("model_error")
        measured = errors.rows()
        held_out = [row for row in measured if not errors.is_fitted(row)]
        assert len(held_out) > len(measured) / 2
        found = errors.held_out_errors(H200, measured)
        assert found.keys() == PROBLEMS.keys()
        assert max(found.values()) <= 0.2

    def test_the_table_says_what_the_result_files_say(self):
        errors = script("model_error")
        text = errors.DOCUMENT.read_text()
        table = re.search(r"<!-- model error -->\n\n(.*?)\n<!--", text, re.DOTALL)[1]
        assert table == errors.table(H200, errors.rows())
