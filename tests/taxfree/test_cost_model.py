"""The cost model: its formulas, and how far it is from what was measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from taxfree import cost_model
from taxfree.cost_model import H200, MACHINES, modelled, times
from taxfree.errors import UsageError
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.variant import variants

ROOT = Path(__file__).parents[2]
PROBLEM = AllGatherMatmul(m=256, n=3584, k=8192, world_size=8)
PUSH = variants("all_gather_matmul")["push"].first_configs(PROBLEM, H200.hardware)[0]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestFormulas:
    def test_the_gemm_is_a_roofline_behind_its_start(self):
        flops = 2 * PROBLEM.m * PROBLEM.n * PROBLEM.k / H200.flops_per_s * 1e6
        assert cost_model.gemm_us(H200, PROBLEM) == pytest.approx(H200.gemm_start_us + flops)
        few_rows = dataclasses.replace(PROBLEM, m=1)
        memory = few_rows.cost.memory_bytes / H200.memory_bytes_per_s * 1e6
        assert cost_model.gemm_us(H200, few_rows) == pytest.approx(H200.gemm_start_us + memory)

    def test_a_faster_link_shortens_the_transfer_alone(self):
        double = 2 * H200.collective_bytes_per_s
        fast = dataclasses.replace(H200, collective_bytes_per_s=double)
        before, after = (times(each, PROBLEM, "baseline", {}) for each in (H200, fast))
        transfer = before.collective_us - before.latency_us
        assert before.t_graph_us - after.t_graph_us == pytest.approx(transfer / 2)
        assert after.copies_us == before.copies_us

    def test_tiles_beyond_a_wave_take_another(self):
        config = {**PUSH, "BLOCK_M": 128, "BLOCK_N": 128, "SPLIT_K": 1}
        resident = round(H200.resident * H200.hardware.compute_units)
        full = dataclasses.replace(PROBLEM, m=128, n=128 * resident)
        more = dataclasses.replace(full, n=full.n + 128)
        (one, wave), (two, _) = (cost_model._tiles_us(H200, each, config) for each in (full, more))
        assert one == wave
        assert two == pytest.approx(2 * one, rel=0.01)

    def test_eager_calls_take_what_the_host_takes(self):
        slow_host = dataclasses.replace(H200, host_call_us=1000.0)
        found = times(slow_host, PROBLEM, "push", PUSH)
        assert found.t_eager_us == 1000.0 + H200.host_kernel_us
        assert found.t_graph_us == times(H200, PROBLEM, "push", PUSH).t_graph_us

    def test_re_layout_is_for_columns_of_several_rows_only(self):
        for fields, copies in (({}, 1), ({"gather_dim": 0}, 0), ({"m": 1}, 0),
                               ({"gather_dim": 0, "m": 257}, 1)):  # fmt: skip
            found = times(H200, dataclasses.replace(PROBLEM, **fields), "baseline", {})
            assert found.kernels == 2 + copies
            assert (found.copies_us > 0) == bool(copies)

    def test_what_has_no_model_is_refused(self):
        with pytest.raises(UsageError, match="no cost model of another"):
            times(H200, PROBLEM, "another", {})
        with pytest.raises(UsageError, match="no cost model for 'b200'"):
            cost_model.machine("b200")


class TestAccounts:
    @pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
    @pytest.mark.parametrize("variant", cost_model.VARIANTS)
    def test_the_parts_sum_and_each_says_that_it_is_modelled(self, machine, variant):
        config = PUSH if variant not in ("baseline", "registered") else {}
        account = modelled(machine, PROBLEM, variant, config).account
        assert all(part.method.startswith("modelled: ") for part in account.parts)
        assert all(part.iqr_us is None for part in account.parts)
        known = account.t_bound_us + sum(part.us for part in account.parts)
        assert known + account.residual_us == pytest.approx(account.t_eager_us)
        assert not account.is_below_bound()


class TestError:
    def test_the_median_on_rows_that_nothing_was_fitted_to_is_below_20_percent(self):
        model_error = script("model_error")
        measured = model_error.rows()
        held_out = [row for row in measured if not model_error.is_fitted(row)]
        assert len(held_out) > len(measured) / 2
        assert model_error.held_out_error(H200, measured) <= 0.2

    def test_the_table_says_what_the_result_files_say(self):
        model_error = script("model_error")
        text = model_error.DOCUMENT.read_text()
        table = re.search(r"<!-- model error -->\n\n(.*?)\n<!--", text, re.DOTALL)[1]
        assert table == model_error.table(H200, model_error.rows())
