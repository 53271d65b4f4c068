"""Memory operations in flight: when they take effect, and in which order.

An operation takes effect at the ``s_waitcnt`` that waits for it or at any earlier moment. Vector
memory operations of a wave on different addresses may overtake one another; operations on LDS keep
their order; scalar loads keep none.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from taxfree_check.executed.tactics import Tactics


class InFlight:
    """One operation.

    Args:
        effect: what it does.
        span: the bytes it touches, from and to; by default all, so that it passes no other.
        rows: the registers that it loads. Loads come back in order, so a later one into the same
            registers stays later.
        is_scalar: a scalar load, into scalar registers.
        is_last: it passes no earlier one, whatever that touches.
    """

    __slots__ = ("_effect", "_is_last", "is_done", "is_scalar", "rows", "span")

    def __init__(
        self,
        effect: Callable[[], Any],
        span: tuple[int, int] = (0, 1 << 62),
        rows: tuple[int, int] = (0, 0),
        is_scalar: bool = False,
        is_last: bool = False,
    ) -> None:
        self._effect, self.span, self.rows, self.is_scalar = effect, span, rows, is_scalar
        self._is_last = is_last
        self.is_done = False

    def perform(self) -> None:
        """Let it take effect."""
        if not self.is_done:
            self.is_done = True
            self._effect()

    def may_pass(self, earlier: InFlight) -> bool:
        """Whether it may take effect before one that was issued earlier."""
        if earlier.is_done:
            return True
        return not (
            self._is_last or _meet(self.span, earlier.span) or _meet(self.rows, earlier.rows)
        )


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


class OperationTiming:
    """How soon operations take effect in one run.

    Args:
        rng: of the run.
        tactics: of the run.
    """

    def __init__(self, rng: Random, tactics: Tactics) -> None:
        self.rng, self.promptness, self.stalls = rng, tactics.promptness, tactics.stalls
        self.poison = tactics.poison

    def issue(self, queue: list[InFlight], operation: InFlight) -> None:
        """Put an operation behind those that are in flight."""
        queue.append(operation)
        if self.promptness and self.rng.random() < self.promptness:
            self._perform(queue, len(queue) - 1)

    def complete_any(self, queue: list[InFlight]) -> None:
        """Let some operation take effect, perhaps before older ones; often the youngest."""
        waiting = [index for index, operation in enumerate(queue) if not operation.is_done]
        waiting.reverse()
        if self.rng.random() < 0.5:
            self.rng.shuffle(waiting)
        for index in waiting:
            if self._perform(queue, index):
                return

    def _perform(self, queue: list[InFlight], index: int) -> bool:
        operation = queue[index]
        if not all(operation.may_pass(earlier) for earlier in queue[:index]):
            return False
        operation.perform()
        return True

    def drain(self, queue: list[InFlight], leave: int) -> None:
        """Let operations take effect, oldest first, until no more than `leave` are in flight.

        Scalar loads come back in any order: while one is in flight, any may be among the last.
        """
        if leave and any(operation.is_scalar for operation in queue):
            self.rng.shuffle(queue)
        while len(queue) > leave:
            queue.pop(0).perform()

    def has_drained(self, queue: list[InFlight], leave: int, stalls: float) -> bool:
        """Likewise, but perhaps after other waves had a turn; then not yet.

        Args:
            stalls: the chance of that.
        """
        if stalls and self.rng.random() < stalls:
            self.complete_any(queue)
            while queue and queue[0].is_done:
                queue.pop(0)
            return len(queue) <= leave
        self.drain(queue, leave)
        return True
