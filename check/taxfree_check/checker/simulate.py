"""All ranks of a group in one process, every program a coroutine, every access checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import torch

from taxfree_check.checker import hooks, waits
from taxfree_check.checker.clocks import Actor, Repair, end
from taxfree_check.checker.coverage import Coverage
from taxfree_check.checker.launches import Request, RunningLaunch, launched_through
from taxfree_check.checker.memory import Region
from taxfree_check.checker.report import Violation
from taxfree_check.checker.schedule import Scheduler
from taxfree_check.checker.shadow import Shadow
from taxfree_check.checker.streams import Stream, StreamEvent
from taxfree_check.checker.watch import Change, Thread, TorchOperations, Watch, enter_program

_RESIDENTS = (1, 2, 3, 4, None)
_HOW_SOON = (0.0, 0.3, 0.7, 1.0)  # probability that side-stream work runs when it is issued

Call = Callable[[], object]
Setup = Callable[["Schedule"], Sequence[Sequence[Call]]]


class _TooMany(Exception):
    """More slots of clocks are needed."""


@dataclass(frozen=True)
class ScheduleOutcome:
    """The result of one schedule.

    Args:
        violation: the first one, or None.
        coverage: of synchronising lines.
        accesses: number of accesses in the schedule.
        has_timed_out: a poll has, so that memory may hold anything.
        calls_to_reuse: number of calls after which all stores to symmetric memory are to places
            where an earlier call has stored.
    """

    violation: Violation | None
    coverage: Coverage
    accesses: int
    has_timed_out: bool = False
    calls_to_reuse: int = 0


@dataclass
class ClockSlots:
    """Slots of clocks: they grow when a schedule needs more, which then starts again.

    Args:
        programs: of a launch and the one before it.
        streams: of a rank.
    """

    programs: int = 31
    streams: int = 1


def run_schedule(
    setup: Setup,
    ranks: int,
    seed: int,
    sizes: ClockSlots,
    *,
    co_resident: bool = False,
    launches_fence: bool = False,
    backend: str = "cuda",
    first_call: int = 1,
) -> ScheduleOutcome:
    """Run all ranks' calls back to back, with no barrier in between.

    Args:
        setup: declares memory to the schedule and returns each rank's calls; called again when the
            schedule starts again.
        seed: of the schedule.
        sizes: to begin with.
        co_resident: all programs of a launch run at a time; else, their number is drawn.
        launches_fence: begin and end of a kernel count as fences at system scope, as they are in
            effect: its relaxed signals then release what kernels before it did, and kernels after
            it see what its relaxed reads found. Without this, a protocol does not rely on it.
        backend: kernels take the branches of this one.
        first_call: number of the first call.
    """
    while True:
        schedule = Schedule(ranks, seed, sizes, co_resident, launches_fence, backend, first_call)
        try:
            return schedule.run(setup(schedule))
        except _TooMany:
            pass


class Schedule:
    """One run of all ranks; see :func:`run_schedule`."""

    def __init__(
        self,
        ranks: int,
        seed: int,
        sizes: ClockSlots,
        co_resident: bool,
        launches_fence: bool,
        backend: str,
        first_call: int,
    ) -> None:
        self.ranks, self.seed, self.backend = ranks, seed, backend
        rng = Random(seed)
        self._first_call, self._launches_fence = first_call, launches_fence
        self._sizes, self._programs, self._streams = sizes, sizes.programs, sizes.streams
        self._side_streams: list[list[Stream]] = [[] for _ in range(ranks)]
        self._order = Random(f"the order of streams {seed}")
        self._how_soon = self._order.choice(_HOW_SOON)
        resident = rng.choice(_RESIDENTS)
        self._resident = None if co_resident else resident
        self._shadow = Shadow()
        self._scheduler: Scheduler[Thread] = Scheduler(rng)
        self._watch = Watch(self._scheduler, self._shadow)
        self._launches: list[RunningLaunch] = []
        self._open: dict[Actor, RunningLaunch] = {}  # by host: a launch that may still be running
        self._at_barrier: dict[int, list[Actor]] = {}  # by channel
        self._kept: list[torch.Tensor] = []
        self.on_argument: Callable[[torch.Tensor], object] = lambda tensor: None  # a new one
        self._hosts = [self._make_actor(rank, 0, "host") for rank in range(ranks)]

    def run(self, calls: Sequence[Sequence[Call]]) -> ScheduleOutcome:
        scheduler, watch = self._scheduler, self._watch
        for host, work in zip(self._hosts, calls, strict=True):
            run_host = partial(self._run_host, host, work)
            scheduler.start(Thread(host), run_host, scheduler.draw_weight())
        try:
            with (
                hooks.observed_by(watch),
                launched_through(self._issue, watch.refuse, self.seed),
                TorchOperations(self._on_tensor, self._postpones),
            ):
                scheduler.run()
                while not scheduler.has_stopped and watch.nudge():
                    scheduler.run()
            violation, has_timed_out = watch.violation, watch.timed_out is not None
            if not has_timed_out:
                violation = violation or self._deadlock() or watch.doubt
        finally:
            scheduler.abandon()
        calls_to_reuse = self._shadow.newest_call - self._first_call + 1
        return ScheduleOutcome(
            violation, watch.coverage, watch.accesses, has_timed_out, max(0, calls_to_reuse)
        )

    def _deadlock(self) -> Violation | None:
        asleep = self._scheduler.asleep
        if not asleep:
            return None
        others = [
            f"rank {launch.host.rank}, programs {launch.next_program} to {launch.programs - 1} "
            f"of {launch.name} have not started: {launch.running} run at a time"
            for launch in self._launches
            if launch.running and not launch.has_started
        ]
        running = {task.owner.actor.rank for task in asleep}
        others += [
            f"rank {host.rank} has ended all its calls"
            for host in self._hosts
            if host.rank not in running
        ]
        return waits.deadlock(asleep, others, self._shadow)

    # -- ranks and their memory -------------------------------------------------------------------

    def _make_actor(self, rank: int, stream: int, name: str) -> Actor:
        """An actor that issues work on a stream; the slots after its own are its programs'."""
        per_stream = 1 + self._programs
        slots = self.ranks * self._streams * per_stream
        clocks = np.zeros((len(Repair), slots), np.int64)
        slot = (rank * self._streams + stream) * per_stream
        actor = Actor(slot, rank, None, name, self._first_call - 1, clocks)
        actor.step()
        return actor

    def side_stream(self, rank: int) -> Stream:
        """Another stream of a rank, beside that of its host."""
        streams = self._side_streams[rank]
        number = 1 + len(streams)
        if number >= self._streams:
            self._sizes.streams += 2
            raise _TooMany
        streams.append(Stream(self, self._make_actor(rank, number, f"side stream {number}")))
        return streams[-1]

    @property
    def is_running(self) -> bool:
        """Whether calls run; before that, the schedule is set up."""
        return self._scheduler.is_running

    @property
    def thread(self) -> Thread:
        """The running one."""
        return self._scheduler.current.owner

    @property
    def stream(self) -> Stream | None:
        """The side stream that the running host issues on, or None."""
        stream = self.thread.stream
        assert stream is None or isinstance(stream, Stream)
        return stream

    def record(self) -> StreamEvent:
        """An event after all work that the running host has issued on its present stream."""
        if self.stream is not None:
            return self.stream.record()
        self._close()
        actor = self.thread.actor
        event = StreamEvent(actor.call, clocks=actor.clocks.copy())
        actor.step()
        return event

    def find(self, tensor: torch.Tensor) -> Region | None:
        """The declared memory that a tensor begins in."""
        return self._shadow.find(tensor.data_ptr())

    def declare(self, rank: int, tensor: torch.Tensor, describe: Callable[[int], str]) -> None:
        """Declare a symmetric tensor's memory; `describe` names the place at a byte offset."""
        self._add(rank, tensor, tensor.data_ptr(), tensor.nbytes, describe, is_symmetric=True)

    def declare_argument(self, rank: int, name: str, tensor: torch.Tensor) -> None:
        """Declare the storage of an argument of a kernel, unless it is known."""
        if self.find(tensor) is None:
            self.on_argument(tensor)
            storage = tensor.untyped_storage()
            element = tensor.element_size()
            begin, size = storage.data_ptr(), storage.nbytes()
            self._add(rank, tensor, begin, size, lambda offset: f"{name}[{offset // element}]")

    def _add(
        self,
        rank: int,
        tensor: torch.Tensor,
        begin: int,
        size: int,
        describe: Callable[[int], str],
        *,
        is_symmetric: bool = False,
    ) -> None:
        self._kept.append(tensor)  # so that no address is used twice
        self._shadow.add(Region(describe, rank, begin, begin + size, is_symmetric))

    def barrier(self, channel: int = 0) -> None:
        """Order all hosts; there is nothing to order while the schedule is set up.

        Args:
            channel: hosts at barriers of different channels do not meet.
        """
        if not self.is_running:
            return
        self._close()
        hosts = self._at_barrier.setdefault(channel, [])
        hosts.append(self.thread.actor)
        here = waits.Barrier(channel)
        if len(hosts) < self.ranks:
            self._scheduler.sleep([here])
            return
        together = np.maximum.reduce([host.clocks for host in hosts])
        for host in hosts:
            host.join(together)
            host.step()
        del self._at_barrier[channel]
        self._scheduler.touch([here])

    def refuse(self, what: str) -> None:
        """End the run: the running program does what is not simulated."""
        self._watch.refuse(what)

    def exchange(self, word: torch.Tensor, before: int, after: int, sem: str) -> None:
        """On the present stream, wait until a word holds `before`, and set `after`, atomically."""
        work = partial(self._exchange, word, before, after, sem)
        if self.stream is not None:
            self.stream.issue(work)
        else:
            work()

    def _exchange(self, word: torch.Tensor, before: int, after: int, sem: str) -> None:
        self._close()
        address = np.array([word.data_ptr()], np.uint64)
        held = word.numpy()  # no host's operation

        def change() -> Change:
            is_due = bool(held == before)
            return Change(is_due, is_due)

        done = False
        while not done:
            self._watch.on_atomic(address, 4, sem, "sys", what=b"exchange", change=change)
            done = bool(held == before)
            if done:
                held[...] = after

    def _run_host(self, host: Actor, calls: Sequence[Call]) -> None:
        for call in calls:
            host.call += 1
            call()
            if not all(stream.has_ended for stream in self._side_streams[host.rank]):
                error = RuntimeError("work on a side stream is not joined before its call ends")
                self._watch.crashed(host, error)
            self._scheduler.point()
        self._close()

    # -- launches ---------------------------------------------------------------------------------

    def _issue(self, request: Request) -> None:
        """Run a kernel, or queue it on the present side stream, perhaps for later.

        Before a kernel of the caller's own stream, work queued on other streams may run.
        """
        work = partial(self._launch, request)
        if self.stream is not None:
            self.stream.issue(work)
            self._give_turns([self.stream])
            return
        streams = self._side_streams[self.thread.actor.rank]
        self._give_turns(self._order.sample(streams, len(streams)))
        work()

    def _give_turns(self, streams: Sequence[Stream]) -> None:
        """Run the work that waits on some of these streams."""
        for stream in streams:
            if self._order.random() < self._how_soon:
                stream.run()

    def _postpones(self, copy: Callable[[], object]) -> bool:
        """Whether a copy is issued on a side stream, where it is queued."""
        if self.stream is None:
            return False
        self.stream.issue(copy)
        return True

    def _on_tensor(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """A library operation of a host touches a tensor."""
        if self.is_running and self.find(tensor) is not None:
            if self.stream is not None:
                error = RuntimeError("on side streams only kernels and copies can be simulated")
                self._watch.crashed(self.thread.actor, error)
            self._close()
            self._watch.on_tensor(tensor, writes=writes)

    def _launch(self, request: Request) -> None:
        """Run a kernel to its end, or until it lets the next launch of its host begin."""
        host = self.thread.actor
        before = self._open.get(host)
        if before is not None and not self._begins_early(request.function):
            self._close()
            before = None
        for name, tensor in _tensors(request.given.items()):
            self.declare_argument(host.rank, name, tensor)
        weight = self._scheduler.draw_weight()
        launch = RunningLaunch(request, host, weight, before)
        self._watch.coverage.expect(request.function, request.constants, launch.programs)
        if launch.end_slot > self._programs:
            self._sizes.programs = launch.end_slot + 1
            raise _TooMany
        self._launches.append(launch)
        for _ in range(min(self._resident or launch.programs, launch.programs)):
            self._start_program(launch)
        host.step()
        if before is not None:
            self._close()
        self._open[host] = launch
        while not launch.has_launched_dependents:
            self._scheduler.sleep([launch])
        if host not in self._hosts:
            self._close()

    def _begins_early(self, function: Any) -> bool:
        """Whether a kernel is launched before the last one has ended: drawn, as configs differ."""
        waits = self.backend == "cuda" and _waits_for_launch_before(function)
        return waits and self._order.random() < 0.5

    def _close(self) -> None:
        """Wait until the last launch of the running host has ended."""
        host = self.thread.actor
        launch = self._open.pop(host, None)
        if launch is None:
            return
        while not launch.has_ended:
            self._scheduler.sleep([launch])
        host.join(launch.ended)
        host.step()

    def _start_program(self, launch: RunningLaunch) -> None:
        host, program = launch.host, launch.next_program
        launch.next_program += 1
        launch.running += 1
        slot = host.slot + 1 + launch.first_slot + program
        name = launch.name_of(program)
        actor = Actor(slot, host.rank, program, name, host.call, launch.begun.copy())
        weight = launch.weight * self._scheduler.draw_weight()
        if self._launches_fence:
            actor.begun = launch.begun
        thread = Thread(actor, launch)
        self._scheduler.start(thread, partial(self._run_program, actor, launch), weight)

    def _run_program(self, actor: Actor, launch: RunningLaunch) -> None:
        enter_program(self.thread)
        try:
            with np.errstate(all="ignore"):  # of its own: errstate belongs to a coroutine
                launch.function.rewrite()(**launch.arguments)
        except Exception as error:
            self._watch.crashed(actor, error)
        if self._launches_fence:
            end(actor)
        np.maximum(launch.ended, actor.clocks, out=launch.ended)
        launch.running -= 1
        if not launch.has_started:
            self._start_program(launch)
        elif launch.has_ended:
            self._scheduler.touch([launch])


@cache
def _waits_for_launch_before(function: Any) -> bool:
    return "gdc_wait(" in inspect.getsource(function.fn)


def _tensors(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Named arguments, of tuples the elements, that are tensors or descriptors of them."""
    for name, value in named:
        tensor = getattr(value, "base", value)  # a descriptor's
        if isinstance(tensor, torch.Tensor):
            yield name, tensor
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", [f"{name}[{index}]" for index in range(len(value))])
            yield from _tensors(zip(fields, value, strict=True))
