"""Candidates, tried together on rank workers, which are replaced where a candidate ends them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from taxfree.errors import WorkerLost
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, op_of
from taxfree_tune.measuring.groups import deadline_s
from taxfree_tune.measuring.results import Mode
from taxfree_tune.measuring.trial import Candidate, Outcome, try_candidates
from taxfree_tune.workers.group import Groups, TaskFailed

BASELINE = Candidate("baseline", {})
_FINALS = 3  # times the repetitions of a search
ATTEMPTS, _PAUSE_S = 3, 10.0  # at finals that are disturbed


class Together:
    """Tries candidates of a problem on the same inputs, in turn.

    Args:
        workers: the ranks.
        hardware: of the ranks.
        attempts: at finals that are disturbed.

    Attributes:
        mode, modes: "graph" or "eager": the mode that decides, and all modes that are timed.
    """

    def __init__(self, workers: Groups, hardware: Hardware, attempts: int = ATTEMPTS) -> None:
        self._workers, self._hardware, self._attempts = workers, hardware, attempts
        self.mode: Mode = "graph" if hardware.backend != "interpreter" else "eager"
        self.modes: tuple[Mode, ...] = ("graph", "eager") if self.mode == "graph" else ("eager",)

    @property
    def _repetitions(self) -> int:
        return 8 if self.mode == "graph" else 3

    def search(self, problem: Problem, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Return the outcomes of a batch, which share its time."""
        return self._timed(problem, candidates, self._repetitions)

    def finals(self, problem: Problem, candidates: Sequence[Candidate]) -> list[Outcome]:
        """Return the outcomes of more repetitions; tried again, after a pause, where disturbed."""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(_PAUSE_S)
            outcomes = self._timed(problem, candidates, _FINALS * self._repetitions)
            if not any(outcome.disturbed for outcome in outcomes):
                break
        return outcomes

    def _timed(
        self, problem: Problem, candidates: Sequence[Candidate], repetitions: int
    ) -> list[Outcome]:
        begun = time.monotonic()
        outcomes = self._outcomes(problem, candidates, repetitions)
        for outcome in outcomes:
            outcome.seconds = (time.monotonic() - begun) / len(outcomes)
        return outcomes

    def _outcomes(
        self, problem: Problem, candidates: Sequence[Candidate], repetitions: int
    ) -> list[Outcome]:
        """Outcomes of a batch; if it takes the group down, its candidates are tried one by one."""
        try:
            return self._call(problem, candidates, repetitions)
        except (WorkerLost, TaskFailed) as error:
            fatal = isinstance(error, TaskFailed) and error.kind == "FabricUnavailable"
            if fatal or len(candidates) == 1:
                raise
        outcomes = self._call(problem, candidates[:1], repetitions)
        for candidate in candidates[1:]:
            self._workers.group()  # if it cannot be started, that is not the candidate's fault
            try:
                outcomes += self._call(problem, [candidate], repetitions)
            except WorkerLost as error:
                outcomes.append(Outcome("hung" if error.is_late else "crashed", error.message))
            except TaskFailed as error:
                state = "hung" if error.kind == "PeerTimeout" else "failed"
                outcomes.append(Outcome(state, error.message))
        return outcomes

    def _call(
        self, problem: Problem, candidates: Sequence[Candidate], repetitions: int
    ) -> list[Outcome]:
        # Finals repeat about as often as a bench, whose deadline this is; a search less often.
        share = repetitions / (_FINALS * self._repetitions)
        return self._workers.group().call(
            try_candidates,
            share * deadline_s(self._hardware),
            op=op_of(problem),
            problem=dataclasses.asdict(problem),
            candidates=list(candidates),
            modes=self.modes,
            repetitions=repetitions,
        )[0]
