"""The cost model: its formulas, and accounts made from them."""

from __future__ import annotations

import dataclasses

import pytest

from taxfree.errors import UsageError
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.attention.problem import Attention
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import variants
from taxfree_tune import cost_model
from taxfree_tune.cost import pieces
from taxfree_tune.cost.machines import H200, MACHINES
from taxfree_tune.cost_model import modelled, modelled_variants, times

PROBLEM = AllGatherMatmul(m=256, n=3584, k=8192, world_size=8)
PROBLEMS = {
    "all_gather_matmul": PROBLEM,
    "matmul_all_reduce": MatmulAllReduce(m=64, n=8192, k=3584, world_size=8),
    "matmul_reduce_scatter": MatmulReduceScatter(m=256, n=8192, k=3584, world_size=8),
    "flash_decode": FlashDecode(1, 96, 12, 128, 32768, world_size=8),
    "attention": Attention(1, 32768, 64, 8, 128, world_size=8),
}
MODELLED = [(op, name) for op in PROBLEMS for name in modelled_variants(op)]


def collective_of(machine, problem, variant):
    pieces = times(machine, problem, variant).pieces
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
        narrow, wide = (
            pieces.product_us(H200, dataclasses.replace(PROBLEM, m=1, n=n, k=1 << 20))
            for n in (64 * 65, 64 * 66)
        )
        assert narrow + 0.9 * H200.split_us > wide * 65 / 66

    @pytest.mark.parametrize("m", [1, 4096])
    def test_fp8_is_read_and_multiplied_in_half_the_time(self, m):
        wide = MatmulAllReduce(m, 8192, 14336, "bfloat16", 2)
        fp8 = dataclasses.replace(wide, x_dtype="fp8", scales="tensor")
        start = H200.matmul_start_us
        of_both = [cost_model.vendor_us(H200, problem) - start for problem in (fp8, wide)]
        assert of_both[0] == pytest.approx(of_both[1] / 2, rel=0.1)
        bounds = [cost_model.bounds_of(H200, problem) for problem in (fp8, wide)]
        assert bounds[0].t_floor_us == pytest.approx(bounds[1].t_floor_us / 2, rel=0.1)

    def test_the_library_sends_16_bits_where_fp8_may_travel(self):
        problem = MatmulAllReduce(4096, 8192, 14336, "bfloat16", 2)
        permitted = dataclasses.replace(problem, fp8_wire=True)
        assert times(H200, permitted, "baseline") == times(H200, problem, "baseline")
        links = [cost_model.bounds_of(H200, each).t_link_us for each in (permitted, problem)]
        assert links[0] == pytest.approx(links[1] * 3 / 4)

    def test_a_faster_library_shortens_the_transfer_alone(self):
        double = 2 * H200.collective_bytes_per_s
        fast = dataclasses.replace(H200, collective_bytes_per_s=double)
        before, after = (times(each, PROBLEM, "baseline") for each in (H200, fast))
        collective = collective_of(H200, PROBLEM, "baseline")
        transfer = collective.us - collective.latency_us
        assert before.t_graph_us - after.t_graph_us == pytest.approx(transfer / 2)

    def test_eager_calls_take_what_the_host_takes(self):
        slow_host = dataclasses.replace(H200, host_call_us=1000.0)
        by_rows = dataclasses.replace(PROBLEM, gather_dim=0)
        found = times(slow_host, by_rows, "baseline")
        assert found.t_eager_us == pytest.approx(1000.0 + H200.host_collective_us + H200.host_op_us)
        assert found.t_graph_us == times(H200, by_rows, "baseline").t_graph_us

    def test_re_layout_is_for_columns_of_several_rows_only(self):
        for fields, copies in (({}, 1), ({"gather_dim": 0}, 0), ({"m": 1}, 0),
                               ({"gather_dim": 0, "m": 257}, 1)):  # fmt: skip
            found = times(H200, dataclasses.replace(PROBLEM, **fields), "baseline")
            kinds = [piece.kind for piece in found.pieces]
            assert kinds.count("copy") == copies
            assert found.kernels == 2 + copies

    @pytest.mark.parametrize("variant", ["baseline", "registered"])
    def test_the_library_adds_a_residual_by_itself(self, variant):
        problem = PROBLEMS["matmul_all_reduce"]
        without, added = (
            times(H200, dataclasses.replace(problem, residual=residual), variant)
            for residual in (False, True)
        )
        assert added.kernels == without.kernels + (variant != "registered")
        assert added.t_graph_us > without.t_graph_us

    @pytest.mark.parametrize("op", PROBLEMS)
    def test_the_librarys_path_has_a_model_and_all_that_have_exist(self, op):
        assert {"baseline"} <= set(modelled_variants(op)) <= set(variants(op))

    def test_what_has_no_model_is_refused(self):
        with pytest.raises(UsageError, match="no cost model of push of all_gather_matmul"):
            times(H200, PROBLEM, "push")
        with pytest.raises(UsageError, match="no cost model for 'b200'"):
            cost_model.machine("b200")


class TestAccounts:
    @pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
    @pytest.mark.parametrize(("op", "variant"), MODELLED)
    def test_the_parts_sum_and_each_says_that_it_is_modelled(self, machine, op, variant):
        problem = PROBLEMS[op]
        account = modelled(machine, problem, variant)
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
            assert times(H200, alone, name).t_graph_us > 0
