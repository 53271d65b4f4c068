"""Watches every access of a simulation: lets others run before it, checks it, records it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import interpreter_builder

from taxfree_check.checker import report
from taxfree_check.checker.clocks import Actor, Scope, fence
from taxfree_check.checker.coverage import Coverage
from taxfree_check.checker.launches import RunningLaunch
from taxfree_check.checker.memory import Access, Conflict, Region, Stale
from taxfree_check.checker.report import Reason, Violation
from taxfree_check.checker.schedule import Scheduler
from taxfree_check.checker.shadow import Shadow
from taxfree_check.checker.sites import current_site, site_of_error

_MOST_ACCESSES = 300_000
_FEW = 16  # addresses; an access of more is no poll
_MOST_NUDGES = 64
_LONGEST_LOOP = 8  # accesses of a polling loop
_PLAIN_TURNS, _ATOMIC_TURNS = 8, 2  # equal turns that make a polling loop


class Change(NamedTuple):
    """What an atomic does to memory: it writes, and it changes a value."""

    writes: bool
    changes: bool


NO_CHANGE, CHANGES = Change(False, False), Change(True, True)


class Read(NamedTuple):
    """A read of a few words, with the numbers of their writes at that time."""

    key: tuple[Any, ...]
    words: list[int]
    versions: list[int]

    @property
    def is_atomic(self) -> bool:
        return self.key[0] != "plain"


@dataclass(eq=False)
class Thread:
    """An actor that the scheduler runs, with its last reads: those that repeat are polls.

    Args:
        actor: a program or a host.
        launch: the program's, or None.
        stream: the side stream that a host issues on, or None.
    """

    actor: Actor
    launch: RunningLaunch | None = None
    stream: object | None = None
    reads: list[Read] = field(default_factory=list)  # since its last write
    #: Reads that were given an old value: those that are repeated are polls.
    doubts: dict[tuple[Any, ...], Violation] = field(default_factory=dict)


def enter_program(thread: Thread) -> None:
    """Make the interpreter run as a thread's program."""
    if thread.launch is not None and thread.actor.program is not None:
        interpreter_builder.grid_idx = thread.launch.index_of(thread.actor.program)
        interpreter_builder.grid_dim = thread.launch.grid


