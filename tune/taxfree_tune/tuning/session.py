"""A tuning session: problems of any world sizes, with one group of workers per world size."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taxfree.errors import TaxfreeError
from taxfree.settings import Settings
from taxfree_check.cross_compile.screen import Screen, ScreenVerdict
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune import devices
from taxfree_tune.tuning.candidates import first_candidates, unsupported_reasons, variants_for
from taxfree_tune.tuning.search import Search
from taxfree_tune.tuning.tuner import Budget, Progress, Tuner
from taxfree_tune.workers.group import WorkerGroup, Workers
from taxfree_tuning_db import Database, Record

_POLL_S = 1.0  # for another process that tunes


@dataclass(frozen=True)
class Effort:
    """How a search looks for the fastest candidate.

    Args:
        trials: candidates measured per problem.
        seconds: for all problems together; None for no limit.
        seed: of the searches.
        only: names of variants to try; None for those that are searched by default.
    """

    trials: int
    seconds: float | None = None
    seed: int = 0
    only: Sequence[str] | None = None


@dataclass(frozen=True)
class Tuned:
    """A tuned problem.

    Args:
        record: as stored.
        mode: "graph" or "eager": the mode that decided.
        not_measured: state -> number of candidates that were not timed.
    """

    record: Record
    mode: str
    not_measured: Counter[str]


@dataclass(frozen=True)
class NotTuned:
    """A problem that was left out.

    Args:
        problem: the problem.
        state: "refused" where no variant can serve it, "not tried" where the budget ran out,
            "disturbed" where the GPUs were busy or throttled.
        reason: one line.
    """

    problem: Problem
    state: str
    reason: str


def run(
    problems: Sequence[Any],
    fabric: str,
    database: Database,
    effort: Effort,
    progress: Progress = lambda event: None,
) -> Iterator[Tuned | NotTuned]:
    """Tune problems, and store their records.

    Args:
        problems: of any operations and world sizes.
        fabric: "host", "cuda" or "rocm".
        database: opened for writing; no other session may write into it meanwhile.
        effort: of the searches.
        progress: receives every event of a search.

    Yields:
        Each problem when it is finished; closing the iterator ends the workers.

    Raises:
        DatabaseError: the database cannot be written.
        TaxfreeError: another session writes into it.
        TaskFailed, WorkerLost, WrongResult, UsageError: as of `Tuner.tune`.
    """
    database.require_writable()  # before hours of measuring
    begun, remaining = time.monotonic(), len(problems)
    with alone(database.path):
        for world_size in dict.fromkeys(problem.world_size for problem in problems):
            alike = [problem for problem in problems if problem.world_size == world_size]
            with _tuner(alike, fabric, database, effort, progress) as tuner:
                for problem, following in itertools.zip_longest(alike, alike[1:]):
                    share = None
                    if effort.seconds is not None:
                        share = (begun + effort.seconds - time.monotonic()) / remaining
                    budget = Budget(effort.trials, share)
                    yield tune_one(tuner, problem, budget, effort.only, following)
                    remaining -= 1


def tune_one(
    tuner: Tuner,
    problem: Problem,
    budget: Budget,
    only: Sequence[str] | None = None,
    following: Problem | None = None,
) -> Tuned | NotTuned:
    """The outcome of a problem."""
    if not variants_for(problem, tuner.hardware, only):
        reasons = unsupported_reasons(problem, tuner.hardware, only)
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return NotTuned(problem, "refused", why)
    record = tuner.tune(problem, budget, following)
    if record is None and tuner.disturbed:
        return NotTuned(problem, "disturbed", tuner.disturbed)
    if record is None:
        return NotTuned(problem, "not tried", "out of budget")
    return Tuned(record, tuner.mode, tuner.not_measured)


@contextlib.contextmanager
def _tuner(
    problems: Sequence[Any],
    fabric: str,
    database: Database,
    effort: Effort,
    progress: Progress,
) -> Iterator[Tuner]:
    """A tuner with workers for problems of one world size."""
    world_size, heap_bytes = problems[0].world_size, devices.heap_bytes(problems)
    timeout_s = Settings.from_environment().timeout_s

    def start() -> WorkerGroup:
        return WorkerGroup(world_size, fabric, heap_bytes, timeout_s)

    with Workers(start) as workers:
        hardware = workers.group().hardware
        with Screen(hardware, heap_bytes=heap_bytes) as screen:
            yield Tuner(database, workers, hardware, screen, effort.seed, effort.only, progress)


@contextlib.contextmanager
def alone(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Keep other processes from tuning into a database; released when this process ends.

    Two searches would mark each other's trials as failed, and disturb each other's timings. This is
    not SQLite's lock, so other processes may still read and write.

    Args:
        wait_s: how long to wait for another process.

    Raises:
        TaxfreeError: another process is tuning into it.
    """
    deadline = time.monotonic() + wait_s
    with path.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TaxfreeError(
                        f"another taxfree tune writes into {path}",
                        "wait for it, or give another --db",
                    ) from None
                time.sleep(_POLL_S)
        yield


def dry_run(
    problem: Problem,
    screen: Screen,
    hardware: Hardware,
    trials: int,
    seed: int = 0,
    only: Sequence[str] | None = None,
) -> list[ScreenVerdict]:
    """Up to `trials` candidates that a search would try first on `hardware`, and those refused.

    It needs no device. Without times the search cannot learn: later proposals of a real one differ.
    """
    variants = variants_for(problem, hardware, only)
    if not variants:
        reasons = unsupported_reasons(problem, hardware, only)
        return [ScreenVerdict(name, {}, {}, reason) for name, reason in reasons.items()]
    search = Search(variants, problem, hardware, seed)
    search.enqueue(first_candidates(variants, problem, hardware))
    asked = [(candidate.variant, candidate.config) for candidate in search.ask(trials)]
    illegal = [
        ScreenVerdict(candidate.variant, candidate.config, {}, reason)
        for candidate, reason in search.take_illegal()
    ]
    return screen.verdicts(op_of(problem), problem, asked) + illegal
