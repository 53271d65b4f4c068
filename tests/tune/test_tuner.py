"""The tuner: what it records of candidates, what it adopts, and how it goes on after losses."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
from itertools import product

import pytest

from taxfree_check.cross_compile.resources import Resources
from taxfree_check.cross_compile.screen import ScreenVerdict
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import problem_class, variants
from taxfree_tuning_db import Database, record_key
from tests.ranks import (
    KERNELS,
    OP,
    PYTHON,
    copy_of_kernels,
    environment,
)
from tests.tune import candidates

pytestmark = pytest.mark.filterwarnings("ignore:.*is an experimental feature")
CPU = KNOWN["cpu"]
PROBLEM = {"m": 5, "n": 16, "k": 12, "gather_dim": 1, "world_size": 2}
DEFAULT = variants(OP)["push"].seed_configs(problem_class(OP)(**PROBLEM), KNOWN["cpu"])[0]


class ScriptedGroup:
    """A worker group whose outcomes a function makes up.

    Args:
        dies: whether some candidates, so often repeated, take it down; another comes at once.
    """

    is_alive = True

    def __init__(self, script, hardware=KNOWN["cpu"], dies=lambda candidates, repetitions: False):
        self.script, self.hardware, self.dies = script, hardware, dies
        self.tried, self.calls = [], []

    def call(self, task, deadline_s, *, candidates, repetitions, **rest):
        from taxfree.errors import WorkerLost

        self.tried += [each for each in candidates if each.variant != "baseline"]
        self.calls.append((candidates, repetitions, deadline_s))
        if self.dies(candidates, repetitions):
            raise WorkerLost("rank 1 died")
        return [[self.script(each) for each in candidates]]


class PassingScreen:
    def verdicts(self, op, problem, asked):
        return [ScreenVerdict(name, config, {}) for name, config in asked]


class CompilingScreen(PassingScreen):
    """Of a compiler that took three seconds for each candidate."""

    def verdicts(self, op, problem, asked):
        kernels = {"push": Resources(0, 0, 0, 1, seconds=3.0)}
        return [
            dataclasses.replace(each, kernels=kernels)
            for each in super().verdicts(op, problem, asked)
        ]


class BeginningScreen(PassingScreen):
    """Keeps what it is to compile ahead, and what it is asked for."""

    def __init__(self):
        self.begun, self.asked = [], []

    def begin(self, op, problem, candidates):
        self.begun.append((problem, list(candidates)))

    def verdicts(self, op, problem, asked):
        self.asked.append((problem, asked))
        return super().verdicts(op, problem, asked)


class RefusingScreen:
    """Refuses the default of push."""

    def verdicts(self, op, problem, asked):
        return [
            ScreenVerdict(
                name, config, {}, "spills" if (name, config) == ("push", DEFAULT) else None
            )
            for name, config in asked
        ]


def timed(median_us, noise_us=0.0, samples=3):
    """An outcome whose quartiles are `noise_us` apart."""
    from taxfree_tune.measuring.timer import Timing
    from taxfree_tune.measuring.trial import Outcome

    times = (median_us - noise_us, median_us, median_us + noise_us) * (samples // 3)
    timings = dict.fromkeys(("graph", "eager"), Timing(times, 0.0))
    return Outcome("measured", timings=timings, relative_error=1e-3)


def tune(db, script, trials=6, hardware=KNOWN["cpu"], dtype="float16", **options):
    """A record, the trials, and what was tried, of a run without processes."""
    group = ScriptedGroup(script, hardware)
    record, trials = tune_on(group, db, trials, dtype, **options)
    return record, trials, group.tried


def tune_on(group, db, trials=6, dtype="float16", screen=PassingScreen, problem=PROBLEM, **options):
    """A record and the trials."""
    from taxfree_tune.tuning.tuner import Budget, Tuner
    from taxfree_tune.workers.group import Workers

    with Database(db) as database:
        tuner = Tuner(database, Workers(lambda: group), group.hardware, screen(), **options)
        record = tuner.tune(problem_class(OP)(**problem, dtype=dtype), Budget(trials))
        return record, database.trials(record.key)


def time_of(candidate):
    """Some time that depends on the candidate alone."""
    from taxfree_tune.measuring.trial import key

    return timed(50.0 + sum(key(candidate).encode()) % 97)


def keys(trial):
    """A stored trial's candidate as text."""
    from taxfree_tune.measuring.trial import Candidate, key

    return key(Candidate(trial.variant, trial.config))