class Watch:
    """Receives every access from the interpreter, and every operation of a host from torch.

    Args:
        scheduler: knows the running thread; each access is a scheduling point.
        shadow: all declared memory.
    """

    def __init__(self, scheduler: Scheduler[Thread], shadow: Shadow) -> None:
        self.coverage = Coverage()
        self.violation: Violation | None = None
        self.doubt: Violation | None = None
        self.accesses = 0
        self._scheduler, self._shadow = scheduler, shadow
        self._versions: dict[int, int] = {}  # address -> number of writes
        #: The program whose poll has timed out. From then on only races with it are reported.
        self.timed_out: Actor | None = None
        self._nudges = 0

    def on_plain(
        self, addresses: np.ndarray, size: int, *, writes: bool, empties: bool = False
    ) -> None:
        """A load or store, of active lanes, right before it happens.

        Args:
            size: bytes per lane.
            empties: it stores EMPTY only.
        """
        thread = self._scheduler.current.owner
        words = self.holds_words(addresses)
        few = words or addresses.size <= _FEW
        poll = ("words" if words else "plain", addresses.tobytes()) if few and not writes else ()
        self._pass_point(thread, poll)
        access = self._access(thread.actor, writes=writes, empties=empties)
        self._settle(thread, poll, writes=writes)
        if words:
            self.coverage.note(access.site, access.actor)
        self._check_plain(access, addresses, size)
        if writes and few:
            self._touch(addresses)
        self._remember(thread, poll, addresses)

    def holds_words(self, addresses: np.ndarray) -> bool:
        """Whether these are addresses of LL packets or Lamport words."""
        region = self._shadow.find(int(addresses[0]))
        return region is not None and region.word_bytes > 0

    def first_of(self, count: int) -> np.ndarray:
        """The words that arrive first, of `count` that are stored at once: bool [count]."""
        return np.array(self._scheduler.draw_some(count))

    def on_atomic(
        self,
        addresses: np.ndarray,
        size: int,
        sem: str,
        scope: Scope,
        *,
        what: bytes = b"",
        reads: bool = True,
        change: Callable[[], Change],
    ) -> AbstractContextManager[None]:
        """An atomic, of active lanes, right before it happens: in the context that this returns.

        A read may find a value of before a write that other words announce, if nothing orders that
        write. Then it does find it. A poll goes on polling; what stores next has used the value.

        Args:
            what: its operation and operands: one that is repeated and changes nothing is a poll.
            reads: it returns the old value.
            change: whether it writes, and whether it changes memory, as memory is now.
        """
        thread = self._scheduler.current.owner
        poll = (sem, scope, what, addresses.tobytes()) if reads else ()
        self._pass_point(thread, poll)
        writes, changes = change()
        access = self._access(thread.actor, writes=writes, scope=scope, sem=sem)
        self.coverage.note(access.site, access.actor)
        self._settle(thread, poll, writes=writes)
        stale = [] if writes or not poll else self._stale(access, addresses, size)
        if stale:
            with _as_before(stale):
                if change().writes:  # a compare-and-swap that the old value would let succeed
                    stale = []
        if stale:
            conflict = stale[0].conflict
            region = self._shadow.find(conflict.address)
            assert region is not None
            thread.doubts[poll] = report.race(conflict, region, self._shadow.find)
        for region, words in self._regions(access, addresses, size):
            for word in words.tolist():
                self._race(self._shadow.atomic(access, region, word, size, reads=reads), region)
        if writes:
            access.actor.step()
        if changes:
            self._touch(addresses)
        self._remember(thread, () if changes else poll, addresses, is_new=not stale)
        return _as_before(stale) if stale else nullcontext()

    def _stale(self, access: Access, addresses: np.ndarray, size: int) -> list[Stale]:
        """The words of an atomic read that may be older than the reader expects."""
        findings = [
            self._shadow.stale(access, region, word)
            for region, words in self._regions(access, addresses, size)
            for word in words.tolist()
        ]
        return [stale for stale in findings if stale is not None]

    def _settle(self, thread: Thread, poll: tuple[Any, ...], *, writes: bool) -> None:
        """Report what a thread has read too early, unless it only reads it once more."""
        thread.doubts.pop(poll, None)
        if writes and thread.doubts:
            self._found(next(iter(thread.doubts.values())))

    def on_fence(self, scope: Scope) -> None:
        """A fence of the running program."""
        fence(self._scheduler.current.owner.actor, scope)

    def times_out(self) -> bool:
        """Whether a poll that has a timeout gives up here: at most one does in a schedule."""
        if self.timed_out is None and all(self._scheduler.draw_some(2)):
            self.timed_out = self._scheduler.current.owner.actor
            return True
        return False

    def pause(self) -> None:
        """Let others run."""
        thread = self._scheduler.current.owner
        self._scheduler.point()
        enter_program(thread)

    @property
    def launch(self) -> RunningLaunch:
        """The launch of the running program."""
        launch = self._scheduler.current.owner.launch
        assert launch is not None
        return launch

    def on_false_assumption(self) -> None:
        """An assumption is false: the violation of the run, unless there is a worse one."""
        site = current_site()
        details = (report.who(self._scheduler.current.owner.actor), *report.source(site))
        where = (site.lines[0].where,)
        self.doubt = self.doubt or Violation(Reason.ASSUMPTION, details, where)

    def refuse(self, what: str) -> None:
        """End the run: a program does what cannot be simulated."""
        actor = self._scheduler.current.owner.actor
        details = (report.who(actor), *report.source(current_site()), f"  {what}")
        self._found(Violation(Reason.UNKNOWN, details))

    def on_tensor(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """A library operation of a host accesses a tensor; not a scheduling point."""
        addresses = _element_addresses(tensor)
        access = self._access(self._scheduler.current.owner.actor, writes=writes)
        self._check_plain(access, addresses, tensor.element_size(), at_once=False)
        if writes:
            self._touch(addresses)

    def on_launch_dependents(self) -> None:
        """A program lets the next launch begin, which it does once all programs have."""
        launch = self._scheduler.current.owner.launch
        assert launch is not None
        launch.ready += 1
        if launch.has_launched_dependents:
            self._scheduler.touch([launch])

    def on_gdc_wait(self) -> None:
        """A program waits for the end of the launch before its own."""
        thread = self._scheduler.current.owner
        before = None if thread.launch is None else thread.launch.before
        if before is None:
            return
        while not before.has_ended:
            self._scheduler.sleep([before])
        enter_program(thread)
        thread.actor.join(before.ended)

    def crashed(self, actor: Actor, error: BaseException) -> None:
        """Record that a program raised an exception, which is right after a timeout."""
        if self.timed_out is not None:
            return
        while error.__cause__ is not None:  # the interpreter wraps them at each call
            error = error.__cause__
        site = site_of_error(error)
        lines = [] if site is None else report.source(site)
        details = (report.who(actor), *lines, f"  {error}")
        self._found(Violation(Reason.CRASH, details))

    # -- scheduling -------------------------------------------------------------------------------

    def _pass_point(self, thread: Thread, poll: tuple[Any, ...]) -> None:
        """Let others run; in a polling loop, sleep until one of its words has been written."""
        turn = _polling_turn(thread.reads, poll) if poll else []
        if turn:
            words = [word for read in turn for word in read.words]
            seen = [version for read in turn for version in read.versions]
            nudges = self._nudges
            while self._versions_of(words) == seen and self._nudges == nudges:
                self._scheduler.sleep(words)
        else:
            self._scheduler.point()
        enter_program(thread)

    def nudge(self) -> bool:
        """When all sleep, let those that seem to poll read once more: their loops may end.

        Returns:
            Whether any seems to poll, and this has not been done too often.
        """
        self._nudges += 1
        return self._nudges < _MOST_NUDGES and self._scheduler.wake_if(lambda it: type(it) is int)

    def _remember(
        self, thread: Thread, poll: tuple[Any, ...], addresses: np.ndarray, *, is_new: bool = True
    ) -> None:
        if not poll:
            thread.reads.clear()
            return
        words = addresses.tolist()
        versions = self._versions_of(words) if is_new else [-1] * len(words)
        thread.reads.append(Read(poll, words, versions))
        if len(thread.reads) > 2 * _LONGEST_LOOP * _PLAIN_TURNS:
            del thread.reads[: -_LONGEST_LOOP * _PLAIN_TURNS]

    def _versions_of(self, addresses: list[int]) -> list[int]:
        return [self._versions.get(address, 0) for address in addresses]

    def _touch(self, addresses: np.ndarray) -> None:
        words = addresses.tolist()
        for address in words:
            self._versions[address] = self._versions.get(address, 0) + 1
        self._scheduler.touch(words)

    # -- checking ---------------------------------------------------------------------------------

    def _access(
        self,
        actor: Actor,
        *,
        writes: bool,
        scope: Scope | None = None,
        sem: str = "",
        empties: bool = False,
    ) -> Access:
        self.accesses += 1
        if self.accesses > _MOST_ACCESSES:
            self._found(Violation(Reason.LIVELOCK, (report.who(actor),)))
        site = current_site()
        return Access(actor, actor.epoch, site, writes, scope, sem, empties, self.accesses)

    def _regions(
        self, access: Access, addresses: np.ndarray, size: int
    ) -> Iterator[tuple[Region, np.ndarray]]:
        """The addresses of an access by region; one that is in no region ends the run."""
        for region, inside in self._shadow.split(addresses, size):
            if region is None:
                text = f"address {int(inside.max()):#x}:"
                self._found(self._about(Reason.OUTSIDE, text, access))
            else:
                yield region, inside

    def _check_plain(
        self, access: Access, addresses: np.ndarray, size: int, *, at_once: bool = True
    ) -> None:
        for region, inside in self._regions(access, addresses, size):
            if region.word_bytes not in (0, size):
                text = report.where(region, int(inside[0]))
                text = f"{text}, {region.word_bytes} bytes, in parts:"
                self._found(self._about(Reason.TORN, text, access))
            elif region.is_lamport:
                self._race(self._shadow.lamport_words(access, region, inside), region, at_once)
            elif region.word_bytes:
                self._race(self._shadow.ll_packets(access, region, inside), region, at_once)
            else:
                self._race(self._shadow.plain(access, region, inside, size), region, at_once)

    def _found(self, violation: Violation, *, at_once: bool = True) -> None:
        """Keep the first violation and end the run."""
        if self.violation is None:
            self.violation = violation
            self._scheduler.stop(at_once=at_once)

    def _race(self, conflict: Conflict | None, region: Region, at_once: bool = True) -> None:
        if conflict is None:
            return
        reason = None
        if self.timed_out is not None:
            if self.timed_out not in (conflict.earlier.actor, conflict.later.actor):
                return
            reason = Reason.TIMEOUT
        self._found(report.race(conflict, region, self._shadow.find, reason), at_once=at_once)

    def _about(self, reason: Reason, text: str, access: Access) -> Violation:
        details = (text, *report.describe(access))
        return Violation(reason, details, (access.site.lines[0].where,))


@contextmanager
def _as_before(words: list[Stale]) -> Iterator[None]:
    """Within the context, memory holds what it held before these writes."""
    places = [(stale.conflict.address, stale.before) for stale in words]
    now = [(address, ctypes.string_at(address, len(before))) for address, before in places]
    try:
        for address, before in places:
            ctypes.memmove(address, before, len(before))
        yield
    finally:
        for address, value in now:
            ctypes.memmove(address, value, len(value))


def _polling_turn(reads: list[Read], poll: tuple[Any, ...]) -> list[Read]:
    """The reads of the last turn of a loop that only reads, if `poll` begins the next one."""
    for length in range(1, min(_LONGEST_LOOP, len(reads)) + 1):
        turn = reads[-length:]
        if turn[0].key != poll:
            continue
        is_atomic = any(read.is_atomic for read in turn)
        turns = (1 if length == 1 else _ATOMIC_TURNS) if is_atomic else _PLAIN_TURNS
        before = reads[-turns * length :]
        if len(before) == turns * length and all(
            read.key == before[index % length].key for index, read in enumerate(before)
        ):
            return turn
    return []


class TorchOperations(TorchDispatchMode):
    """Reports the tensors that the host's torch operations read and write.

    Args:
        on_tensor: receives each tensor.
        postpones: queues a copy and returns True, or returns False.
    """

    def __init__(
        self,
        on_tensor: Callable[..., None],
        postpones: Callable[[Callable[[], object]], bool],
    ) -> None:
        super().__init__()
        self._on_tensor = on_tensor
        self.postpones = postpones

    def tell(self, parameter: Any, value: Any) -> None:
        """Report one argument of an operation."""
        writes = parameter.alias_info is not None and parameter.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                self._on_tensor(leaf, writes=writes)


def _dispatch(
    mode: TorchOperations,
    function: Any,
    types: Any,
    args: tuple = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    named = dict(kwargs or {})
    if function is torch.ops.aten.copy_.default and mode.postpones(partial(args[0].copy_, args[1])):
        return args[0]
    if not function.is_view:
        parameters = function._schema.arguments
        for parameter, value in zip(parameters, args, strict=False):
            mode.tell(parameter, value)
        for parameter in parameters[len(args) :]:
            mode.tell(parameter, named.get(parameter.name))
    return function(*args, **named)


# Set from outside: a method of the class's body is wrapped in what imports torch's compiler, 2 s.
TorchOperations.__torch_dispatch__ = _dispatch  # type: ignore[assignment, method-assign]


def _element_addresses(tensor: torch.Tensor) -> np.ndarray:
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return (tensor.data_ptr() + offsets * tensor.element_size()).astype(np.uint64)
