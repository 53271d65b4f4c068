"""Side streams of a simulation: queues of work, ordered by forks and joins only."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np

from taxfree_check.checker.clocks import Actor
from taxfree_check.checker.watch import Thread
from taxfree_kernels.fabric.base import SideStream


class Issuer(Protocol):
    """The simulation whose hosts issue work on streams."""

    @property
    def thread(self) -> Thread:
        """The running thread."""

    @property
    def stream(self) -> Stream | None:
        """The side stream that the running host issues on, or None."""

    def record(self) -> StreamEvent:
        """An event after all work that the running host has issued on its present stream."""


class StreamEvent:
    """A point in the work of an actor.

    Args:
        call: the actor's.
        stream: the stream that has to reach it, unless it has been reached.
        clocks: the actor's at this point, if it has been reached.
    """

    def __init__(
        self, call: int, stream: Stream | None = None, clocks: np.ndarray | None = None
    ) -> None:
        self.call, self._stream, self.clocks = call, stream, clocks

    def reached(self) -> np.ndarray:
        """The clocks at this point, after running all work before it."""
        while self.clocks is None:
            assert self._stream is not None
            self._stream.step()
        return self.clocks


class Stream(SideStream):
    """A side stream, ordered by forks and joins only.

    A rank runs one piece of work at a time, in any order that these allow: work issued here is
    queued, and runs at a random time, or when work that must come after it is about to run.
    """

    def __init__(self, issuer: Issuer, actor: Actor) -> None:
        self._issuer, self._actor = issuer, actor
        self._work: deque[Callable[[], object]] = deque()
        self._is_joined = True

    @property
    def has_ended(self) -> bool:
        """Whether all work issued here has been joined, and has run."""
        return self._is_joined and not self._work

    def fork(self) -> None:
        self.issue(partial(self._come_after, self._issuer.record()))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self._is_joined = False
        thread = self._issuer.thread
        before, thread.stream = thread.stream, self
        try:
            yield
        finally:
            thread.stream = before

    def join(self) -> None:
        self._is_joined = True
        event, stream = self.record(), self._issuer.stream
        if stream is not None:
            stream.issue(partial(stream._come_after, event))
        else:
            self._issuer.thread.actor.join(event.reached())

    def issue(self, work: Callable[[], object]) -> None:
        """Queue work."""
        self._work.append(work)

    def record(self) -> StreamEvent:
        """An event after all work issued here."""
        event = StreamEvent(self._issuer.thread.actor.call, self)
        self.issue(partial(self._note, event))
        return event

    def run(self) -> None:
        """Run all queued work."""
        while self._work:
            self.step()

    def step(self) -> None:
        """Run the oldest queued work."""
        work = self._work.popleft()
        thread = self._issuer.thread
        before = thread.actor, thread.stream
        thread.actor, thread.stream = self._actor, None
        try:
            work()
        finally:
            thread.actor, thread.stream = before

    def _note(self, event: StreamEvent) -> None:
        event.clocks = self._actor.clocks.copy()
        self._actor.step()

    def _come_after(self, event: StreamEvent) -> None:
        self._actor.join(event.reached())
        self._actor.call = event.call
