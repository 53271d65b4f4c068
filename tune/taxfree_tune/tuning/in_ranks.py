"""Tuning in the processes of an engine's ranks, which no candidate may end.

Rank 0 searches, as `taxfree tune` does, and all ranks try its candidates. What can be learned of a
candidate without the ranks is learned elsewhere: compilers run in processes of their own, and the
screen refuses what they compile wrongly, or what asks for more than the GPU has. What is left is
tried with short timeouts; where it fails on a rank, all ranks give it up.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from taxfree import fingerprints
from taxfree._runtime.aside import aside
from taxfree._runtime.autotuning import Autotuned
from taxfree._runtime.collectives import vote
from taxfree.errors import TaxfreeError, one_line
from taxfree_check.cross_compile.screen import Screen
from taxfree_kernels.errors import PeerTimeout
from taxfree_kernels.fabric.base import Fabric, Workspace
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune.measuring.groups import deadline_s
from taxfree_tune.measuring.trial import close_bench, warm_bench
from taxfree_tune.tuning.first import FirstCandidates
from taxfree_tune.tuning.session import NotTuned, Tuned, alone, tune_one
from taxfree_tune.tuning.tuner import BATCH, Budget, Tuner
from taxfree_tune.workers.group import TaskFailed
from taxfree_tune.workers.local import LocalGroup, together
from taxfree_tuning_db import Database, Record, record_key, stale_reason

TRIALS = 32  # candidates of a problem, at most
_MOST_S = 3.0  # after which no further candidates of a problem are compiled; finals take a second
_WAIT_S = 2.0  # in kernels: all ranks come to a candidate at once
_GRACE_S = 15.0  # in which another group finishes what it has begun

_log = logging.getLogger("taxfree")


class RankTuner:
    """Tunes problems on the ranks of a fabric.

    Args:
        fabric: of a runtime, which makes no calls meanwhile.
        heap_bytes: of its arena; 0 where nobody knows.
        database: of rank 0.
    """

    def __init__(self, fabric: Fabric, heap_bytes: int, database: Path) -> None:
        self._fabric, self._database = fabric, database
        self._screen = Screen(fabric.hardware, heap_bytes=heap_bytes or None)
        self._first = FirstCandidates(fabric.hardware, self._screen, None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="taxfree expects")
        if fabric.rank == 0:
            self._screen.start()

    def expect(self, problem: Problem) -> None:
        """Compile what will be tried first for a problem, beside what the ranks do meanwhile."""
        if self._fabric.rank == 0:
            self._thread.submit(self._compile_ahead, problem)

    def _compile_ahead(self, problem: Problem) -> None:
        with Database(self._database) as database:  # of this thread
            self._first.compile_ahead(database, problem, BATCH)

    def tune(self, problems: Sequence[Problem], seconds: float) -> list[Autotuned]:
        """Tune problems, the first ones first, until the time is over; collective.

        Returns:
            An outcome for each, the same on all ranks.

        Raises:
            PeerTimeout: a rank is lost.
        """
        timeout_s = self._fabric.pool.timeout_s
        if self._fabric.has_graphs:  # interpreted ranks may be that late
            _bound_waits(self._fabric, min(timeout_s, _WAIT_S))
        outcomes = aside(self._fabric.device, partial(self._tune, problems, seconds))
        close_bench()
        if self._fabric.has_graphs:
            _bound_waits(self._fabric, timeout_s)
        return outcomes

    @torch.no_grad()
    def _tune(self, problems: Sequence[Problem], seconds: float) -> list[Autotuned]:
        fabric = _with_own_scratch(self._fabric)
        return together(fabric, partial(self._lead, fabric, problems, seconds))

    def close(self) -> None:
        """End the compilers."""
        self._thread.shutdown(cancel_futures=True)
        self._screen.close()

    def _lead(
        self, fabric: Fabric, problems: Sequence[Problem], seconds: float, ranks: LocalGroup
    ) -> list[Autotuned]:
        outcomes: list[Autotuned] = []
        reason = "out of budget"
        try:
            for outcome in self._outcomes(fabric, ranks, problems, time.monotonic() + seconds):
                outcomes.append(outcome)
        except PeerTimeout:
            raise
        except Exception as error:  # an engine serves on without records
            reason = one_line(error)
            _log.warning("tuning has ended: %s", reason, exc_info=not hasattr(error, "hint"))
        return [
            *outcomes,
            *(Autotuned(problem, None, reason) for problem in problems[len(outcomes) :]),
        ]

    def _outcomes(
        self, fabric: Fabric, ranks: LocalGroup, problems: Sequence[Problem], deadline: float
    ) -> Iterator[Autotuned]:
        """The outcomes of problems until the time is over."""
        with Database(self._database) as database:
            database.require_writable()
            with alone(database.path, deadline + _GRACE_S - time.monotonic()):
                tuner = Tuner(
                    database, ranks, fabric.hardware, self._screen, is_hasty=True, first=self._first
                )
                if fabric.has_graphs:  # interpreted ranks compile nothing
                    new = [
                        problem
                        for problem in problems
                        if not _own_record(database, fabric, problem)
                    ]
                    for problem in new:
                        tuner.compile_ahead(problem, TRIALS)
                    for problem in new[:1]:
                        _open(ranks, fabric, problem)
                took = 0.0
                for index, problem in enumerate(problems):
                    begun = time.monotonic()
                    if (record := _own_record(database, fabric, problem)) is not None:
                        yield Autotuned(problem, record)  # others have tuned it since
                        continue
                    if deadline - begun < took:
                        return
                    share = min(_MOST_S, (deadline - begun) / (len(problems) - index))
                    outcome = _tuned(tuner, problem, Budget(TRIALS, share))
                    took = time.monotonic() - begun
                    _log.info("%s, %.1f s", _said(outcome, tuner.mode), took)
                    yield dataclasses.replace(outcome, seconds=took)


def _with_own_scratch(fabric: Fabric) -> Fabric:
    """The same ranks, with scratch memory that is freed, and a barrier that failed ranks leave."""
    memory = fabric.library_memory  # what is registered stays so
    tuned_fabric = copy.copy(fabric)
    tuned_fabric.__dict__["library_memory"] = memory
    tuned_fabric.__dict__["workspace"] = Workspace(fabric.device, beside=fabric.workspace)
    tuned_fabric.__dict__["barrier"] = partial(_meet, fabric)
    return tuned_fabric


def _meet(fabric: Fabric) -> None:
    fabric.synchronize()
    vote(fabric.group, None)


def _bound_waits(fabric: Fabric, seconds: float) -> None:
    for pool in (fabric.pool, fabric.device_barrier.pool):
        pool.bound_waits(seconds)


def _own_record(database: Database, fabric: Fabric, problem: Problem) -> Record | None:
    """The database's record of a problem, if it was tuned, with today's kernels."""
    op, hardware = op_of(problem), fingerprints.hardware_fingerprint(fabric.hardware)
    record = database.get(record_key(op, dataclasses.asdict(problem), hardware))
    if record is None or record.is_lent:
        return None
    return record if stale_reason(record, fingerprints.versions(op)) is None else None


def _open(ranks: LocalGroup, fabric: Fabric, problem: Problem) -> None:
    """Let the ranks make a problem's inputs while its candidates are compiled."""
    with contextlib.suppress(TaskFailed):  # the tuner meets it again
        ranks.call(
            warm_bench,
            deadline_s(fabric.hardware),
            op=op_of(problem),
            problem=dataclasses.asdict(problem),
        )


def _tuned(tuner: Tuner, problem: Problem, budget: Budget) -> Autotuned:
    try:
        outcome = tune_one(tuner, problem, budget)
    except TaxfreeError as error:  # the library itself fails, for want of memory
        outcome = NotTuned(problem, "failed", error.message)
    if isinstance(outcome, Tuned):
        return Autotuned(problem, outcome.record)
    assert isinstance(outcome, NotTuned)
    return Autotuned(problem, None, f"{outcome.state}: {outcome.reason}")


def _said(outcome: Autotuned, mode: str) -> str:
    record = outcome.record
    if record is None:
        return f"{outcome.problem} is not tuned: {outcome.reason}"
    winner, library = record.winner, record.baseline
    return (
        f"{outcome.problem}: {winner.variant} {winner.config} {winner.median_us[mode]:.1f} us, "
        f"library {library.median_us[mode]:.1f} us, {record.trials} candidates"
    )
