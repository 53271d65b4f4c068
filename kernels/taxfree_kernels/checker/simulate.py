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

from taxfree_kernels.checker import hooks, waits
from taxfree_kernels.checker.clocks import Actor, World
from taxfree_kernels.checker.coverage import Coverage
from taxfree_kernels.checker.launches import Launch
from taxfree_kernels.checker.memory import Region
from taxfree_kernels.checker.report import Violation
from taxfree_kernels.checker.schedule import Scheduler
from taxfree_kernels.checker.shadow import Shadow
from taxfree_kernels.checker.streams import Event, Stream
from taxfree_kernels.checker.watch import Thread, TorchOperations, Watch, enter_program
from taxfree_kernels.device import control
from taxfree_kernels.fabric.base import GrouplessFabric
from taxfree_kernels.fabric.heap import Pool, SymmetricHeap
from taxfree_kernels.fabric.layout import aligned
from taxfree_kernels.fabric.side_stream import SideStream
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.launch import Kernel, launching_through

_FIRST_PROGRAMS = 31  # slots of clocks per launch; a larger launch restarts the schedule
_ALL = 1_000_000
_RESIDENTS = (1, 2, 3, 4, _ALL)
_HOW_SOON = (0.0, 0.3, 0.7, 1.0)  # probability that side-stream work runs when it is issued
_NEVER = 1 << 62  # ticks

Call = Callable[[], object]
Setup = Callable[["SimulatedFabric"], Sequence[Call]]


class _TooManyPrograms(Exception):
    pass


class _TooManyStreams(Exception):
    pass


@dataclass(frozen=True)
class Outcome:
    """The result of one schedule.

    Args:
        violation: the first one, or None.
        coverage: of synchronising lines.
        accesses: number of accesses in the schedule.
    """

    violation: Violation | None
    coverage: Coverage
    accesses: int


class _Heap(SymmetricHeap):
    """A heap that declares its blocks to the checker."""

    def __init__(self, arena: torch.Tensor, declare: Callable[[torch.Tensor], None]) -> None:
        super().__init__(arena)
        self._declare = declare

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        block = super().empty(count, dtype)
        self._declare(block)
        return block


class SimulatedFabric(GrouplessFabric):
    """One rank of a simulation; plans are made on it as on any other fabric."""

    name = "simulated"
    has_graphs = False

    def __init__(self, schedule: _Schedule, rank: int, arenas: Sequence[torch.Tensor]) -> None:
        self._schedule = schedule
        self.backend = schedule.backend  # type: ignore[misc]
        self.rank, self.world_size = rank, len(arenas)
        self.device = torch.device("cpu")
        self.hardware = KNOWN["cpu"]
        self.heap_bases = torch.tensor([arena.data_ptr() for arena in arenas])
        self._arenas = arenas
        self.heap = _Heap(arenas[rank], partial(schedule.declare_block, rank))
        schedule.declare(rank, "heap_bases", self.heap_bases)

    def _arena_of(self, peer: int) -> torch.Tensor:
        return self._arenas[peer]

    def side_stream(self) -> SideStream:
        return self._schedule.side_stream(self.rank)

    def host_words(self, count: int) -> torch.Tensor:
        words = torch.zeros(count, dtype=torch.int64)
        self._schedule.declare(self.rank, "host words", words)
        return words

    def ticks(self, seconds: float) -> int:
        """No bound: an endless wait is reported as a deadlock."""
        return _NEVER

    def barrier(self) -> None:
        self._schedule.barrier()


