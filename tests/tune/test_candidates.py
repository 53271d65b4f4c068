"""What the search tries first."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest

from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import (
    operation,
    operation_names,
    operation_shapes,
    problem_class,
    resized,
    variants,
)
from taxfree_tune.measuring.trial import Candidate
from taxfree_tune.tuning.candidates import first_candidates, variants_for
from taxfree_tuning_db.tables import shipped_records
from tests.ranks import OP


@pytest.mark.parametrize(
    ("op", "fields", "steps"),
    [
        (OP, {"m": 64, "n": 3584, "k": 8192}, {"push_two_kernel"}),
        (
            "flash_decode",
            {"batch": 8, "q_heads": 96, "kv_heads": 12, "head_dim": 128, "kv_len_per_rank": 8192},
            {"gather", "persistent"},
        ),
    ],
)
def test_steps_on_the_way_are_tried_only_by_name(op, fields, steps):
    problem, hardware = problem_class(op)(**fields, world_size=4), KNOWN["h200"]
    assert not steps & variants_for(problem, hardware).keys()
    assert variants_for(problem, hardware, [*steps]).keys() == steps


class TestFirstCandidates:
    H200 = KNOWN["h200"]

    def first(self, problem, hardware, **others):
        """Names of variants, before and after what won nearby."""
        nearby = Candidate("won nearby", {})
        found = variants_for(problem, hardware) | others
        names = [each.variant for each in first_candidates(found, problem, hardware, [nearby])]
        at = names.index(nearby.variant)
        assert set(names) == {*found, nearby.variant}
        return names[:at], names[at + 1 :]

    def test_what_wins_on_such_problems_comes_first(self):
        problem = problem_class("matmul_all_reduce")(m=1024, n=8192, k=3584, world_size=4)
        before, after = self.first(problem, self.H200)
        assert before[:3] == ["push_two_shot", "push", "two_shot"]
        assert "push_two_shot" in after[:3]  # its second config

    @pytest.mark.parametrize("op", operation_names())
    def test_variants_that_are_named_exist(self, op):
        for size in (1, 64, 256, 1024, 4096):
            shapes = operation_shapes(op)
            problem = resized((*shapes.aligned, *shapes.ragged)[0], m=size)
            assert {*operation(op).first_variants(problem)} <= variants(op).keys()

    @pytest.mark.parametrize("hardware", [KNOWN["h200"], KNOWN["mi350x"]])
    def test_all_variants_have_a_turn_before_any_has_a_second(self, hardware):
        problem = problem_class(OP)(m=256, n=3584, k=8192, world_size=4)
        before, after = self.first(problem, hardware)
        assert len(before) == len(set(before))
        assert set(after) <= set(before)

    def test_the_first_four_are_nearly_as_fast_as_any_in_the_shipped_tables(self):
        """In eager calls the host decides too, which is not the same in two runs."""
        slower = {"graph": [], "eager": []}
        for record in shipped_records():
            problem = problem_class(record.op)(**record.problem)
            found = variants_for(problem, self.H200)
            first = {each.variant for each in first_candidates(found, problem, self.H200)[:4]}
            for mode, times in slower.items():
                measured = [
                    (each.median_us[mode], each.variant in first)
                    for each in (record.winner, *record.runners_up)
                    if mode in each.median_us and each.variant in found
                ]
                if measured:
                    fastest_of_first = min(us for us, is_first in measured if is_first)
                    times.append(fastest_of_first / min(measured)[0])
        assert min(map(len, slower.values())) > 200
        assert max(slower["graph"]) < 1.15
        assert max(slower["eager"]) < 1.4
        assert statistics.mean(slower["graph"]) < 1.003
        assert statistics.mean(slower["eager"]) < 1.01

    def test_what_has_won_is_tried_early_or_something_as_fast(self):
        records = [each for each in shipped_records() if each.winner.variant != "baseline"]
        assert len(records) > 100
        for record in records:
            problem = problem_class(record.op)(**record.problem)
            found = variants_for(problem, self.H200)
            best = record.winner.median_us["graph"]
            as_fast = [
                Candidate(each.variant, each.config)
                for each in (record.winner, *record.runners_up)
                if each.median_us["graph"] <= 1.01 * best
            ]
            first = first_candidates(found, problem, self.H200, as_fast)
            assert min(map(first.index, as_fast)) <= len(found), record

    def test_a_variant_that_is_not_named_is_not_held_back(self):
        problem = problem_class(OP)(m=1024, n=3584, k=8192, world_size=4)
        added = SimpleNamespace(name="added", seed_configs=lambda problem, hardware: [{}])
        before, after = self.first(problem, self.H200, added=added)
        assert {"added", "push_tma"} <= set(before)
        assert "pull" in after
