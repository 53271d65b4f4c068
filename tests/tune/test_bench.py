"""What is benched: candidates and their configs, and what becomes of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from taxfree import fingerprints
from taxfree._runtime.dispatch import Choice
from taxfree.errors import HardwareError, UsageError
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device.peers import LAMPORT_SLOT_BYTES, LL_SLOT_BYTES
from taxfree_kernels.fabric.heap import WORDS_SHARE
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import operation, variants
from taxfree_tune.benching import bench
from taxfree_tune.benching.tasks import ProblemTimes
from taxfree_tune.devices import fabric_for, heap_bytes, require
from taxfree_tune.measuring import groups
from taxfree_tune.measuring import trial as trial_module
from taxfree_tune.measuring.bounds import Bounds, Peaks
from taxfree_tune.measuring.timer import Timing
from taxfree_tune.measuring.trial import Outcome
from taxfree_tune.profiling import explain
from taxfree_tune.tuning.history import TuningHistory
from taxfree_tuning_db import Database, Measurement, Record, TrialRecord

OP = "all_gather_matmul"
CPU = KNOWN["cpu"]
PROBLEM = AllGatherMatmul(m=5, n=32, k=32, world_size=2)
NOTHING = TuningHistory((), None)
SPACE = variants(OP)["push"].space(PROBLEM, CPU)
DEFAULT = variants(OP)["push"].seed_configs(PROBLEM, CPU)[0]
TUNED = {name: values[-1] for name, values in SPACE.items()} | {"SPLIT_K": 1}
OTHER = DEFAULT | {"CHUNKS": TUNED["CHUNKS"]}
TODAYS = variants(OP)["push"].version


def measurement(variant: str, config: dict) -> Measurement:
    version = fingerprints.versions(OP)[variant]
    return Measurement(variant, config, version, {"eager": 9.0}, {"eager": 1.0}, 3, 0.001)


BASELINE = measurement("baseline", {})


def trial(config: dict, us: float | None = None, state="measured", version=TODAYS) -> TrialRecord:
    times = {} if us is None else {"eager": us}
    return TrialRecord("push", config, state, "", times, 1.0, version)


def record(winner: Measurement) -> Record:
    return Record(
        op=OP,
        problem=asdict(PROBLEM),
        hardware=fingerprints.hardware_fingerprint(CPU),
        software=fingerprints.software_fingerprint(),
        winner=winner,
        baseline=BASELINE,
        runners_up=(),
        trials=1,
        seconds_spent=1.0,
        provenance={"source": "user"},
    )


def configs(history: TuningHistory, only=None) -> dict:
    taken, _ = bench.candidates(OP, PROBLEM, CPU, history, only)
    return {candidate.variant: candidate.config for candidate in taken}


class TestCandidates:
    def test_untuned_variants_run_their_default_beside_the_baseline(self):
        found = configs(NOTHING)
        assert next(iter(found)) == "baseline"
        assert found["push"] == DEFAULT

    def test_a_variant_that_does_not_serve_is_skipped_with_its_reason(self):
        _, skipped = bench.candidates(OP, PROBLEM, CPU, NOTHING, None)
        reasons = {each.variant: (each.state, each.reason) for each in skipped}
        assert reasons["registered"][0] == "refused"
        assert "registered memory" in reasons["registered"][1]

    def test_a_record_gives_its_config(self):
        assert configs(TuningHistory((record(measurement("push", TUNED)),), None))["push"] == TUNED

    def test_a_record_with_other_parameters_gives_none(self):
        old = record(measurement("push", {"FORGOTTEN": 1}))
        assert configs(TuningHistory((old,), None))["push"] == DEFAULT

    @pytest.mark.parametrize(
        ("winner", "trials", "config"),
        [
            (BASELINE, [trial(DEFAULT, 20.0), trial(TUNED, 10.0)], TUNED),
            *(
                (winner, [trial(TUNED, 10.0), trial(TUNED, state=state), trial(OTHER, 20.0)], OTHER)
                for winner in (measurement("push", TUNED), BASELINE)
                for state in ("hung", "wrong")
            ),
            (BASELINE, [trial(TUNED, 10.0, version=0)], DEFAULT),
            (BASELINE, [replace(trial(TUNED, 10.0), reason="disturbed: heat")], DEFAULT),
        ],
        ids=["the best one", *["failed later"] * 4, "earlier version", "disturbed"],
    )
    def test_a_variant_runs_its_best_trial_that_still_holds(self, tmp_path, winner, trials, config):
        with Database(tmp_path / "tuning.sqlite") as database:
            won = record(winner)
            database.put(won)
            for tried in trials:
                database.add_trial(won.key, tried)
        history = TuningHistory.read(tmp_path / "tuning.sqlite", required=True)
        assert configs(history)["push"] == config

    def test_only_some_variants_still_include_the_baseline(self):
        assert list(configs(NOTHING, only=["push"])) == ["baseline", "push"]

    def test_an_unknown_variant_is_named(self):
        with pytest.raises(UsageError, match="'shove'"):
            configs(NOTHING, only=["shove"])


class TestRows:
    def measured(self, dispatch: Outcome) -> ProblemTimes:
        baseline = Outcome("measured", timings={"eager": Timing((10.0,), 1.0)}, launches=3)
        baseline.timings["graph"] = Timing((8.0,), 1.0)
        return ProblemTimes(
            {"baseline": baseline, "dispatch": dispatch},
            Choice("exact", "push", DEFAULT),
            Bounds(2.0, 1.0, 3.0),
            Peaks(1.0, 1.0, 1.0),
            [{"sm_mhz": 1980.0, "throttled": []}, {"sm_mhz": 1755.0, "throttled": ["power cap"]}],
        )

    def test_each_mode_is_a_row_beside_both_baselines(self):
        outcome = Outcome("measured", timings={"graph": Timing((4.0, 4.0), 0.5)}, launches=1)
        picked = {"variant": "push", **DEFAULT}
        measured = self.measured(outcome)
        rows, skipped = bench._rows(OP, PROBLEM, measured, {"baseline": {}, "dispatch": picked})
        assert [(row.variant, row.mode) for row in rows] == [
            ("baseline", "eager"), ("baseline", "graph"), ("dispatch", "graph"),
        ]  # fmt: skip
        row = rows[-1]
        assert (row.speedup_eager, row.speedup_graph, row.x_bound) == (2.5, 2.0, 2.0)
        assert row.version == fingerprints.versions(OP)["push"]
        assert row.fused
        assert row.tflops == pytest.approx(2 * 5 * 32 * 32 / 4e-6 / 1e12)
        assert (row.sm_mhz, row.throttled) == (1755.0, ("power cap",))
        assert not skipped

    def test_what_is_wrong_is_not_a_row(self):
        outcome = Outcome("wrong", "3 of 160 values wrong on rank 1", wrong=3)
        measured = self.measured(outcome)
        rows, skipped = bench._rows(OP, PROBLEM, measured, {"baseline": {}, "dispatch": {}})
        assert {row.variant for row in rows} == {"baseline"}
        assert [(each.state, each.wrong) for each in skipped] == [("wrong", 3)]


def test_wrong_values_are_counted_on_all_ranks(monkeypatch):
    device = torch.device("cpu")
    problem = AllGatherMatmul(m=5, n=32, k=32)
    made, where = operation(OP), (problem, 0, 1, device)
    monkeypatch.setattr(trial_module, "vote", lambda group, value: [value, 4])
    fake = SimpleNamespace(
        _integers=made.make_inputs(*where, integers=True), _relative_error=lambda compute: 0.1,
        _exact=made.reference(*where, integers=True).to(torch.float16), _worst=lambda error: error,
        outputs=[made.empty_output(problem, device)], result=lambda out: out, baseline_error=0.1,
        fabric=SimpleNamespace(group=None),
    )  # fmt: skip

    def plan(a, weight, bias, out):
        out.copy_(a @ weight)
        out[2, :3] += 1
        return out

    checked = trial_module.Bench.check(fake, plan)
    assert (checked.state, checked.wrong) == ("wrong", 3 + 4)
    assert checked.reason == "3 of 160 values wrong on rank 0"


class TestDevices:
    def test_a_gpu_fabric_needs_a_gpu(self, monkeypatch):
        monkeypatch.setattr("taxfree_tune.devices.available_gpus", lambda: 0)
        assert fabric_for("auto") == "host"
        with pytest.raises(HardwareError, match="sees no GPU"):
            fabric_for("cuda")

    def test_auto_is_never_the_host_beside_a_gpu(self, monkeypatch):
        monkeypatch.setattr("taxfree_tune.devices.available_gpus", lambda: 2)
        assert fabric_for("auto") == "cuda"
        with pytest.raises(HardwareError, match="8 GPUs are asked for, 2 are there"):
            require("cuda", 8)
        require("host", 8)

    def test_the_heap_holds_two_slots_of_the_largest_problem(self):
        large = AllGatherMatmul(m=4096, n=8, k=8192, world_size=8)
        slots = 2 * 4096 * 8192 * 2
        words = 2 * LL_SLOT_BYTES + 3 * LAMPORT_SLOT_BYTES
        assert heap_bytes([PROBLEM, large]) == slots + words + (1 << 20)
        # the least of which a pool keeps enough for words
        assert heap_bytes([PROBLEM]) == WORDS_SHARE * LAMPORT_SLOT_BYTES + (1 << 20)

    def test_workers_have_room_for_a_record_that_serves_half_its_rows(self):
        """The dispatcher plans it for all of its rows."""
        large = AllGatherMatmul(m=32768, n=8, k=8192, world_size=8)
        assert groups.heap_bytes("cuda", [replace(large, m=16384)]) == heap_bytes([large])


def test_a_problem_is_measured_on_the_host():
    history = TuningHistory((record(measurement("push", DEFAULT)),), None)
    (result,) = bench.run([PROBLEM], "host", history, only=["one_shot"])
    assert [row.variant for row in result.rows] == ["baseline", "one_shot", "dispatch"]
    dispatch = result.rows[-1]
    assert dispatch.config == {"variant": "push", **DEFAULT}
    assert dispatch.launches == 1
    assert all(len(row.samples_us) == 5 and row.median_us > 0 for row in result.rows)
    assert result.bounds.t_gemm_us > 0
    assert all(0 < rate < 1e16 for rate in vars(result.peaks).values())


def test_a_problem_is_explained_on_the_host():
    history = TuningHistory((record(measurement("push", DEFAULT)),), None)
    ((_, explained),) = explain.run([PROBLEM], "host", history, only=["one_shot"])
    assert [(each.variant, each.is_dispatched) for each in explained.pipelines] == [
        ("baseline", False), ("one_shot", False), ("push", True),
    ]  # fmt: skip
    assert [each.kernels for each in explained.pipelines] == [3, 2, 1]
    assert explained.choice.kind == "exact"
    assert any(step.found for step in explained.lookup_trace)
    for row in explained.rows():
        assert row["t_graph_us"] is None
        is_fused = row["variant"] == "push"  # what its programs noted tells
        assert (row["launch_us"] is not None) == is_fused
        assert ("no graphs" in row["unsplit"]) != is_fused
        assert [rank["rank"] for rank in row["ranks"]] == [0, 1]
        known = sum(part["us"] for part in row["parts"]) + row["t_bound_us"] + row["residual_us"]
        assert known == pytest.approx(row["t_eager_us"])
    baseline = explained.rows()[0]
    assert [part["name"] for part in baseline["parts"]] == [
        "skew", "latency", "transfer", "re-layout", "matmul",
    ]  # fmt: skip
    assert baseline["parts"][3]["memory_bytes"] == 2 * PROBLEM.m * PROBLEM.k * 2
