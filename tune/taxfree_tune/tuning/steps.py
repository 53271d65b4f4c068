"""Tunes a decode step of a model: the config of its kernel, or operations.

Candidates are timed in one run with the library's compiled code in a graph and with our operations;
the record names all of them, and ``taxfree.decode_step`` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal

from taxfree import fingerprints
from taxfree.errors import TaxfreeError, WorkerLost, WrongResult
from taxfree_kernels.decode_step.tuned import STEP, WAYS, StepProblem
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_tune.benching import decoder, step_tasks
from taxfree_tune.benching.model_tasks import Phase
from taxfree_tune.measuring.groups import group_for
from taxfree_tune.measuring.trial import Candidate, Outcome
from taxfree_tune.shapes.models import Model
from taxfree_tune.taxes.step import StepAccount
from taxfree_tune.tuning.search import Search
from taxfree_tune.tuning.together import ATTEMPTS
from taxfree_tune.tuning.winner import measurement_of, record_of, trial_of
from taxfree_tune.workers.group import Workers
from taxfree_tuning_db import Database, Record, record_key

_BATCH = 4  # candidates of one task
_DEADLINE_S = 1800.0  # of a task: weights are drawn, and a library compiles all layers
_GPU_REPETITIONS, _HOST_REPETITIONS = 15, 3
BASELINE, OPERATIONS = Candidate("baseline", {}), Candidate("operations", {})


@dataclass(frozen=True)
class StepToTune:
    """What is tuned.

    Args:
        model: with the layers and the vocabulary that are measured.
        dtype: of weights and cache.
        ranks: over which it is split.
        batch: sequences.
        context: tokens before the measured one.
    """

    model: Model
    dtype: str
    ranks: int
    batch: int
    context: int

    @property
    def problem(self) -> StepProblem:
        """The key of the record."""
        model, ranks, mlp = self.model, self.ranks, self.model.blocks[1]
        return StepProblem(
            batch=self.batch,
            context=self.context + 1,
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads // ranks,
            kv_heads=decoder.kv_heads_of_rank(model, ranks),
            head_dim=model.head_dim,
            intermediate=mlp.inputs // ranks,
            vocabulary=model.vocabulary,
            dtype=self.dtype,
            world_size=ranks,
            x_dtype="same" if model.scales == "none" else "fp8",
            scales=model.scales,
        )

    @property
    def sums(self) -> MatmulAllReduce:
        """The largest operation between ranks."""
        problem = self.problem
        return MatmulAllReduce(
            self.batch, problem.hidden, problem.intermediate, dtype=self.dtype,
            world_size=self.ranks,
        )  # fmt: skip


def explain(asked: StepToTune, fabric: str, records: Sequence[Record]) -> StepAccount:
    """What the time of the kernel is that records choose, on rank 0.

    Raises:
        TaxfreeError: they choose operations, or no kernel serves.
    """
    if fabric == "host":
        raise TaxfreeError(
            "no account of a step: interpreted kernels keep no times", "explain it on GPUs"
        )
    with Workers(lambda: group_for([asked.sums], fabric)) as workers:
        account = workers.group().call(
            step_tasks.explain_step, _DEADLINE_S, model=asked.model, dtype=asked.dtype,
            phase=Phase("decode", asked.batch, asked.context), records=records,
            repetitions=_GPU_REPETITIONS,
        )[0]  # fmt: skip
    if isinstance(account, str):
        raise TaxfreeError(
            f"no account of a step: {account}", "taxfree explain --model NAME, without --op"
        )
    return account


def tune(
    asked: StepToTune,
    fabric: str,
    database: Database,
    trials: int,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[str], object] = lambda line: None,
) -> Record:
    """Search the kernel's config, and store the record of the step.

    Args:
        fabric: "host", "cuda" or "rocm".
        database: opened for writing; its records choose the operations.
        trials: configs measured, at most.
        seconds: after which no further ones are tried; None for no limit.
        seed: of the search.
        progress: gets a line for each candidate.

    Raises:
        WorkerLost, TaskFailed: ranks cannot be started, or the library cannot be run.
        WrongResult: the library, or the operations, are wrong.
        DatabaseError: the record cannot be stored.
    """
    database.require_writable()
    begun, problem = time.monotonic(), asked.problem
    with Workers(lambda: group_for([asked.sums], fabric)) as workers:
        trial = _Trials(asked, workers, database)
        ways = {name: way for name, way in WAYS.items() if way.space(problem, trial.device)}
        search = Search(ways, problem, trial.device, seed)
        search.enqueue([
            Candidate(name, config)
            for name, way in ways.items()
            for config in way.seed_configs(problem, trial.device)
        ])  # fmt: skip
        trial([BASELINE, OPERATIONS])
        while search.measured < trials:
            if seconds is not None and time.monotonic() - begun > seconds:
                break
            batch = search.ask(min(_BATCH, trials - search.measured))
            if not batch:
                break
            for candidate, outcome in zip(batch, trial.each(batch), strict=True):
                if outcome.timings:
                    search.tell(candidate, outcome.timings[trial.mode].median_us)
                else:
                    search.tell_pruned(candidate, outcome.reason)
                progress(_line(candidate, outcome, trial.mode))
        finalists = [candidate for _, candidate in search.best(3)]
        together = [BASELINE, OPERATIONS, *finalists]  # once more, in one run
        for _ in range(ATTEMPTS):
            outcomes = trial(together)
            if not (disturbed := outcomes[0].disturbed):
                break
        else:
            raise TaxfreeError(f"the decision was disturbed: {disturbed}", "rerun on idle GPUs")
        measured = [
            measurement_of(STEP, candidate, outcome, trial.mode)
            for candidate, outcome in zip(together, outcomes, strict=True)
            if outcome.timings
        ]
        record = record_of(
            STEP, asdict(problem), trial.hardware, fingerprints.software_fingerprint(), measured,
            search.measured, time.monotonic() - begun, datetime.now(UTC).isoformat(),
        )  # fmt: skip
    database.put(record)
    return record


class _Trials:
    """Candidates on the ranks."""

    def __init__(self, asked: StepToTune, workers: Workers, database: Database) -> None:
        self._asked, self._workers, self._database = asked, workers, database
        self.device = workers.group().hardware
        self.hardware = fingerprints.hardware_fingerprint(self.device)
        is_interpreted = self.device.backend == "interpreter"
        self.mode: Literal["eager", "graph"] = "eager" if is_interpreted else "graph"

    def __call__(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Outcomes of one run.

        Raises:
            WrongResult: of the library or the operations.
        """
        asked, is_interpreted = self._asked, self.mode == "eager"
        outcomes = self._workers.group().call(
            step_tasks.try_steps, _DEADLINE_S, model=asked.model, dtype=asked.dtype,
            phase=Phase("decode", asked.batch, asked.context), candidates=candidates,
            records=list(self._database.records()),
            repetitions=_HOST_REPETITIONS if is_interpreted else _GPU_REPETITIONS,
        )[0]  # fmt: skip
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            self._store(candidate, outcome)
            if outcome.state == "wrong" and candidate in (BASELINE, OPERATIONS):
                raise WrongResult(f"a decode step by {candidate.variant}: {outcome.reason}")
        return outcomes

    def each(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Outcomes of a batch; where one ends the ranks, each is tried alone."""
        try:
            return self(candidates)
        except TaxfreeError as error:
            if len(candidates) > 1:
                return [self.each([candidate])[0] for candidate in candidates]
            state = "crashed" if isinstance(error, WorkerLost) else "failed"
            outcome = Outcome(state, str(error))
        self._store(candidates[0], outcome)
        return [outcome]

    def _store(self, candidate: Candidate, outcome: Outcome) -> None:
        key = record_key(STEP, asdict(self._asked.problem), self.hardware)
        self._database.add_trial(key, trial_of(STEP, candidate, outcome))


def _line(candidate: Candidate, outcome: Outcome, mode: str) -> str:
    config = " ".join(f"{name}={value}" for name, value in candidate.config.items())
    timing = outcome.timings.get(mode)
    said = outcome.reason if timing is None else f"{timing.median_us:.4g} us"
    return f"{candidate.variant} {config}: {said}"