@pytest.fixture
def db(tmp_path):
    return tmp_path / "tuning.sqlite"


class TestMoreTrialsThanConfigs:
    """Every config that no variant refuses is found."""

    def valid(self, name):
        from taxfree_tune.measuring.trial import Candidate, key

        problem, variant = problem_class(OP)(**PROBLEM, dtype="float16"), variants(OP)[name]
        space = variant.space(problem, CPU)
        configs = [dict(zip(space, values, strict=True)) for values in product(*space.values())]
        return {
            key(Candidate(name, config))
            for config in configs
            if variant.illegal_reason(problem, CPU, config) is None
        }

    def test_each_is_measured_once_and_none_again(self, db):
        options = {"trials": 10**6, "only": ["one_shot"]}
        _, trials, _ = tune(db, time_of, **options)
        assert {keys(each) for each in trials if each.state == "measured"} == self.valid("one_shot")
        assert len(trials) >= len(self.valid("one_shot")) > 1
        _, again, _ = tune(db, time_of, **options)
        assert len(again) == len(trials)

    def test_the_fastest_wins(self, db):
        def script(candidate):
            return timed(200.0) if candidate.variant == "baseline" else time_of(candidate)

        record, trials, _ = tune(db, script, trials=10**6, only=["one_shot"])
        times = [trial.median_us["eager"] for trial in trials if trial.median_us]
        assert record.winner.median_us["eager"] == min(times)


class TestAdoption:
    @pytest.mark.parametrize(
        ("winner", "baseline", "adopted"),
        [
            (timed(96.9), timed(100.0), True),
            (timed(97.1), timed(100.0), False),
            (timed(100.1), timed(100.0), False),
            (timed(90.0, 4.0), timed(100.0), True),
            (timed(90.0, 6.0), timed(100.0), False),
            (timed(90.0), timed(100.0, 6.0), False),
            (timed(90.0, 5.0, samples=24), timed(100.0, 5.0, samples=24), True),
        ],
        ids=["beyond 3 %", "within 3 %", "slower", "noise", "noisy", "noisy baseline", "many"],
    )
    def test_needs_more_than_3_percent_and_three_errors(self, db, winner, baseline, adopted):
        def script(candidate):
            return baseline if candidate.variant == "baseline" else winner

        record, _, _ = tune(db, script, trials=2)
        assert (record.winner.variant != "baseline") == adopted
        assert record.baseline.median_us["eager"] == 100.0
        assert len(record.runners_up) == 2 - adopted

    def test_what_is_fastest_outside_of_graphs_is_measured_again_too(self, db):
        """The dispatcher runs it in eager calls."""
        from taxfree_tune.measuring.timer import Timing
        from taxfree_tune.measuring.trial import Outcome

        def script(candidate):
            graph = 10.0 + sum(json.dumps(candidate.config).encode()) % 97
            eager = 20.0 if candidate.variant == "pull" else 200.0
            slow = candidate.variant == "pull"
            times = {"graph": 1000.0 if slow else graph, "eager": eager}
            timings = {mode: Timing((us,) * 3, 0.0) for mode, us in times.items()}
            return Outcome("measured", timings=timings, relative_error=1e-3)

        record, _, _ = tune(db, script, trials=12, hardware=KNOWN["h200"])
        assert record.winner.variant != "pull"
        assert "pull" in {each.variant for each in record.runners_up}
        assert len(record.runners_up) <= 7

    def test_what_can_run_several_weights_is_measured_again_however_slow_it_is(self, db):
        """Calls of several weights after one gather run it."""
        slow = {"one_shot", "overlap"}

        def script(candidate):
            return timed(500.0) if candidate.variant in slow else time_of(candidate)

        problem = PROBLEM | {"m": 6, "gather_dim": 0}
        record, _, _ = tune(db, script, trials=12, problem=problem)
        assert sum(each.variant in slow for each in record.runners_up) == 1
        record, _, _ = tune(db.with_name("columns.sqlite"), script, trials=12)
        assert not slow & {each.variant for each in record.runners_up}

    def test_the_fastest_finalist_wins(self, db):
        record, _, tried = tune(db, time_of, trials=8)
        best = min(tried, key=lambda each: time_of(each).timings["eager"].median_us)
        assert (record.winner.variant, record.winner.config) == (best.variant, dict(best.config))


