"""Memory operations in flight: when they take effect, and in which order.

An operation takes effect at the ``s_waitcnt`` that waits for it or at any earlier moment. Vector memory
operations of a wave on different addresses may overtake one another; operations on LDS keep their
order; scalar loads keep none.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any


class InFlight:
    """One operation.

    Args:
        effect: what it does.
        low, high: the bytes it touches; an operation on everything keeps its place in the order.
        is_scalar: a scalar load.
    """

    __slots__ = ("_effect", "high", "is_done", "is_scalar", "low")

    def __init__(
        self, effect: Callable[[], Any], low: int = 0, high: int = 1 << 62, is_scalar: bool = False
    ) -> None:
        self._effect, self.low, self.high, self.is_scalar = effect, low, high, is_scalar
        self.is_done = False

    def perform(self) -> None:
        """Let it take effect."""
        if not self.is_done:
            self.is_done = True
            self._effect()

    def may_pass(self, earlier: InFlight) -> bool:
        return earlier.is_done or self.high <= earlier.low or earlier.high <= self.low


class Timing:
    """How soon operations take effect in one run.

    Args:
        rng: of the run.
        promptness: the chance that an operation takes effect when it is issued.
        stalls: the chance that a wave which waits lets others go first.
    """

    def __init__(self, rng: Random, promptness: float, stalls: float) -> None:
        self.rng, self.promptness, self.stalls = rng, promptness, stalls

    def issue(self, queue: list[InFlight], operation: InFlight) -> None:
        """Put an operation behind those that are in flight."""
        queue.append(operation)
        if self.promptness and self.rng.random() < self.promptness:
            self._perform(queue, len(queue) - 1)

    def complete_any(self, queue: list[InFlight]) -> None:
        """Let some operation take effect, perhaps before older ones."""
        waiting = [at for at, each in enumerate(queue) if not each.is_done]
        if waiting:
            self._perform(queue, self.rng.choice(waiting))

    def _perform(self, queue: list[InFlight], at: int) -> None:
        operation = queue[at]
        if all(operation.may_pass(earlier) for earlier in queue[:at]):
            operation.perform()

    def drain(self, queue: list[InFlight], leave: int) -> None:
        """Let operations take effect, oldest first, until no more than `leave` are in flight.

        Scalar loads come back in any order: while one is in flight, any may be among the last.
        """
        if leave and any(each.is_scalar for each in queue):
            self.rng.shuffle(queue)
        while len(queue) > leave:
            queue.pop(0).perform()

    def has_drained(self, queue: list[InFlight], leave: int) -> bool:
        """Likewise, but perhaps after other waves had a turn; then not yet."""
        if self.stalls and self.rng.random() < self.stalls:
            self.complete_any(queue)
            while queue and queue[0].is_done:
                queue.pop(0)
            return len(queue) <= leave
        self.drain(queue, leave)
        return True
