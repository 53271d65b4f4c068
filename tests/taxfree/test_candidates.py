"""What the search tries first."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import pytest

from benchmarks.model_error import rows as measured_rows
from taxfree.measuring.trial import Candidate
from taxfree.tuning.candidates import first_candidates, variants_for
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class
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

    def test_what_is_expected_to_win_comes_first_and_what_loses_last(self):
        problem = problem_class("matmul_all_reduce")(m=1024, n=8192, k=3584, world_size=4)
        before, after = self.first(problem, self.H200)
        assert before[0] == "push_two_shot"
        assert "push_two_shot" in after[:3]  # its second config
        assert "push" not in before
        assert after.index("push") > after.index("push_two_shot")

    def test_machines_without_a_model_try_all_variants_in_turn(self):
        problem = problem_class(OP)(m=256, n=3584, k=8192, world_size=4)
        before, after = self.first(problem, KNOWN["mi350x"])
        assert len(before) == len(set(before))
        assert set(after) <= set(before)

    def test_the_promising_are_as_fast_as_any_that_was_measured(self):
        """In eager calls a host decides, which is not the same in two runs: a tenth is nothing."""
        measured = collections.defaultdict(list)
        for each in measured_rows():
            if each.row.variant != "baseline":
                measured[each.visit, each.row.mode, each.problem].append(each.row)
        assert len(measured) > 200  # in graphs and in eager calls
        for (visit, mode, problem), rows in measured.items():
            before, after = self.first(problem, self.H200)
            searched = [row for row in rows if row.variant in (*before, *after)]
            promising = min(row.median_us for row in rows if row.variant in before)
            slack = 1.1 if mode == "eager" else 1.0
            assert promising <= slack * min(row.median_us for row in searched), (visit, problem)

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

    def test_what_is_slow_here_comes_last_although_it_has_won_nearby(self):
        problem = problem_class("matmul_all_reduce")(m=1024, n=8192, k=3584, world_size=8)
        found = variants_for(problem, self.H200)
        small = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4, "SWAP_AB": True}
        default = found["push_two_shot"].seed_configs(problem, self.H200)[0]
        slow = Candidate("push_two_shot", default | small)
        unknown = Candidate("push_two_shot", {"an": "old parameter"})
        first = first_candidates(found, problem, self.H200, [slow, unknown])
        second = found["push_two_shot"].seed_configs(problem, self.H200)[1]
        assert first.index(unknown) < first.index(Candidate("push_two_shot", second))
        assert first.index(Candidate("push_two_shot", second)) < first.index(slow)
        assert len(first) == len(first_candidates(found, problem, self.H200)) + 2

    def test_a_variant_without_a_model_is_not_held_back(self):
        problem = problem_class(OP)(m=1024, n=3584, k=8192, world_size=4)
        added = SimpleNamespace(name="added", seed_configs=lambda problem, hardware: [{}])
        before, after = self.first(problem, self.H200, added=added)
        assert {"added", "push_tma"} <= set(before)
        assert "pull" in after
