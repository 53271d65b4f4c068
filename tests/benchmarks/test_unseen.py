"""The judgement of predictions: its rules on synthetic rows, and its verdicts as committed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import unseen
from benchmarks.unseen import ProblemTimes, Row, documented, evidence, families, judge, judged, text
from taxfree._runtime.prediction import Prediction
from taxfree_tuning_db import shipped_records

LENDER = next(
    record
    for record in shipped_records()
    if record.op == "matmul_all_reduce" and record.problem["world_size"] == 8
)
ROW = Row(
    op="matmul_all_reduce",
    gpu="NVIDIA H200",
    world_size=8,
    fixed={"world_size": 8},
    method="nearest",
    left_out={"n": 8192, "k": 1024},
    problems=4,
    beyond=0,
    unmeasured=1,
    judged=3,
    of_best=0.96,
    of_library=1.1,
    reach={"n": 0.0, "k": 1.8},
    sizes={"m": [1, 64]},
)
OTHER = dataclasses.replace(
    ROW, left_out={"n": 4096, "k": 512}, reach={"n": 1.0, "k": 1.0}, sizes={"m": [16, 512]}
)


def measured(m: int, n: int, **times: float) -> ProblemTimes:
    found = ProblemTimes(LENDER.op, LENDER.problem | {"m": m, "n": n}, LENDER.hardware)
    found.add_run({unseen._name(name, {}): us for name, us in times.items()})
    return found


def judged_with(
    monkeypatch: pytest.MonkeyPatch, picks: dict[int, str], *group: ProblemTimes
) -> Row:
    """The row of the first one's family, where `picks` names the predicted variant of each m."""

    def predict(method, op, problem, records, *rest, **names):
        families = {(record.problem["n"], record.problem["k"]) for record in records}
        assert group[0].family not in families
        assert families
        pick = picks.get(problem.m)
        return None if pick is None else Prediction(pick, {}, 1.0, 2.0, LENDER)

    monkeypatch.setattr(unseen, "predict", predict)
    return judge("nearest", group[0].family, group, shipped_records())


class TestJudge:
    def test_what_was_measured_is_judged_and_nothing_else(self, monkeypatch):
        group = [
            measured(1, 8192, baseline=40.0, push=20.0, pull=25.0),
            measured(2, 8192, baseline=40.0, push=20.0),
            measured(4, 8192, baseline=40.0, push=20.0),
            measured(1, 4096, baseline=40.0, pull=1.0),
        ]
        row = judged_with(monkeypatch, {1: "pull", 2: "pull"}, *group)
        counts = (row.problems, row.beyond, row.unmeasured, row.judged)
        assert counts == (3, 1, 1, 1)
        assert (row.of_best, row.of_library) == (pytest.approx(0.8), pytest.approx(1.6))
        assert row.sizes == {"m": [1, 1]}

    def test_the_library_is_its_fastest_path(self, monkeypatch):
        group = [measured(1, 8192, baseline=40.0, registered=18.0, push=20.0)]
        row = judged_with(monkeypatch, {1: "push"}, *group)
        assert row.of_library == pytest.approx(0.9)
        assert row.verdict == "library"

    def test_runs_of_hosts_and_clocks_of_their_own_are_compared_by_their_baselines(self):
        found = measured(1, 8192, baseline=40.0, push=20.0)
        found.add_run({unseen._name("baseline", {}): 80.0, unseen._name("push", {}): 44.0})
        assert found.time("push", {}) == pytest.approx(0.525)
        assert found.best() == pytest.approx(0.525)

    def test_a_meta_parameter_that_a_config_is_older_than_is_off(self):
        found = ProblemTimes(LENDER.op, LENDER.problem, LENDER.hardware)
        names = {"baseline": {}, "push": {"BLOCK_M": 64, "launch_pdl": False}}
        found.add_run({unseen._name(name, config): 1.0 for name, config in names.items()})
        assert found.time("push", {"BLOCK_M": 64}) == 1.0
        assert found.time("push", {"BLOCK_M": 64, "launch_pdl": True}) is None


class TestVerdict:
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({}, ""),
            ({"unmeasured": 3}, ""),
            ({"unmeasured": 4}, "only 3 of 7 predictions were measured"),
            ({"of_best": 0.949}, "0.949 of the best"),
            ({"of_library": 0.96}, "0.960 of the library's speed"),
            ({"judged": 0, "of_best": None, "of_library": None}, "no prediction was measured"),
        ],
    )
    def test_each_condition_counts(self, changes, why):
        row = dataclasses.replace(ROW, **changes)
        assert (row.why_not, row.verdict) == (why, "library" if why else "serve")

    def test_a_setting_is_served_as_far_as_its_families_show(self):
        (found,) = evidence([ROW, OTHER])
        assert found.method == "nearest"
        assert found.reach == {"n": 1.0, "k": 1.8}
        assert found.sizes == {"m": [1, 512]}
        assert "6 of 8 predictions measured" in found.why

    def test_one_family_shows_nothing(self):
        (found,) = evidence([ROW])
        assert (found.method, found.why) == (None, "all results have n=8192 k=1024")

    def test_each_family_must_show_it(self):
        bad = dataclasses.replace(OTHER, of_best=0.9)
        (found,) = evidence([ROW, bad])
        assert found.method is None
        assert found.why == "nearest: 0.900 of the best without n=4096 k=512"

    def test_the_next_method_serves_where_the_first_is_not_shown(self):
        bad = dataclasses.replace(OTHER, of_best=0.9)
        by_model = [dataclasses.replace(row, method="model") for row in (ROW, OTHER)]
        (found,) = evidence([ROW, bad, *by_model])
        assert found.method == "model"


def test_the_dispatcher_reads_what_the_results_show():
    """If not: `python -m benchmarks.unseen --write`."""
    assert unseen.SHOWN.read_text(encoding="utf-8") == text(evidence(judged()))
    document = unseen.DOCUMENT.read_text(encoding="utf-8")
    assert families(judged()) in document
    assert documented(judged()) == document


def test_every_served_setting_meets_the_bounds():
    served = {
        json.dumps([each.op, each.gpu, each.fixed]): each.method
        for each in evidence(judged())
        if each.method is not None
    }
    assert served
    for row in judged():
        if served.get(json.dumps([row.op, row.gpu, row.fixed])) == row.method:
            assert row.of_best >= 0.95
            assert row.of_library >= 0.97
            assert row.judged >= row.unmeasured


def test_a_document_has_rows_settings_and_a_summary(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["unseen", "--json"])
    assert unseen.main() == 0
    document = json.loads(capsys.readouterr().out)
    wanted = {"op", "world_size", "left_out", "judged", "of_best", "of_library", "verdict"}
    assert all(wanted <= row.keys() for row in document["rows"])
    assert document["summary"]["settings"] == len(document["settings"])
