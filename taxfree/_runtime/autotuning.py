"""A time budget for tuning on a runtime's own ranks; see :func:`taxfree.autotune`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from taxfree._runtime.collectives import vote
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Problem
from taxfree_tuning_db import Record, default_path

if TYPE_CHECKING:
    from taxfree_tune.tuning.in_ranks import RankTuner


@dataclass(frozen=True)
class Autotuned:
    """The outcome of a problem that :func:`taxfree.autotune` met.

    Args:
        problem: with the largest of the sizes that its record serves, and that were met.
        record: as `taxfree db show` prints it, with winner, library and runners-up; None where
            none was made.
        reason: why none was made.
        seconds: that it took.
    """

    problem: Problem
    record: Record | None
    reason: str = ""
    seconds: float = 0.0


class Autotuning:
    """Tunes on the ranks of a fabric, while time is left.

    Args:
        fabric: the ranks.
        heap_bytes: of its arena; 0 where nobody knows.
        database: of rank 0, where records and trials go; None for the default one.
        seconds: for all tuning.

    Attributes:
        seconds: that are left of it.
        is_over: whether the time is over; the same on all ranks.
    """

    def __init__(
        self, fabric: Fabric, heap_bytes: int, database: Path | None, seconds: float
    ) -> None:
        self._fabric, self._heap_bytes, self._database = fabric, heap_bytes, database
        self.seconds, self.is_over = seconds, False
        self._tuner: RankTuner | None = None

    def begin(self) -> RankTuner:
        """Load the tuner and start the compilers, unless it has begun."""
        if self._tuner is None:
            # Late, so that serving loads neither the tuner nor what that needs.
            from taxfree_tune.tuning.in_ranks import RankTuner

            database = default_path() if self._database is None else self._database
            self._tuner = RankTuner(self._fabric, self._heap_bytes, database)
        return self._tuner

    def expect(self, problem: Problem) -> None:
        """Compile for a problem that is likely to be tuned, while the ranks go on."""
        self.begin().expect(problem)

    def tune(self, problems: Sequence[Problem]) -> list[Autotuned]:
        """Tune problems, the first ones first; collective.

        Returns:
            An outcome for each, the same on all ranks; none where ranks differ in their problems.

        Raises:
            PeerTimeout: a rank is lost.
        """
        answers = vote(self._fabric.group, (problems, self.seconds))
        seconds = answers[0][1]
        self.is_over = seconds <= 0
        if self.is_over or not problems or any(theirs != problems for theirs, _ in answers):
            return []
        begun = time.monotonic()
        outcomes = self.begin().tune(problems, seconds)
        self.seconds -= time.monotonic() - begun
        return outcomes

    def close(self) -> None:
        """End the compilers."""
        if self._tuner is not None:
            self._tuner.close()
