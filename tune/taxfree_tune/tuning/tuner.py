"""The tuning controller: owns the search, the database and the deadline; workers are replaceable.

A batch of candidates is screened by cross-compiling it, then handed to the rank workers, which
vote on compilation and correctness before they time it together with the baseline. Every outcome is
recorded; what was measured or failed is not tried again. The best are measured once more, since a
search's minimum is biased low, and the winner is adopted only if it clearly beats the baseline, and
the recorded winner. Times of a busy or throttled GPU are recorded as such and decide nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from taxfree import fingerprints
from taxfree.errors import WorkerLost, WrongResult
from taxfree_check.cross_compile.screen import Screen
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, Problem, op_of
from taxfree_tune.measuring.results import Mode
from taxfree_tune.measuring.trial import Candidate, Outcome, key
from taxfree_tune.tuning.candidates import is_legal, variants_for
from taxfree_tune.tuning.first import FirstCandidates, own_records
from taxfree_tune.tuning.history import trials_that_hold
from taxfree_tune.tuning.search import Search
from taxfree_tune.tuning.together import ATTEMPTS, BASELINE, Together
from taxfree_tune.tuning.winner import measurement_of, record_of, trial_of
from taxfree_tune.workers.group import Groups
from taxfree_tuning_db import Database, Measurement, Record, record_key

BATCH = 12  # candidates that a GPU times together
FINALISTS = 5
OTHER_FINALISTS = 2
_PAUSE_S = 5.0  # after a batch that was disturbed
_TRIED_PER_TRIAL = 3  # where most candidates fail, the budget bounds what is tried, not measured


@dataclass(frozen=True)
class Budget:
    """When to stop searching a problem.

    Args:
        trials: candidates measured; at most three times as many are handed to workers.
        seconds: wall clock, or None.
    """

    trials: int
    seconds: float | None = None


class Progress(Protocol):
    """Told how a search goes on."""

    def __call__(self, event: Event) -> None: ...


@dataclass(frozen=True)
class Event:
    """A step of a search.

    Args:
        problem: what is tuned.
        done, wanted: candidates measured, and the budget of them.
        best_us, best: the fastest so far, None before any.
        baseline_us: the library's, None before any.
        note: what just happened to a candidate, if it was not measured; or why the search ends.
    """

    problem: Problem
    done: int
    wanted: int
    best_us: float | None = None
    best: Candidate | None = None
    baseline_us: float | None = None
    note: str = ""


@dataclass
class _Study:
    """A problem that is tuned.

    Args:
        problem, op: the problem, and its operation.
        key: of its record.
        search: what is tried next.
        formerly_illegal: candidates that an earlier run was refused, of which there are trials.
    """

    problem: Problem
    op: str
    key: str
    search: Search
    formerly_illegal: set[str]


class Tuner:
    """Tunes problems, one after another.

    Args:
        database: where records and trials go; opened for writing.
        workers: the ranks.
        hardware: of the ranks.
        screen: rejects candidates that cannot run before they reach the device.
        seed: of the search.
        only: names of variants to try; those that are searched by default.
        progress: receives every event.
        is_hasty: wait for no GPU that is busy.
        first: what searches ask for first; its own by default.

    Attributes:
        hardware: of the workers' devices.
        mode, modes: "graph" or "eager": the mode that decides, and all modes that are timed.
        not_measured: for the last problem, state -> number of candidates that were not timed.
        disturbed: why its times cannot be trusted; empty if they can.
    """

    def __init__(
        self,
        database: Database,
        workers: Groups,
        hardware: Hardware,
        screen: Screen,
        seed: int = 0,
        only: Sequence[str] | None = None,
        progress: Progress = lambda event: None,
        is_hasty: bool = False,
        first: FirstCandidates | None = None,
    ) -> None:
        self._is_hasty = is_hasty
        self._database, self.hardware = database, hardware
        self._screen, self._seed, self._only, self._progress = screen, seed, only, progress
        self._fingerprint = fingerprints.hardware_fingerprint(hardware)
        self._pace_s: float | None = None  # of a candidate, with its share of the finals
        self._compile_s = self._batch_s = 0.0  # of the last batch: its slowest, and its trials
        self._finals_s: float | None = None  # of the last problem
        self._together = Together(workers, hardware, 1 if is_hasty else ATTEMPTS)
        self._first = first or FirstCandidates(hardware, screen, only)
        self.mode, self.modes = self._together.mode, self._together.modes

    def tune(
        self, problem: Problem, budget: Budget, following: Problem | None = None
    ) -> Record | None:
        """Search, decide, and store the record of one problem.

        Args:
            problem, budget: what is tuned, and for how long.
            following: the problem that is tuned next: its first candidates are compiled meanwhile.

        Returns:
            The record; None if time ran out before anything was tried, or the decision was
            disturbed. Then no record is stored, and one that there is stays.

        Raises:
            WorkerLost, TaskFailed: ranks cannot be started, or the baseline itself cannot be run.
            WrongResult: the baseline is wrong.
            DatabaseError: the record cannot be stored.
        """
        begun = time.monotonic()
        self.not_measured: Counter[str] = Counter()
        self.disturbed = ""
        study = self._study(problem)
        search = study.search
        asked = tried = 0
        most = _TRIED_PER_TRIAL * budget.trials
        baseline_us: float | None = None
        while search.measured < budget.trials:
            if tried == most:
                note = f"given up after {tried} candidates: most cannot be used"
                self._report(study, budget, baseline_us, note)
                break
            count = self._affordable(budget, time.monotonic() - begun, asked)
            if count == 0:
                break
            batch = search.ask(min(count, most - tried, budget.trials - search.measured))
            asked += len(batch)
            for candidate, reason in search.take_illegal():
                self._store_trial(study, candidate, Outcome("refused", reason))
            if not batch:
                break  # the space is exhausted
            if following is not None:  # behind this batch, on cores that it leaves idle
                self._screen.begin(study.op, problem, _named(batch))
                self.compile_ahead(following, budget.trials)
                following = None
            batch = self._screened(study, batch)
            tried += len(batch)
            began_batch = time.monotonic()
            outcomes = self._together.search(problem, [BASELINE, *batch])
            self._batch_s = time.monotonic() - began_batch
            baseline = outcomes[0]
            if baseline.timings:
                baseline_us = baseline.timings[self.mode].median_us
            tried_now = list(zip(batch, outcomes[1:], strict=True))
            # stored first: the next run learns from the database, also where no study was told
            with self._database.transaction():
                for candidate, outcome in tried_now:
                    self._store_trial(study, candidate, outcome)
            for candidate, outcome in tried_now:
                _tell(search, candidate, outcome, self.mode)
                self._report(study, budget, baseline_us, _note(outcome))
            if baseline.disturbed:
                self.disturbed = baseline.disturbed
                if self._is_hasty:
                    return None
                time.sleep(_PAUSE_S)
        if variants_for(problem, self.hardware, self._only) and not search.has_tried:
            return None
        record = self._decide(study, time.monotonic() - begun)
        if record is not None:
            self._database.put(record)
        if asked:
            self._pace_s = (time.monotonic() - begun) / asked
        return record

    def compile_ahead(self, problem: Problem, trials: int) -> None:
        """Let the screen compile what a search of so many trials will ask for first."""
        self._first.compile_ahead(self._database, problem, min(self._batch, trials))

    def _affordable(self, budget: Budget, spent: float, asked: int) -> int:
        """How many candidates the next batch may have, at the pace of the last problem.

        The first batch of a problem is never empty, so that something is tried for it.
        """
        if budget.seconds is None:
            return self._batch
        if spent > budget.seconds:
            return 0
        if self.mode == "graph":  # a batch takes as long as one candidate: compiling decides
            rest_s = 0.0 if self._finals_s is None else self._batch_s + self._finals_s
            more_s = self._compile_s + rest_s if asked else 0.0
            return self._batch if spent + more_s <= budget.seconds else 0
        if self._pace_s is None:
            return self._batch
        return min(self._batch, max(int(asked == 0), int(budget.seconds / self._pace_s) - asked))

    @property
    def _batch(self) -> int:
        return BATCH if self.mode == "graph" else 4

    # -- the search --------------------------------------------------------------------------

    def _study(self, problem: Problem) -> _Study:
        op, variants = op_of(problem), variants_for(problem, self.hardware, self._only)
        record = record_key(op, dataclasses.asdict(problem), self._fingerprint)
        search = Search(variants, problem, self.hardware, self._seed)
        trials = trials_that_hold(self._database, op, record)
        last = {key(candidate): (candidate, trial) for candidate, trial in trials}
        study = _Study(problem, op, record, search, set())
        for candidate, trial in last.values():
            if trial.state == "refused":  # by rules and a compiler that may have changed
                study.formerly_illegal.add(key(candidate))
            else:
                search.learn(candidate, trial.median_us.get(self.mode))
        search.enqueue(self._first.of(self._database, problem))
        return study

    def _screened(self, study: _Study, batch: list[Candidate]) -> list[Candidate]:
        begun = time.monotonic()
        verdicts = self._screen.verdicts(study.op, study.problem, _named(batch))
        seconds = (time.monotonic() - begun) / len(batch)
        self._compile_s = max(verdict.seconds for verdict in verdicts)
        for candidate, verdict in zip(batch, verdicts, strict=True):
            if verdict.illegal_reason is not None:
                study.search.tell_pruned(candidate, verdict.illegal_reason)
                outcome = Outcome("refused", verdict.illegal_reason, seconds=seconds)
                self._store_trial(study, candidate, outcome)
        return [c for c, v in zip(batch, verdicts, strict=True) if v.illegal_reason is None]

    # -- the result --------------------------------------------------------------------------------

    def _store_trial(self, study: _Study, candidate: Candidate, outcome: Outcome) -> None:
        if outcome.state != "measured":
            self.not_measured[outcome.state] += 1
        if outcome.state == "refused" and key(candidate) in study.formerly_illegal:
            return  # an earlier run has stored it
        self._database.add_trial(study.key, trial_of(study.op, candidate, outcome))

    def _finalists(self, study: _Study, known: Sequence[Candidate]) -> list[Candidate]:
        """The fastest in the deciding mode, then in the other, where dispatch may run them too.

        In each mode the fastest of those that can run several weights is one of them. So is the
        recorded winner, that it is replaced by what is faster side by side. A search restricted to
        some variants keeps all of the record's candidates.
        """
        finalists = [candidate for _, candidate in study.search.best(FINALISTS)]
        trials = self._database.trials(study.key)
        searched = variants_for(study.problem, self.hardware, self._only)
        several = {
            name
            for name, variant in searched.items()
            if variant.serves_several_weights(study.problem)
        }
        for mode in self.modes:
            tried = [
                (trial.median_us[mode], Candidate(trial.variant, trial.config))
                for trial in trials
                if mode in trial.median_us and not trial.reason
            ]
            valid = [pair for pair in tried if study.search.knows(pair[1])]
            ranked = [candidate for _, candidate in sorted(valid, key=lambda pair: pair[0])]
            fastest = [] if mode == self.mode else ranked[:OTHER_FINALISTS]
            fastest += [candidate for candidate in ranked if candidate.variant in several][:1]
            finalists += [candidate for candidate in fastest if candidate not in finalists]
        kept = known[: 1 if self._only is None else None]
        return [*finalists, *(candidate for candidate in kept if candidate not in finalists)]

    def _known(self, study: _Study) -> list[Candidate]:
        """The candidates of what is served today that are still valid, of any version."""
        records = own_records(self._database, study.op, study.key)
        if not records:
            return []
        measured = (records[0].winner, *records[0].runners_up)
        names = [measurement.variant for measurement in measured]
        variants, problem = variants_for(study.problem, self.hardware, names), study.problem
        return [
            Candidate(measurement.variant, measurement.config)
            for measurement in measured
            if measurement.variant in variants
            and is_legal(variants[measurement.variant], problem, self.hardware, measurement.config)
        ]

    def _decide(self, study: _Study, seconds: float) -> Record | None:
        """The record of the finals; None if they were disturbed."""
        known = self._known(study)
        measured = self._side_by_side(study, [BASELINE, *self._finalists(study, known)])
        if self.disturbed:
            return None
        trials = study.search.measured
        commit = fingerprints.source_commit()
        return record_of(
            study.op,
            dataclasses.asdict(study.problem),
            self._fingerprint,
            fingerprints.software_fingerprint(),
            measured,
            trials=trials,
            seconds=seconds,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            incumbent=next(iter(known), None),
            **({} if commit is None else {"commit": commit}),
        )

    def _side_by_side(self, study: _Study, finalists: Sequence[Candidate]) -> list[Measurement]:
        """The baseline and the finalists that do not fail, timed together; the baseline first."""
        begun = time.monotonic()
        outcomes = self._together.finals(study.problem, finalists)
        self._finals_s = time.monotonic() - begun
        measured = []
        for candidate, outcome in zip(finalists, outcomes, strict=True):
            if outcome.state == "measured":
                measured.append((candidate, outcome))
            else:
                study.search.learn(candidate, None)
                self._store_trial(study, candidate, outcome)
        if outcomes[0].state != "measured":
            kind = WrongResult if outcomes[0].state == "wrong" else WorkerLost
            raise kind(f"the baseline itself failed: {outcomes[0].reason}", "see the trials")
        if len(measured) < len(finalists):  # whoever took the group down left the others alone
            survivors = [candidate for candidate, _ in measured]
            return self._side_by_side(study, survivors)
        self.disturbed = "; ".join(dict.fromkeys(o.disturbed for o in outcomes if o.disturbed))
        return [measurement_of(study.op, *pair, self.mode) for pair in measured]

    def _report(self, study: _Study, budget: Budget, baseline_us: float | None, note: str) -> None:
        best_us, best = next(iter(study.search.best(1)), (None, None))
        done = study.search.measured, budget.trials
        self._progress(Event(study.problem, *done, best_us, best, baseline_us, note))


def _named(candidates: Sequence[Candidate]) -> list[tuple[str, Config]]:
    return [(candidate.variant, candidate.config) for candidate in candidates]


def _tell(search: Search, candidate: Candidate, outcome: Outcome, mode: Mode) -> None:
    if outcome.disturbed:
        search.ask_again(candidate)
    elif outcome.state == "measured":
        search.tell(candidate, outcome.timings[mode].median_us)
    else:
        search.tell_pruned(candidate, f"{outcome.state}: {outcome.reason}")


def _note(outcome: Outcome) -> str:
    if outcome.disturbed:
        return f"disturbed, to be measured again: {outcome.disturbed}"
    return "" if outcome.state == "measured" else f"{outcome.state}: {outcome.reason}"