class TestDisturbed:
    """Times of a busy or throttled GPU."""

    @pytest.fixture(autouse=True)
    def pauses(self, monkeypatch):
        from taxfree import fingerprints
        from taxfree_tune.tuning import together, tuner

        fingerprints.source_commit()  # once, and waits for git by sleeping
        seconds = []
        monkeypatch.setattr(tuner.time, "sleep", seconds.append)
        monkeypatch.setattr(together.time, "sleep", seconds.append)
        return seconds

    def script(self, disturbed):
        """Outcomes of which those with a number in `disturbed`, counted by batch, are disturbed."""
        batches = iter(range(1000))
        number = 0

        def outcome(candidate):
            nonlocal number
            if candidate.variant == "baseline":
                number = next(batches)
            found = timed(200.0) if candidate.variant == "baseline" else time_of(candidate)
            found.disturbed = "GPU 0 is shared" if disturbed(number) else ""
            return found

        return outcome

    def test_are_marked_and_measured_again(self, db, pauses):
        record, trials, _ = tune(db, self.script(lambda batch: batch == 0), trials=4)
        marked = [trial for trial in trials if trial.reason]
        assert {trial.reason for trial in marked} == {"disturbed: GPU 0 is shared"}
        assert {trial.state for trial in marked} == {"measured"}
        clean = [trial for trial in trials if not trial.reason]
        configs = [str((trial.variant, trial.config)) for trial in clean]
        assert {str((trial.variant, trial.config)) for trial in marked} <= set(configs)
        assert record.trials == len(clean) == 4
        assert len(pauses) == 1

    def test_of_finals_are_measured_again(self, db, pauses):
        record, _, _ = tune(db, self.script(lambda batch: batch == 1), trials=4)
        assert record.winner.variant != "baseline"
        assert pauses == [10.0]

    def test_decide_nothing(self, db):
        from taxfree_tune.tuning.tuner import Budget, Tuner
        from taxfree_tune.workers.group import Workers

        first, _, _ = tune(db, time_of, trials=4)
        for disturbed in (lambda batch: batch >= 1, lambda batch: True):
            group = ScriptedGroup(self.script(disturbed))
            with Database(db) as database:
                tuner = Tuner(database, Workers(lambda: group), group.hardware, PassingScreen())  # noqa: B023
                assert tuner.tune(problem_class(OP)(**PROBLEM), Budget(8)) is None
                assert tuner.disturbed == "GPU 0 is shared"
                assert list(database.records()) == [first]

    def test_are_not_learned_by_the_next_run(self, db):
        from taxfree_tune.tuning.tuner import Budget, Tuner
        from taxfree_tune.workers.group import Workers

        group = ScriptedGroup(self.script(lambda batch: True))
        with Database(db) as database:
            tuner = Tuner(database, Workers(lambda: group), group.hardware, PassingScreen())
            assert tuner.tune(problem_class(OP)(**PROBLEM), Budget(2)) is None
        record, trials, _ = tune(db, time_of, trials=2)
        assert record.trials == 2
        assert sum(not trial.reason for trial in trials) == 2


