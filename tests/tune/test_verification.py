"""Records that are measured again, and problems that lack one."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from taxfree.fingerprints import hardware_fingerprint, versions
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants
from taxfree_tune.measuring.timer import Timing
from taxfree_tune.measuring.trial import Candidate, Outcome
from taxfree_tune.shapes import ShapeRequest, expand
from taxfree_tune.tuning.verification import judged, lacking, of_this_machine, verify
from taxfree_tuning_db import Measurement, Record, SoftwareFingerprint, Table, shipped_records
from tests.shipped import shipped_as_of_today

OP = "all_gather_matmul"
PROBLEM = problem_class(OP)(m=5, n=16, k=12, world_size=2)
PUSH = variants(OP)["push"].seed_configs(PROBLEM, KNOWN["cpu"])[0]
TODAYS = variants(OP)["push"].version


def measured(variant, us, config=None):
    return Measurement(
        variant, config or {}, versions(OP)[variant], {"eager": us}, {"eager": 0.0}, 9, 0.0
    )


RECORD = Record(
    OP,
    asdict(PROBLEM),
    hardware_fingerprint(KNOWN["cpu"]),
    SoftwareFingerprint("0.1.0", "3.6.0", "2.11.0", "", "cpu", "gloo"),
    winner=measured("push", 30.0, PUSH),
    baseline=measured("baseline", 45.0),
    runners_up=(measured("pull", 33.0),),
    trials=3,
    seconds_spent=1.0,
    provenance={"source": "user"},
)


def timed(us, noise_us=0.0, **other):
    samples = (us - noise_us, us, us + noise_us)
    return Outcome("measured", timings={"eager": Timing(samples, 0.0)}, **other)


def judge(baseline, winner, other, record=RECORD):
    candidates = [Candidate(name, {}) for name in ("baseline", record.winner.variant, "pull")]
    tried = list(zip(candidates, (baseline, winner, other), strict=True))
    return judged(record, "eager", tried)


class TestJudged:
    @pytest.mark.parametrize(
        ("baseline", "winner", "other", "state"),
        [
            (timed(45), timed(30), timed(33), "holds"),
            (timed(90), timed(60), timed(66), "holds"),  # all is slower: the choice holds
            (timed(45), timed(34), timed(33.5), "holds"),
            (timed(45), timed(36), timed(33), "slower"),
            (timed(45), timed(36, 5), timed(33), "holds"),
            (timed(28), timed(30), timed(33), "slower"),
            (timed(45), timed(30), Outcome("hung", "late"), "holds"),
            (timed(45), Outcome("wrong", "3 values"), timed(33), "wrong"),
            (timed(45), Outcome("hung", "late"), timed(33), "hung"),
            (timed(45), timed(90, disturbed="heat"), timed(33), "disturbed"),
        ],
    )
    def test_the_recorded_choice_must_still_be_the_fastest(self, baseline, winner, other, state):
        verdict = judge(baseline, winner, other)
        assert verdict.state == state
        assert bool(verdict.reason) == (state != "holds")

    def test_says_what_is_faster(self):
        verdict = judge(timed(45), timed(40), timed(30))
        assert (verdict.winner_us, verdict.fastest) == (40, "pull")
        assert verdict.reason == "pull takes 75% of its time"

    def test_a_recorded_baseline_is_judged_as_well(self):
        record = replace(RECORD, winner=RECORD.baseline)
        tried = [(Candidate("baseline", {}), timed(45)), (Candidate("pull", {}), timed(33))]
        assert judged(record, "eager", tried).state == "slower"


class TestVerify:
    def test_records_of_the_host_are_measured_and_those_of_unknown_variants_are_not(self):
        earlier = replace(RECORD, winner=replace(RECORD.winner, version=0))
        unknown = replace(RECORD, winner=replace(RECORD.winner, variant="removed"))
        now, before, never = verify([RECORD, earlier, unknown], "host")
        for each in (now, before):
            assert each.state in ("holds", "slower")  # interpreted kernels take what they take
            assert each.winner_us > 0
        assert before.reason.startswith(f"measured with version 0 of push, now {TODAYS}")
        assert (never.state, never.reason) == ("unknown", "variant removed is unknown")
        assert never.winner_us is None

    def test_of_this_machine_are_those_it_can_run(self):
        others = [
            replace(RECORD, hardware=replace(RECORD.hardware, gpu="NVIDIA H200")),
            replace(RECORD, problem=RECORD.problem | {"world_size": 4096}),
            replace(RECORD, problem=RECORD.problem | {"colour": 1}),
        ]
        assert of_this_machine([*others, RECORD], "host") == [RECORD]


class TestLacking:
    def test_are_problems_without_a_current_record_of_the_gpu(self):
        asked = [PROBLEM, replace(PROBLEM, m=6)]
        (missing,) = lacking(asked, Table([RECORD]), "CPU")
        assert (missing.problem.m, missing.reason) == (6, "no record")
        assert len(lacking(asked, Table([RECORD]), "NVIDIA H200")) == 2

    def test_a_stale_record_is_none_unless_a_shipped_one_is_current(self):
        stale = replace(RECORD, winner=replace(RECORD.winner, version=0))
        (missing,) = lacking([PROBLEM], Table([stale]), "CPU")
        assert missing.reason == f"measured with version 0 of push, now {TODAYS}"
        assert lacking([PROBLEM], Table([stale], [RECORD]), "CPU") == []

    def test_a_winner_that_was_lent_was_not_tuned(self):
        lent = replace(RECORD, provenance={"method": "lent", "lender": "another"})
        (missing,) = lacking([PROBLEM], Table([lent]), "CPU")
        assert missing.reason == "another lent its winner"

    def test_shipped_tables_serve_the_papers_shapes_on_h200(self):
        request = ShapeRequest(["paper"], world_sizes=(8,), dtype="bf16")
        asked = expand(OP, request)
        assert lacking(asked, Table((), shipped_as_of_today()), KNOWN["h200"].name) == []

    def test_shipped_tables_are_of_known_gpus(self):
        assert {each.hardware.gpu for each in shipped_records()} <= {
            each.name for each in KNOWN.values()
        }