class Simulation:
    """A group of ranks to run schedules on.

    Args:
        world_size: ranks.
        slot_bytes: of a payload slot of each rank's pool.
        heap_bytes: of each rank's heap beyond its pool.
    """

    def __init__(self, world_size: int, slot_bytes: int = 4096, heap_bytes: int = 4096) -> None:
        self.world_size = world_size
        self.slot_bytes = aligned(slot_bytes)
        # Whatever fits a slot, as words of half payload.
        self.flag_bytes = 2 * self.slot_bytes
        # Tiles are wider than tiny problems, and all is sent.
        self.lamport_bytes = 4 * self.slot_bytes
        control_bytes = (control.SIGNALS.value + Pool.CHANNELS * world_size) * 8
        slots = 2 * (self.slot_bytes + self.flag_bytes) + 3 * self.lamport_bytes
        size = aligned(control_bytes) + slots + aligned(heap_bytes)
        # side by side, so that which of several conflicts comes first does not depend on addresses
        self.arenas = list(torch.empty(world_size, size, dtype=torch.uint8))

    def run(
        self,
        setup: Setup,
        seed: int,
        *,
        resident: int | None = None,
        first_generation: int = 1,
        backend: str = "cuda",
    ) -> Outcome:
        """Set up each rank, then run all ranks' calls back to back, with no barrier in between.

        Args:
            setup: makes the plans of a rank and returns its calls; called again when the schedule
                restarts.
            seed: of the schedule.
            resident: programs of a launch that run at a time; drawn when None.
            first_generation: of the pools.
            backend: kernels take the branches of this one; inline assembly does nothing.
        """
        programs, streams = _FIRST_PROGRAMS, 1
        while True:
            schedule = _Schedule(self, seed, resident, first_generation, backend, programs, streams)
            try:
                return schedule.run(setup)
            except _TooManyPrograms:
                programs = 4 * programs + 3
            except _TooManyStreams:
                streams += 2


