"""A seeded scheduler of coroutines: the same seed gives the same schedule, access by access.

Tasks run until they pass a scheduling point; then the next one is drawn. Schedules that treat all
tasks alike miss bugs. So each seed draws uneven weights for its tasks, and how many points a task
passes in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

_WEIGHTS = ((1, 1, 1, 1), (1, 1, 1, 30), (1, 1, 1000, 1000), (1, 30, 1000, 30000))
_STICKINESS = (0.0, 0.5, 0.9, 0.98)

_Owner = TypeVar("_Owner")


@dataclass(eq=False)
class Task(Generic[_Owner]):
    """A coroutine.

    Args:
        owner: the caller's description of the task.
        weight: how often it is drawn, relative to others.
        waits_for: it goes on when one of these is touched; empty while it is ready.
    """

    owner: _Owner
    weight: int
    coroutine: greenlet
    waits_for: frozenset[Hashable] = field(default_factory=frozenset)


class Scheduler(Generic[_Owner]):
    """Runs tasks in turns until all have ended, none can go on, or one calls :meth:`stop`.

    Args:
        rng: all of its decisions come from here.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._weights = rng.choice(_WEIGHTS)
        self._stickiness = rng.choice(_STICKINESS)
        self._ready: list[Task[_Owner]] = []
        self._asleep: list[Task[_Owner]] = []
        self._current: Task[_Owner] | None = None
        self._hub: greenlet | None = None
        self._stopped = False

    @property
    def has_stopped(self) -> bool:
        return self._stopped

    @property
    def is_running(self) -> bool:
        return self._current is not None

    @property
    def current(self) -> Task[_Owner]:
        """The running task."""
        assert self._current is not None, "no task is running"
        return self._current

    @property
    def asleep(self) -> list[Task[_Owner]]:
        """Tasks that wait."""
        return list(self._asleep)

    def draw_weight(self) -> int:
        return self._rng.choice(self._weights)

    def draw_some(self, count: int) -> list[bool]:
        """`count` booleans, each true with probability 1/2."""
        return [self._rng.random() < 0.5 for _ in range(count)]

    def start(self, owner: _Owner, work: Callable[[], None], weight: int) -> Task[_Owner]:
        """Add a task; it runs when it is drawn."""

        def run() -> None:
            work()
            self._ready.remove(task)

        task = Task(owner, weight, greenlet(run))
        self._ready.append(task)
        return task

    def run(self) -> None:
        """Run until no task is ready; tasks that are still asleep then wait for each other.

        Raises:
            BaseException: a task's exception.
        """
        self._hub = getcurrent()
        try:
            while self._ready and not self._stopped:
                self._current = self._draw()
                self._current.coroutine.parent = self._hub
                self._current.coroutine.switch()  # raises what the task raises
        finally:
            self._current = None

    def point(self) -> None:
        """A scheduling point: other tasks may run."""
        if self._stopped:
            self._to_hub()
        if len(self._ready) > 1 and self._rng.random() >= self._stickiness:
            self._to_hub()

    def sleep(self, waits_for: Iterable[Hashable]) -> None:
        """Let others run until one touches any of `waits_for`."""
        task = self.current
        task.waits_for = frozenset(waits_for)
        self._ready.remove(task)
        self._asleep.append(task)
        self._to_hub()

    def touch(self, things: Iterable[Hashable]) -> None:
        """Wake all tasks that wait for one of `things`."""
        if self._asleep:
            touched = set(things)
            self._wake([task for task in self._asleep if not touched.isdisjoint(task.waits_for)])

    def wake_if(self, is_meant: Callable[[Hashable], bool]) -> bool:
        """Wake all tasks that wait for something that is meant; whether there are any."""
        woken = [task for task in self._asleep if any(map(is_meant, task.waits_for))]
        self._wake(woken)
        return bool(woken)

    def _wake(self, woken: Iterable[Task[_Owner]]) -> None:
        for task in woken:
            task.waits_for = frozenset()
            self._asleep.remove(task)
            self._ready.append(task)

    def stop(self, *, at_once: bool = True) -> None:
        """End the run from inside a task.

        Args:
            at_once: does not return; else the run ends at the task's next scheduling point.
        """
        self._stopped = True
        if at_once:
            self._to_hub()

    def abandon(self) -> None:
        """Unwind all tasks that have not ended."""
        for task in (*self._ready, *self._asleep):
            if task.coroutine:
                task.coroutine.throw(GreenletExit)
        self._ready, self._asleep = [], []

    def _to_hub(self) -> None:
        assert self._hub is not None
        self._hub.switch()

    def _draw(self) -> Task[_Owner]:
        ready = self._ready
        if len(ready) == 1:
            return ready[0]
        return self._rng.choices(ready, [task.weight for task in ready])[0]
