"""The arithmetic of the taxes, on clocks that were made up: what was put in comes out."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from taxfree_tune.measuring.bounds import Bounds
from taxfree_tune.taxes import (
    INSIDE,
    Account,
    Alignment,
    ClockReadings,
    Part,
    StepInfo,
    accounts,
    slowest,
    stacked,
)
from tests.tune.pipelines import EPOCH_NS, Truth

BOUNDS = Bounds(t_floor_us=14.0, t_link_us=3.0, t_gemm_us=20.0)
AMOUNTS = (5.0, 20.0, 100.0)
TRUTH = Truth()


def slower(readings: ClockReadings, factors: Any) -> ClockReadings:
    """The same chain, so many times as slow, by repetition."""
    first = readings.clock_ns[:, :, :1]
    factor = np.broadcast_to(np.array(factors), first.shape[1])[None, :, None]
    return replace(readings, clock_ns=first + (readings.clock_ns - first) * factor)


def parts(truth: Truth, rank: int = 0, bounds: Bounds = BOUNDS) -> dict[str, float]:
    account = accounts(truth.measurement(), bounds)[rank]
    found = {part.name: part.us for part in account.parts}
    return found | {"residual": account.residual_us}


def changed(truth: Truth, rank: int = 0) -> dict[str, float]:
    """By how much each part differs from that of the usual pipeline."""
    before, after = parts(TRUTH, rank), parts(truth, rank)
    return {name: after[name] - before[name] for name in after}


def assert_only(found: dict[str, float], name: str, amount: float) -> None:
    """The amount is in one part, and in no other."""
    allowed = max(1.5, 0.1 * amount)
    assert found.pop(name) == pytest.approx(amount, abs=allowed)
    assert {n: us for n, us in found.items() if abs(us) > allowed} == {}


class TestKnownTaxes:
    def test_all_parts_of_the_usual_pipeline(self):
        found = parts(TRUTH)
        expected = {
            "host": 50.0, "gaps": 2.0, "skew": 0.0, "latency": 9.0, "transfer": 12.0,
            "re-layout": 4.0, "matmul": 3.0, "residual": 20.0 + 1.0 - 14.0,
        }  # fmt: skip
        assert found == pytest.approx(expected, abs=0.1)

    @pytest.mark.parametrize("amount", AMOUNTS)
    def test_a_host_delay_is_launch(self, amount):
        assert_only(changed(replace(TRUTH, host=50 + amount)), "host", amount)

    @pytest.mark.parametrize("amount", AMOUNTS)
    def test_a_chain_of_empty_kernels_is_launch(self, amount):
        kernels = 1 + int(amount / TRUTH.gap)
        assert_only(changed(replace(TRUTH, copy_kernels=kernels)), "gaps", amount)

    @pytest.mark.parametrize("amount", AMOUNTS)
    def test_a_late_rank_is_skew_of_the_others(self, amount):
        late = replace(TRUTH, late=amount)
        # The first call of a chain finds all ranks aligned.
        assert_only(changed(late, rank=0), "skew", amount * 19 / 20)
        found = changed(late, rank=2)
        assert found["skew"] == pytest.approx(0, abs=1.5)
        assert found["residual"] == pytest.approx(amount, abs=1.5)

    @pytest.mark.parametrize("amount", AMOUNTS)
    @pytest.mark.parametrize("name", ["latency", "transfer"])
    def test_a_slow_collective_is_bulk_synchronous(self, name, amount):
        slow = replace(TRUTH, **{name: getattr(TRUTH, name) + amount})
        assert_only(changed(slow), name, amount)

    def test_several_collectives_are_added_up(self):
        usual = TRUTH.measurement()
        steps = [
            replace(step, kind="collective") if step.kind == "copy" else step
            for step in usual.steps
        ]
        account = accounts(replace(usual, steps=tuple(steps)), BOUNDS)[0]
        found = {part.name: part.us for part in account.parts if part.tax == "bulk synchronous"}
        assert sum(found.values()) == pytest.approx(9.0 + 12.0 + 4.0, abs=0.1)

    @pytest.mark.parametrize("amount", AMOUNTS)
    def test_a_consumer_that_misses_the_cache_is_locality(self, amount):
        assert_only(changed(replace(TRUTH, missed=3 + amount)), "matmul", amount)

    @pytest.mark.parametrize("amount", AMOUNTS)
    def test_a_slow_consumer_is_residual(self, amount):
        assert_only(changed(replace(TRUTH, consumer=20 + amount)), "residual", amount)

    @pytest.mark.parametrize("step_ns", [32, 1000, 1024])
    @pytest.mark.parametrize("reading", [0.2, 3.0])
    def test_neither_coarse_clocks_nor_slow_readings_show(self, step_ns, reading):
        found = changed(replace(TRUTH, step_ns=step_ns, reading=reading))
        assert max(map(abs, found.values())) < 1.5

    def test_what_the_bound_has_of_the_link_is_no_tax(self):
        link_bound = Bounds(t_floor_us=14.0, t_link_us=20.0, t_gemm_us=20.0)
        found = parts(TRUTH, bounds=link_bound)
        assert found["transfer"] == pytest.approx(12.0 - 6.0, abs=0.1)
        assert found["residual"] == pytest.approx(7.0, abs=0.1)


class TestAccount:
    def test_the_parts_sum_to_the_eager_time(self):
        for account in accounts(replace(TRUTH, late=7.0).measurement(), BOUNDS):
            known = account.t_bound_us + sum(part.us for part in account.parts)
            assert known + account.residual_us == pytest.approx(account.t_eager_us)

    def test_a_graph_that_is_slower_than_eager_is_a_penalty(self):
        account = accounts(replace(TRUTH, host=-30.0).measurement(), BOUNDS)[0]
        assert account.tax_us("graph penalty") == pytest.approx(-30)
        assert account.tax_us("launch") == pytest.approx(2)
        assert account.residual_us == pytest.approx(7, abs=0.1)
        assert account.problems() == [
            "graph penalty is negative: -30.0 us",
            *account.problems()[1:],
        ]

    @pytest.mark.parametrize(
        ("disturb", "why"),
        [
            (lambda us: {"instrumented_us": us.eager_us - 60}, "faster with clock readings"),
            (lambda us: {"instrumented_us": us.eager_us + 400}, "more than the step"),
            (lambda us: {"latency_probe": slower(us.in_place, 3)}, "transfer is negative"),
            (lambda us: {"in_place": slower(us.in_place, [1, 2, 3, 4, 5])}, "differs by"),
        ],
    )
    def test_parts_that_cannot_be_believed_are_no_account(self, disturb, why):
        usual = TRUTH.measurement()
        assert not accounts(usual, BOUNDS)[0].no_account
        account = accounts(replace(usual, **disturb(usual)), BOUNDS)[0]
        assert why in account.no_account
        assert account.problems() == [account.no_account]
        assert stacked(account.to_json()) == {"no account": account.t_eager_us}

    def test_a_bound_that_the_call_beats_is_no_account(self):
        eager_us = TRUTH.measurement().eager_us[0, 0]
        bounds = Bounds(t_floor_us=eager_us, t_link_us=3.0, t_gemm_us=20.0)
        account = accounts(TRUTH.measurement(), bounds)[0]
        assert account.residual_us < -0.1 * account.t_eager_us
        assert "more than the call" in account.no_account

    def test_a_fused_kernel_is_not_split(self):
        usual = TRUTH.measurement()
        fused = tuple(replace(step, kind="fused") for step in usual.steps)
        account = accounts(replace(usual, steps=fused), BOUNDS)[0]
        assert [part.name for part in account.parts] == ["host", "gaps"]
        assert account.unsplit == INSIDE
        assert account.tax_us("bulk synchronous") is None

    def test_kernels_that_exchange_nothing_are_all_work(self):
        usual = TRUTH.measurement()
        local = tuple(replace(step, kind="fused") for step in usual.steps)
        bounds = Bounds(t_floor_us=14.0, t_link_us=0.0, t_gemm_us=None)
        account = accounts(replace(usual, steps=local), bounds)[0]
        assert not account.unsplit
        assert account.unexplained_us == pytest.approx(0, abs=1.5)

    def test_without_graphs_launches_are_in_the_residual(self):
        measured = replace(TRUTH.measurement(), graph_us=None)
        account = accounts(measured, BOUNDS)[0]
        assert account.tax_us("launch") is None
        assert "no graphs" in account.unsplit

    def test_without_a_least_collective_the_transfer_has_its_latency(self):
        account = accounts(replace(TRUTH.measurement(), latency_probe=None), BOUNDS)[0]
        found = {part.name: part.us for part in account.parts}
        assert "latency" not in found
        assert found["transfer"] == pytest.approx(21, abs=0.1)

    def test_spreads_are_those_of_the_repetitions(self):
        usual = TRUTH.measurement()
        noisy = usual.eager_us + np.array([0.0, 10.0, 20.0, 30.0, 40.0])
        account = accounts(replace(usual, eager_us=noisy), BOUNDS)[0]
        spread = {part.name: part.iqr_us for part in account.parts}
        assert spread["host"] == pytest.approx(20, abs=0.1)
        assert spread["transfer"] == pytest.approx(0, abs=0.1)
        assert account.residual_iqr_us == pytest.approx(0, abs=0.1)

    def test_what_does_not_close_is_said(self):
        def account(us: float, eager: float) -> Account:
            part = Part("transfer", "bulk synchronous", us, 0.0, "")
            return Account(0, eager, None, 50.0, (part,), 0.0)

        assert account(45.0, 100.0).problems() == []
        assert account(45.0, 120.0).problems() == ["the residual is 21% of t_eager"]
        assert account(-12.0, 45.0).problems() == ["transfer is negative: -12.0 us",
                                                   "the residual is 16% of t_eager"]  # fmt: skip

    def test_a_time_below_the_bound_is_noticed(self):
        account = Account(0, 60.0, 49.0, 50.0, (), 0.0)
        assert account.is_below_bound()
        assert not dataclasses.replace(account, t_graph_us=50.0).is_below_bound()

    def test_the_slowest_rank_is_the_one_whose_calls_take_longest(self):
        found = [Account(rank, time, None, 1.0, (), 0.0) for rank, time in enumerate((5.0, 7.0))]
        assert slowest(found).rank == 1

    def test_json_has_each_tax_and_all_parts(self):
        row = accounts(TRUTH.measurement(), BOUNDS)[1].to_json()
        json.dumps(row, allow_nan=False)
        taxes = ("launch_us", "bulk_synchronous_us", "locality_us", "residual_us", "t_bound_us")
        assert sum(row[name] for name in taxes) == pytest.approx(row["t_eager_us"])
        assert row["graph_penalty_us"] is None
        assert {part["name"]: part["memory_bytes"] for part in row["parts"]}["re-layout"] == 2048


def test_clocks_are_aligned_to_nanoseconds():
    own = np.array(
        [[EPOCH_NS, EPOCH_NS + 5_000_000], [EPOCH_NS + 10**9, EPOCH_NS + 10**9 + 5_000_750]]
    )
    offsets = np.array([[0, 5_000_000], [0, 5_000_750]])
    alignment = Alignment(own, offsets, np.zeros(2), 1.0)
    middle = np.array([EPOCH_NS + 5 * 10**8])
    assert alignment.common_us(0, middle)[0] == pytest.approx(5e5)
    own_middle = middle + 5_000_375
    assert alignment.common_us(1, own_middle)[0] == pytest.approx(5e5, abs=1e-3)


def test_kernels_are_those_of_all_steps():
    assert TRUTH.measurement().kernels == 3
    assert StepInfo("a", "copy", 4, 0).kernels == 4