class _Schedule:
    """One run."""

    def __init__(
        self,
        simulation: Simulation,
        seed: int,
        resident: int | None,
        first_generation: int,
        backend: str,
        programs: int,
        streams: int,
    ) -> None:
        self.backend = backend
        rng = Random(seed)
        self._simulation = simulation
        self._first_generation = first_generation
        self._programs, self._streams = programs, streams
        self._side_streams: list[list[Stream]] = [[] for _ in range(simulation.world_size)]
        self._order = Random(f"the order of streams {seed}")
        self._how_soon = self._order.choice(_HOW_SOON)
        self._resident = resident or rng.choice(_RESIDENTS)
        self._shadow = Shadow()
        self._scheduler: Scheduler[Thread] = Scheduler(rng)
        self._watch = Watch(self._scheduler, self._shadow)
        self._launches: list[Launch] = []
        self._open: dict[Actor, Launch] = {}  # by host: a launch that may still be running
        self._at_barrier: list[Actor] = []
        self._kept: list[torch.Tensor] = []
        self._hosts = [self._make_actor(rank, 0, "host") for rank in range(simulation.world_size)]

    def run(self, setup: Setup) -> Outcome:
        scheduler, watch = self._scheduler, self._watch
        calls = [setup(fabric) for fabric in self._make_fabrics()]
        for host, work in zip(self._hosts, calls, strict=True):
            run_host = partial(self._run_host, host, work)
            scheduler.start(Thread(host), run_host, scheduler.draw_weight())
        try:
            with hooks.observed_by(watch), TorchOperations(self._on_tensor, self._postpones):
                scheduler.run()
            violation = watch.violation or self._deadlock()
        finally:
            scheduler.abandon()
        return Outcome(violation, watch.coverage, watch.accesses)

    def _deadlock(self) -> Violation | None:
        asleep = self._scheduler.asleep
        if not asleep:
            return None
        others = [
            f"rank {launch.host.rank}, programs {launch.next_program} to {launch.kernel.grid - 1} "
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
        slots = self._simulation.world_size * self._streams * per_stream
        clocks = np.zeros((len(World), slots), np.int64)
        slot = (rank * self._streams + stream) * per_stream
        actor = Actor(slot, rank, None, name, self._first_generation - 1, clocks)
        actor.step()
        return actor

    def side_stream(self, rank: int) -> SideStream:
        """Another stream of a rank, beside that of its host."""
        known = self._side_streams[rank]
        number = 1 + len(known)
        if number >= self._streams:
            raise _TooManyStreams
        known.append(Stream(self, self._make_actor(rank, number, f"side stream {number}")))
        return known[-1]

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

    def record(self) -> Event:
        """An event after all work that the running host has issued on its present stream."""
        if self.stream is not None:
            return self.stream.record()
        self._close()
        actor = self.thread.actor
        event = Event(actor.generation, clocks=actor.clocks.copy())
        actor.step()
        return event

    def _make_fabrics(self) -> list[SimulatedFabric]:
        arenas = self._simulation.arenas
        for arena in arenas:
            arena.fill_(0xFF)  # NaN in every floating-point type
        fabrics = [SimulatedFabric(self, rank, arenas) for rank in range(len(arenas))]
        for fabric in fabrics:
            sizes = self._simulation
            fabric.pool = Pool(fabric, sizes.slot_bytes, sizes.flag_bytes, sizes.lamport_bytes)
            fabric.pool.reset(self._first_generation - 1)
            self._describe_pool(fabric.pool)
        return fabrics

    def _describe_pool(self, pool: Pool) -> None:
        control = self._shadow.find(pool.control.data_ptr())
        slots = self._shadow.find(pool.slots(1, torch.uint8)[0].data_ptr())
        assert control is not None
        assert slots is not None
        control.describe = partial(_control_word, self._simulation.world_size)
        size = self._simulation.slot_bytes
        slots.describe = lambda offset: f"payload slot {offset // size}, byte {offset % size}"
        self.declare_words(pool.flags, "LL packet")
        self.declare_words(pool.bare, "Lamport word")

    def declare_block(self, rank: int, block: torch.Tensor) -> None:
        """Declare a block of a heap."""
        self._declare(rank, "heap block", block, block.data_ptr(), block.nbytes)

    def declare(self, rank: int, name: str, tensor: torch.Tensor) -> None:
        """Declare a tensor's storage, unless it is part of a heap."""
        if self._shadow.find(tensor.data_ptr()) is not None:
            return
        storage = tensor.untyped_storage()
        self._declare(rank, name, tensor, storage.data_ptr(), storage.nbytes())

    def _declare(self, rank: int, name: str, tensor: torch.Tensor, begin: int, size: int) -> None:
        self._kept.append(tensor)  # so that no address is used twice
        element = tensor.element_size()
        self._shadow.add(
            Region(lambda offset: f"{name}[{offset // element}]", rank, begin, begin + size)
        )

    def declare_words(self, words: torch.Tensor, name: str) -> None:
        """Declare a block of LL packets or Lamport words, which may race."""
        region = self._shadow.find(words.data_ptr())
        assert region is not None, "words are a block of the heap"
        size = region.word_bytes = words.element_size()
        region.describe = lambda offset: f"{name} {offset // size}"

    def barrier(self) -> None:
        """Order all hosts; there is nothing to order while the simulation is set up."""
        if not self._scheduler.is_running:
            return
        self._close()
        self._at_barrier.append(self.thread.actor)
        if len(self._at_barrier) < self._simulation.world_size:
            self._scheduler.sleep([waits.BARRIER])
            return
        together = np.maximum.reduce([host.clocks for host in self._at_barrier])
        for host in self._at_barrier:
            host.join(together)
            host.step()
        self._at_barrier = []
        self._scheduler.touch([waits.BARRIER])

    def _run_host(self, host: Actor, calls: Sequence[Call]) -> None:
        with launching_through(self._issue):
            for call in calls:
                host.generation += 1
                call()
                if not all(stream.has_ended for stream in self._side_streams[host.rank]):
                    error = RuntimeError("work on a side stream is not joined before its call ends")
                    self._watch.crashed(host, error)
                self._scheduler.point()
            self._close()

    # -- launches ---------------------------------------------------------------------------------

    def _issue(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """Run a kernel, or queue it on the present side stream, perhaps for later.

        Before a kernel of the caller's own stream, work queued on other streams may run.
        """
        work = partial(self._launch, kernel, args)
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
        if self._scheduler.is_running and self._shadow.find(tensor.data_ptr()) is not None:
            if self.stream is not None:
                error = RuntimeError("on side streams only kernels and copies can be simulated")
                self._watch.crashed(self.thread.actor, error)
            self._close()
            self._watch.on_tensor(tensor, writes=writes)

    def _launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """Run a kernel to its end, or until it lets the next launch of its host begin."""
        host = self.thread.actor
        before = self._open.get(host)
        if before is not None and not self._begins_early(kernel):
            self._close()
            before = None
        for name, tensor in _tensors(kernel.function.arg_names, args):
            self.declare(host.rank, name, tensor)
        self._watch.coverage.expect(kernel)
        arguments = hooks.program_arguments(kernel.function, args, kernel.constants)
        launch = Launch(kernel, arguments, host, self._scheduler.draw_weight(), before)
        if launch.end_slot > self._programs:
            raise _TooManyPrograms
        self._launches.append(launch)
        for _ in range(min(self._resident, kernel.grid)):
            self._start_program(launch)
        host.step()
        if before is not None:
            self._close()
        self._open[host] = launch
        while not launch.has_launched_dependents:
            self._scheduler.sleep([launch])
        if host not in self._hosts:
            self._close()

    def _begins_early(self, kernel: Kernel) -> bool:
        """Whether a kernel is launched before the last one has ended: drawn, as configs differ."""
        waits = self.backend == "cuda" and _waits_for_launch_before(kernel.function)
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

    def _start_program(self, launch: Launch) -> None:
        host, program = launch.host, launch.next_program
        launch.next_program += 1
        launch.running += 1
        slot = host.slot + 1 + launch.first_slot + program
        actor = Actor(slot, host.rank, program, launch.name, host.generation, launch.begun.copy())
        weight = launch.weight * self._scheduler.draw_weight()
        thread = Thread(actor, launch)
        self._scheduler.start(thread, partial(self._run_program, actor, launch), weight)

    def _run_program(self, actor: Actor, launch: Launch) -> None:
        enter_program(self.thread)
        try:
            with np.errstate(all="ignore"):  # of its own: errstate belongs to a coroutine
                launch.kernel.function.rewrite()(**launch.arguments)
        except Exception as error:
            self._watch.crashed(actor, error)
        np.maximum(launch.ended, actor.clocks, out=launch.ended)
        launch.running -= 1
        if not launch.has_started:
            self._start_program(launch)
        elif launch.has_ended:
            self._scheduler.touch([launch])


@cache
def _waits_for_launch_before(function: Any) -> bool:
    return "gdc_wait(" in inspect.getsource(function.fn)


def _tensors(names: Iterable[str], values: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Named arguments, of tuples the elements, that are tensors or descriptors of them."""
    for name, value in zip(names, values, strict=False):
        tensor = getattr(value, "base", value)  # a descriptor's
        if isinstance(tensor, torch.Tensor):
            yield name, tensor
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", [f"{name}[{index}]" for index in range(len(value))])
            yield from _tensors(fields, value)


def _control_word(world_size: int, offset: int) -> str:
    """Name a word of a control block."""
    names = {
        control.GENERATION.value: "generation word",
        control.LIMIT.value: "bound of waits",
        control.ABORT.value: "abort word",
        control.REPORTED.value: "reported word",
        control.STATUS.value: "address of the report",
    }
    index = offset // 8
    if index < control.SIGNALS.value:
        return names.get(index, f"control word {index}")
    channel, source = divmod(index - control.SIGNALS.value, world_size)
    return f"signal word of channel {channel}, source rank {source}"