class TestAgain:
    def noisy(self, seed, true_us):
        """Medians of noisy samples around each candidate's true time."""
        from taxfree_tune.measuring.timer import Timing
        from taxfree_tune.measuring.trial import Outcome, key

        noise = random.Random(seed)

        def script(candidate):
            if candidate.variant == "baseline":
                us = 100.0
            else:
                us = true_us.setdefault(key(candidate), 50.0 + 5.0 * noise.random())
            samples = tuple(us * noise.gauss(1.0, 0.01) for _ in range(9))
            return Outcome("measured", timings={"eager": Timing(samples, 0.0)}, relative_error=0.0)

        return script

    def test_the_pick_is_within_2_percent_of_the_first(self, tmp_path):
        from taxfree_tune.measuring.trial import Candidate, key

        for seed in range(3):
            true_us, picks = {}, []
            for trials in (4, 8):
                script = self.noisy(10 * seed + trials, true_us)
                record, _, _ = tune(tmp_path / f"{seed}.sqlite", script, trials, only=["push"])
                winner = Candidate(record.winner.variant, record.winner.config)
                picks.append(true_us[key(winner)])
            assert picks[1] <= 1.02 * picks[0]

    def test_the_recorded_winner_is_timed_again_and_gives_way_to_a_faster_one_only(self, db):
        first, _, _ = tune(db, time_of, trials=4, only=["push"])

        def picked(factor):
            """The winner where all others take so much of the recorded winner's time."""

            def script(candidate):
                if candidate.variant == "baseline":
                    return timed(1000.0)
                is_first = dict(candidate.config) == first.winner.config
                return timed(100.0 if is_first else 100.0 * factor)

            record, _, tried = tune(db, script, trials=4, only=["push"])
            assert first.winner.config in [dict(each.config) for each in tried]
            return record.winner.config

        assert picked(0.99) == first.winner.config
        assert picked(0.97) != first.winner.config

    def test_a_recorded_winner_stays_though_it_beats_the_baseline_by_less_than_3_percent(self, db):
        def script(gain):
            return lambda candidate: timed(
                100.0 if candidate.variant == "baseline" else 100.0 - gain
            )

        assert tune(db, script(3.2), trials=2)[0].winner.variant != "baseline"
        assert tune(db, script(2.8), trials=2)[0].winner.variant != "baseline"
        assert tune(db, script(-0.5), trials=2)[0].winner.variant == "baseline"


class TestFinals:
    def test_have_a_benchs_deadline_and_a_search_a_share_of_it(self, db):
        from taxfree_tune.measuring.groups import deadline_s

        group = ScriptedGroup(time_of)
        tune_on(group, db, trials=4)
        (search, final) = [(repetitions, deadline) for _, repetitions, deadline in group.calls]
        assert final == (3 * search[0], deadline_s(KNOWN["cpu"]))
        assert final[1] == pytest.approx(3 * search[1])

    def test_are_timed_together_again_without_the_one_that_took_the_ranks_down(self, db):
        from taxfree_tune.tuning.tuner import BASELINE

        def dies(candidates, repetitions):
            return repetitions == 9 and "pull" in {each.variant for each in candidates}

        group = ScriptedGroup(time_of, dies=dies)
        record, trials = tune_on(group, db, trials=4)
        (searched, *_), (last, *_) = group.calls[0], group.calls[-1]
        assert last[0] == BASELINE
        assert {each.variant for each in last} == {each.variant for each in searched} - {"pull"}
        assert "pull" not in {each.variant for each in (record.winner, *record.runners_up)}
        assert [t.state for t in trials if t.variant == "pull"] == ["measured", "crashed"]


class TestBudget:
    @pytest.fixture
    def tuned(self, db, monkeypatch):
        """Candidates tried on one problem after the other, each with so many seconds.

        On a GPU a batch takes a second; on the host each candidate does. Finals are like any other.
        """
        from taxfree_tune.tuning import tuner as module
        from taxfree_tune.tuning.tuner import Budget, Tuner
        from taxfree_tune.workers.group import Workers

        now = [0.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

        def run(*seconds, hardware=KNOWN["cpu"], screen=PassingScreen):
            is_gpu = hardware.backend != "interpreter"

            def script(candidate):
                now[0] += float(not is_gpu or candidate.variant == "baseline")
                return time_of(candidate)

            group, counts = ScriptedGroup(script, hardware), []
            with Database(db) as database:
                every = list(variants(OP))  # so that so small a problem has enough to try
                workers = Workers(lambda: group)
                tuner = Tuner(database, workers, hardware, screen(), only=every)
                for m, allowed in enumerate(seconds, 5):
                    problem = problem_class(OP)(**PROBLEM | {"m": m})
                    record = tuner.tune(problem, Budget(40, allowed))
                    counts.append(record and record.trials)
            return counts

        return run

    def test_batches_are_cut_to_what_the_pace_allows(self, tuned):
        first, second, third = tuned(9.0, 6.0, 1.0)
        assert first == 8  # two batches of four: no pace is known
        assert 1 < second <= 4
        assert third == 1

    def test_batches_on_a_gpu_are_whole(self, tuned):
        assert tuned(1.5, 2.4, 0.5, hardware=KNOWN["h200"]) == [24, 12, 12]

    @pytest.mark.parametrize(("allowed", "tried"), [(4.5, 24), (3.5, 12)])
    def test_a_batch_that_must_be_compiled_first_takes_longer(self, tuned, allowed, tried):
        assert tuned(allowed, hardware=KNOWN["h200"], screen=CompilingScreen) == [tried]

    def test_a_problem_whose_time_is_over_is_not_tried(self, tuned):
        assert tuned(9.0, -1.0) == [8, None]

    def test_where_most_fail_the_search_ends_and_says_so(self, db):
        from taxfree_tune.measuring.trial import Outcome

        def script(candidate):
            is_baseline = candidate.variant == "baseline"
            return timed(9.0) if is_baseline else Outcome("hung", "rank 0 waited")

        events, group = [], ScriptedGroup(script)
        record, trials = tune_on(group, db, trials=3, progress=events.append)
        assert len(group.tried) == 9
        assert sum(trial.state == "hung" for trial in trials) == 9
        assert events[-1].note == "given up after 9 candidates: most cannot be used"
        assert (record.winner.variant, record.trials) == ("baseline", 0)

    def test_a_trial_tells_its_share_of_the_time_of_its_batch(self, db, monkeypatch):
        from taxfree_tune.tuning import tuner as module

        now = [0.0]
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

        def script(candidate):
            now[0] += 6.0 if candidate.variant == "baseline" else 1.0
            return time_of(candidate)

        _, trials, _ = tune(db, script, trials=4)
        seconds = [trial.seconds for trial in trials if trial.state == "measured"]
        assert seconds == [(6.0 + 4.0) / 5] * 4


class TestAhead:
    FIRST, SECOND = (problem_class(OP)(**PROBLEM | {"m": m}) for m in (5, 6))

    @staticmethod
    def tuner(database, screen, **options):
        from taxfree_tune.tuning.tuner import Tuner
        from taxfree_tune.workers.group import Workers

        group = ScriptedGroup(time_of, KNOWN["h200"])
        return Tuner(database, Workers(lambda: group), group.hardware, screen, **options)

    def test_the_next_problems_first_batch_is_compiled_while_this_one_is_timed(self, db):
        """Also where this one's winner would come first in a search of the next."""
        from taxfree_tune.tuning.tuner import Budget

        screen = BeginningScreen()
        with Database(db) as database:
            tuner = self.tuner(database, screen)
            tuner.tune(self.FIRST, Budget(12), following=self.SECOND)
            assert [problem for problem, _ in screen.asked] == [self.FIRST]
            tuner.tune(self.SECOND, Budget(12))
        (of_first, at_once), (of_second, ahead) = screen.begun
        assert (of_first, of_second) == (self.FIRST, self.SECOND)
        for begun, (_, asked) in zip((at_once, ahead), screen.asked, strict=True):
            assert begun == asked[: len(begun)]
            assert len(begun) > 3

    def test_no_more_than_will_be_tried(self, db):
        from taxfree_tune.tuning.tuner import Budget

        screen = BeginningScreen()
        with Database(db) as database:
            self.tuner(database, screen).tune(self.FIRST, Budget(3), following=self.SECOND)
        assert [len(begun) for _, begun in screen.begun] == [3, 3]

    def test_what_is_known_already_is_not(self, db):
        from taxfree_tune.tuning.tuner import Budget

        screen = BeginningScreen()
        with Database(db) as database:
            tuner = self.tuner(database, screen, only=["push"])
            tuner.tune(self.SECOND, Budget(12))
            tuner.tune(self.FIRST, Budget(12), following=self.SECOND)
        (_, tried), (_, begun) = screen.asked[0], screen.begun[-1]
        assert not [each for each in begun if each in tried]


class TestHasty:
    def test_it_waits_for_no_busy_gpu_and_keeps_no_study(self, db):
        from taxfree_tune.tuning.tuner import Budget, Tuner
        from taxfree_tune.workers.group import Workers

        busy = dataclasses.replace(timed(9.0), disturbed="GPU 0 is shared")
        group = ScriptedGroup(lambda candidate: busy)
        with Database(db) as database:
            tuner = Tuner(database, Workers(lambda: group), CPU, PassingScreen(), is_hasty=True)
            assert tuner.tune(problem_class(OP)(**PROBLEM), Budget(8)) is None
            assert tuner.disturbed == "GPU 0 is shared"
            assert list(database.records()) == []
        assert len(group.calls) == 1
        assert [path.name for path in db.parent.iterdir()] == [db.name]


class TestSearching:
    def test_the_same_seed_and_times_give_the_same_trials(self, tmp_path):
        runs = [tune(tmp_path / f"{i}.sqlite", time_of, trials=9, seed=3)[2] for i in (1, 2)]
        assert runs[0] == runs[1]

    def test_the_same_command_goes_on_where_it_was(self, db):
        _, first, _ = tune(db, time_of, trials=5)
        record, trials, tried = tune(db, time_of, trials=9)
        assert trials[: len(first)] == first
        measured = [json.dumps([t.variant, t.config], sort_keys=True) for t in trials
                    if t.state == "measured"]  # fmt: skip
        assert len(measured) == len(set(measured)) == 9
        assert record.trials == 9
        finals = 5
        assert len(tried) == 4 + finals

    def test_a_changed_kernel_is_searched_anew_and_the_others_are_not(self, db, monkeypatch):
        from taxfree import fingerprints

        before = fingerprints.versions(OP)
        tune(db, time_of, trials=4, only=["push", "pull"])
        monkeypatch.setattr(fingerprints, "versions", lambda op: before | {"push": 2})
        record, trials, _ = tune(db, time_of, trials=4, only=["push", "pull"])
        again = [t for t in trials if t.variant == "push" and t.version == 2]
        assert again
        pulls = [str(t.config) for t in trials if t.variant == "pull"]
        assert len(pulls) == len(set(pulls))
        versions = {each.variant: each.version for each in (record.winner, *record.runners_up)}
        assert versions["push"] == 2

    def test_a_record_names_the_commit_of_the_sources(self, db):
        from taxfree import fingerprints

        record, _, _ = tune(db, time_of, trials=1)
        assert record.provenance.get("commit") == fingerprints.source_commit()

    def test_the_winner_of_another_version_is_measured_first(self, db, tmp_path):
        problem, cpu = problem_class(OP)(**PROBLEM, dtype="float16"), KNOWN["cpu"]
        record, _, _ = tune(tmp_path / "another.sqlite", time_of, trials=1)
        config = variants(OP)["push"].seed_configs(problem, cpu)[-1]
        earlier = dataclasses.replace(record.baseline, variant="push", config=config, version=0)
        with Database(db) as database:
            database.put(dataclasses.replace(record, winner=earlier))
        _, trials, _ = tune(db, time_of, trials=1)
        first = trials[0]
        todays = variants(OP)["push"].version
        assert (first.variant, first.config, first.version) == ("push", config, todays)

    @pytest.mark.parametrize("place", ["user", "shipped"])
    def test_what_is_served_today_is_measured_beside_the_named_variants(
        self, db, tmp_path, monkeypatch, place
    ):
        first = db if place == "user" else tmp_path / "first.sqlite"
        record, _, _ = tune(first, time_of, trials=4, only=["push"])
        if place == "shipped":
            monkeypatch.setattr("taxfree_tune.tuning.first.shipped_records", lambda: (record,))
        again, _, _ = tune(db, time_of, trials=1, only=["pull"])
        measured = [(each.variant, each.config) for each in (again.winner, *again.runners_up)]
        assert (record.winner.variant, record.winner.config) in measured
        assert again.winner.median_us["graph"] <= record.winner.median_us["graph"]

    def test_only_the_named_variants_are_tried(self, db):
        _, _, tried = tune(db, time_of, trials=4, only=["push"])
        assert {each.variant for each in tried} == {"push"}

    def test_first_configs_of_every_variant_come_first(self, db):
        _, _, tried = tune(db, time_of, trials=4)
        assert sorted(each.variant for each in tried[:3]) == ["one_shot", "pull", "push"]

    def test_steps_on_the_way_are_tried_only_by_name(self, db, tmp_path):
        _, _, tried = tune(db, time_of, trials=30)
        assert "push_two_kernel" not in {each.variant for each in tried}
        other = tmp_path / "other.sqlite"
        _, _, tried = tune(other, time_of, trials=2, only=["push_two_kernel"])
        assert {each.variant for each in tried} == {"push_two_kernel"}

    @pytest.mark.parametrize("place", ["user", "shipped"])
    def test_what_won_with_the_other_type_is_tried_behind_the_defaults(
        self, db, tmp_path, monkeypatch, place
    ):
        first = db if place == "user" else tmp_path / "first.sqlite"
        record, _, tried = tune(first, time_of, trials=12, dtype="bfloat16", only=["push"])
        winner = (record.winner.variant, record.winner.config)
        assert (tried[0].variant, tried[0].config) != winner
        if place == "shipped":
            monkeypatch.setattr("taxfree_tune.tuning.first.shipped_records", lambda: (record,))
        _, _, tried = tune(db, time_of, trials=2, only=["push"])
        assert (tried[1].variant, tried[1].config) == winner

    def test_what_fails_is_recorded_with_its_reason_and_not_tried_again(self, db):
        from taxfree_tune.measuring.trial import Outcome

        def script(candidate):
            if candidate.variant == "pull":
                return Outcome("wrong", "3 of 80 values wrong on rank 1")
            return time_of(candidate)

        record, trials, _ = tune(db, script, trials=6)
        wrong = [trial for trial in trials if trial.variant == "pull"]
        assert wrong
        assert {trial.state for trial in wrong} <= {"wrong", "refused"}
        assert "3 of 80 values wrong on rank 1" in {trial.reason for trial in wrong}
        assert sum(trial.state == "measured" for trial in trials) == 6
        assert record.winner.variant != "pull"
        again = tune(db, script, trials=6)[2]
        assert "pull" not in {each.variant for each in again}

    def test_what_a_screen_refused_is_judged_again(self, db):
        _, before = tune_on(ScriptedGroup(time_of), db, 2, screen=RefusingScreen, only=["push"])
        assert [trial.config for trial in before if trial.reason == "spills"] == [DEFAULT]
        _, after = tune_on(ScriptedGroup(time_of), db, 4, only=["push"])
        assert DEFAULT in [trial.config for trial in after if trial.state == "measured"]

    def test_what_is_refused_again_is_stored_once(self, db):
        for trials in (2, 4):
            group = ScriptedGroup(time_of)
            _, after = tune_on(group, db, trials, screen=RefusingScreen, only=["push"])
        assert [trial.config for trial in after if trial.reason == "spills"] == [DEFAULT]
        assert DEFAULT not in [each.config for each in group.tried]

    @pytest.mark.parametrize("again", ["push", "pull"])
    def test_what_a_variant_has_come_to_refuse_is_no_finalist(self, db, monkeypatch, again):
        """Be it known from trials, or from the record of a search among other variants."""
        record, _, _ = tune(db, time_of, trials=3, only=["push"])
        known = [each.config for each in (record.winner, *record.runners_up)]
        assert any(known)
        monkeypatch.setattr(
            variants(OP)["push"],
            "illegal_reason",
            lambda problem, hardware, config: "no" if dict(config) in known else None,
        )
        record, _, tried = tune(db, time_of, trials=3, only=[again])
        assert tried
        assert all(each.config not in known for each in tried)
        assert all(each.config not in known for each in (record.winner, *record.runners_up)
                   if each.variant == "push")  # fmt: skip

    def test_a_search_goes_on_in_a_space_that_has_changed(self, db, monkeypatch):
        tune(db, time_of, trials=3, only=["push"])
        push = variants(OP)["push"]
        space = dict(push.space(problem_class(OP)(**PROBLEM), KNOWN["cpu"]))
        parameter = max(space, key=lambda name: len(space[name]))
        space[parameter] = space[parameter][:-1]
        monkeypatch.setattr(push, "space", lambda problem, hardware: space)
        record, trials, _ = tune(db, time_of, trials=6, only=["push"])
        assert record.trials == 6
        assert sum(trial.state == "measured" for trial in trials) in (6, 7)

    def test_a_baseline_that_fails_ends_the_search(self, db):
        from taxfree.errors import WorkerLost
        from taxfree_tune.measuring.trial import Outcome

        def script(candidate):
            failed = Outcome("failed", "no such library")
            return failed if candidate.variant == "baseline" else time_of(candidate)

        with pytest.raises(WorkerLost, match="baseline itself failed: no such library"):
            tune(db, script, trials=2)


# -- on real ranks ------------------------------------------------------------------------------


def start(db, kernels=KERNELS, **options):
    given = {
        "db": str(db), "problem": PROBLEM, "trials": 2, "seed": 0, "only": None,
        "deadline_s": 180.0, "timeout_s": 30.0,
    } | options  # fmt: skip
    return subprocess.Popen(
        [PYTHON, "-W", "ignore", "-m", "tests.tune.tune_process", json.dumps(given)],
        env=environment(kernels, TMPDIR=str(db.parent)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, seconds=400):
    """What a controller said, by kind; the last of each."""
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"it still ran after {seconds} s: {out} {err}") from None
    assert process.returncode == 0, err
    return dict(json.loads(line) for line in out.splitlines())


def states(said):
    return {trial["variant"]: (trial["state"], trial["reason"]) for trial in said["trials"]}


#: what ends the ranks, which then start anew, with its state and a part of its reason
ENDS_RANKS = {
    "crashes": ("crashed", "rank 1 died in try_candidates (SIGABRT)"),
    "hangs": ("hung", "waited 1.5 s for rank"),
    "raises": ("failed", "OSError: no"),
    "poisons": ("failed", "illegal memory access"),
    "sleeps": ("hung", "did not finish try_candidates in time"),
}


@pytest.mark.timeout(900)
class TestOnRealRanks:
    def test_bad_candidates_are_recorded_with_their_reasons_and_skipped(self, db, tmp_path, sample):
        expected = {
            "illegal_reason": ("failed", "the moon is wrong"),
            "is_wrong": ("wrong", "values wrong on rank 1"),
            "works": ("measured", ""),
        } | {name: ENDS_RANKS[name] for name in sample.one_of(list(ENDS_RANKS))}
        kernels = copy_of_kernels(tmp_path, **{name: candidates.EVERY[name] for name in expected})
        run = {"trials": len(expected), "timeout_s": 1.5, "deadline_s": 30.0}
        said = finish(start(db, kernels, only=list(expected), **run))
        found = states(said)
        for name, (state, reason) in expected.items():
            assert found[name][0] == state
            assert reason in (found[name][1] or "")
        assert said["record"]["baseline"]["variant"] == "baseline"

    def test_a_worker_killed_in_any_phase_of_a_trial_costs_that_candidate_only(
        self, db, tmp_path, sample
    ):
        phases = ("check", *sample.one_of(("plan", "compile", "time")))
        kernels = copy_of_kernels(tmp_path, **candidates.dies(phases), **candidates.WORKS)
        said = finish(start(db, kernels, trials=4, only=["dies", "works"]))
        died = {t["config"]["PHASE"]: t for t in said["trials"] if t["variant"] == "dies"}
        assert died.keys() == set(phases)
        for trial in died.values():
            assert trial["state"] == "crashed"
            assert "rank 1 died in try_candidates (SIGKILL)" in trial["reason"]
        assert states(said)["works"][0] == "measured"
        assert said["record"]["trials"] == 1


def key():
    from taxfree.fingerprints import hardware_fingerprint

    fields = dataclasses.asdict(problem_class(OP)(**PROBLEM))
    return record_key(OP, fields, hardware_fingerprint(KNOWN["cpu"]))
