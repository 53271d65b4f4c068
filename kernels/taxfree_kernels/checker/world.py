"""The face of the checker for any kernels: symmetric memory, calls on all ranks, many schedules.

::

    from taxfree.check import World

    def test_my_all_reduce():
        with World(ranks=4, seeds=100) as world:
            x = world.empty((1024,), torch.bfloat16)  # symmetric: one on each rank
            flags = world.zeros((64,), torch.int32)
            world.run(lambda rank: my_kernel[(8,)](x.local(rank), x.bases, flags.bases, rank, 4))
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from taxfree_kernels.checker.checked import Checked, CheckFailed, one_thread
from taxfree_kernels.checker.coverage import Coverage, Wanted
from taxfree_kernels.checker.fabric import DeclaredHeap
from taxfree_kernels.checker.report import Reason, Violation
from taxfree_kernels.checker.simulate import Outcome, Schedule, Sizes, run_schedule
from taxfree_kernels.checker.streams import Stream
from taxfree_kernels.errors import PlanError

_HEAP_BYTES = 1 << 24
_WANTED = Wanted(ranks=1, programs=1, calls=1)


@dataclass
class Asked:
    """What a command asks of the worlds that a function makes, and those worlds.

    Args:
        ranks, seeds: in place of a world's own; None leaves them.
        first_seed: of the first schedule.
        replay: the command that repeats a schedule, but for its seed.
    """

    ranks: int | None = None
    seeds: int | None = None
    first_seed: int | None = None
    replay: str = ""
    worlds: list[World] = field(default_factory=list)


asked: ContextVar[Asked | None] = ContextVar("taxfree_check", default=None)
_present: list[World] = []  # not a context variable: programs are coroutines with their own


class Symmetric:
    """A tensor that each rank has one of, at the same offset of its symmetric heap.

    Attributes:
        shape, dtype: of each rank's tensor.
        bases: int64 [ranks], the address of each rank's tensor: a table of pointers, as kernels
            take it.
    """

    def __init__(self, locals: Sequence[torch.Tensor], name: str) -> None:
        self._locals, self.name = locals, name
        self.shape, self.dtype = locals[0].shape, locals[0].dtype
        self.bases = torch.tensor([each.data_ptr() for each in locals])

    def local(self, rank: int) -> torch.Tensor:
        """A rank's tensor; also a host may write into it before a run, and read it after that."""
        return self._locals[rank]

    def describe(self, offset: int) -> str:
        """The element at a byte offset, for reports."""
        index = offset // self.dtype.itemsize
        if len(self.shape) > 1 and index < self._locals[0].numel():
            place = ", ".join(str(each) for each in np.unravel_index(index, tuple(self.shape)))
            return f"{self.name}[{place}]"
        return f"{self.name}[{index}]"


class World:
    """Ranks with symmetric memory on which kernels are checked.

    Each :meth:`run` repeats the same calls under many schedules, from the same memory. A kernel is
    launched as always, ``kernel[grid](...)``; it is interpreted, whether Triton was told to or not.

    Args:
        ranks: how many there are.
        seeds: schedules of a run. Seeds from `first_seed` on are taken.
        first_seed: the first one; with ``seeds=1``, the schedule that a report names.
        co_resident: all programs of a launch run at the same time, because no grid is larger than
            what the device runs at once. Otherwise schedules also start programs one by one, in
            the order of their ids, as a busy or small device would.
        heap_bytes: of each rank's symmetric heap.
        covered: that each synchronising line has run is part of the check.

    Raises:
        CheckFailed: from :meth:`run`, a schedule has shown a violation; from the end of the
            ``with`` block, a synchronising line never ran.
    """

    def __init__(
        self,
        ranks: int,
        seeds: int = 100,
        *,
        first_seed: int = 0,
        co_resident: bool = False,
        heap_bytes: int = _HEAP_BYTES,
        covered: bool = True,
    ) -> None:
        self._asked = asked.get() or Asked()
        self._asked.worlds.append(self)
        self.ranks = self._asked.ranks or ranks
        if self.ranks < 1:
            raise PlanError(f"a world of {self.ranks} ranks", "one rank or more")
        first = first_seed if self._asked.first_seed is None else self._asked.first_seed
        self.seeds = range(first, first + (self._asked.seeds or seeds))
        self.co_resident, self._covered = co_resident, covered
        self._arenas = list(torch.empty(self.ranks, heap_bytes, dtype=torch.uint8))
        self._blocks: list[tuple[int, torch.Tensor, Callable[[int], str]]] = []
        self._heaps = [
            DeclaredHeap(arena, partial(self._declare, rank))
            for rank, arena in enumerate(self._arenas)
        ]
        self._names: list[str] = []
        self._shared: dict[str, list[torch.Tensor]] = {}
        self._tables: list[torch.Tensor] = []
        self._outside: list[tuple[torch.Tensor, torch.UntypedStorage]] = []
        self._sizes = Sizes()
        self._schedule: Schedule | None = None
        self.heap_bases = torch.tensor([arena.data_ptr() for arena in self._arenas])
        self.checks: list[Checked] = []

    # -- memory -----------------------------------------------------------------------------------

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, name: str = ""
    ) -> Symmetric:
        """A symmetric tensor; its bytes are 0xFF, NaN in every floating-point type.

        Args:
            name: for reports; the variable in :meth:`run`'s function when it is left out.
        """
        shape = tuple(shape)
        blocks = [heap.empty(int(np.prod(shape)), dtype).view(shape) for heap in self._heaps]
        made = Symmetric(blocks, name or f"symmetric tensor {len(self._names)}")
        self._names.append(made.name)
        for rank, block in enumerate(blocks):
            self._name(rank, block, made.describe)
        return made

    def full(
        self, shape: Sequence[int], value: float, dtype: torch.dtype = torch.float32, *,
        name: str = "",
    ) -> Symmetric:  # fmt: skip
        """A symmetric tensor that is filled with one value."""
        made = self.empty(shape, dtype, name=name)
        for rank in range(self.ranks):
            made.local(rank).fill_(value)
        return made

    def zeros(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, name: str = ""
    ) -> Symmetric:
        """A symmetric tensor of zeros."""
        return self.full(shape, 0, dtype, name=name)

    def allocate(self, rank: int, count: int, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Elements of one rank's heap; the same calls give the same offsets on all ranks."""
        block = self._heaps[rank].empty(count, dtype)
        size = dtype.itemsize
        self._name(rank, block, lambda offset: f"{name}[{offset // size}]")
        return block

    def shared(
        self, name: str, count: int, dtype: torch.dtype, value: float | None
    ) -> list[torch.Tensor]:
        """A block of each rank that is made when it is first asked for.

        Args:
            value: that it is filled with; None leaves it as :meth:`empty` does.
        """
        known = self._shared.get(name)
        if known is None or not self._heaps[0].holds(known[0]) or known[0].numel() < count:
            known = [self.allocate(rank, count, dtype, name) for rank in range(self.ranks)]
            for block in known if value is not None else ():
                block.numpy().fill(value)  # no host's operation: it is there before any call
            self._shared[name] = known
        return known

    def table(self, rank: int, pointers: Sequence[int]) -> int:
        """The address of a table of pointers, as a rank's kernels read it."""
        made = torch.tensor(pointers)
        self._tables.append(made)
        if self._schedule is not None:
            self._schedule.declare_argument(rank, "table of pointers", made)
        return made.data_ptr()

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """The rank of a symmetric tensor, its offset in the heap, and its bytes.

        Raises:
            PlanError: it is in no heap.
        """
        for rank, arena in enumerate(self._arenas):
            offset = tensor.data_ptr() - arena.data_ptr()
            if 0 <= offset < arena.nbytes:
                return rank, offset, tensor.nbytes
        raise PlanError("the tensor is not in symmetric memory", "make it by World.empty")

    def view(
        self, rank: int, offset: int, sizes: Sequence[int], dtype: torch.dtype, first: int
    ) -> torch.Tensor:
        """A tensor at an offset of a rank's heap; it begins `first` elements later."""
        begin = offset + first * dtype.itemsize
        size = torch.Size(sizes).numel() * dtype.itemsize
        return self._arenas[rank][begin : begin + size].view(dtype).view(*sizes)

    def _declare(self, rank: int, block: torch.Tensor) -> None:
        block.view(torch.uint8).numpy().fill(0xFF)  # no host's operation

    def _name(self, rank: int, block: torch.Tensor, describe: Callable[[int], str]) -> None:
        self._blocks.append((rank, block, describe))
        if self._schedule is not None:
            self._schedule.declare(rank, block, describe)

    # -- calls ------------------------------------------------------------------------------------

    def run(
        self,
        call: Callable[..., object],
        calls: int = 3,
        *,
        barrier: bool = False,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Run calls on all ranks under each schedule, until one shows a violation.

        Memory is as it was before each schedule; after the run, it is as the last one left it.

        Args:
            call: what a rank's host does in a call: it launches kernels. It takes the rank, or the
                rank and the number of the call, from 0.
            calls: of each rank, back to back.
            barrier: a barrier of all hosts, with idle devices, follows each call.
            check: runs after each schedule, and raises AssertionError if memory holds a wrong
                result.

        Raises:
            CheckFailed: a schedule has shown a violation; its text is the report.
        """
        self._name_after(call)
        begin = time.process_time()
        self._before = [arena[: heap.used_bytes].clone() for arena, heap in self._memory()]
        coverage, schedules, accesses = Coverage(), 0, 0
        violation: Violation | None = None
        with one_thread():
            for seed in self.seeds:
                outcome = self._run_schedule(seed, call, calls, barrier)
                schedules, accesses = schedules + 1, accesses + outcome.accesses
                coverage.add(outcome.coverage)
                found = outcome.violation or _failure(check)
                if found is not None:
                    violation = replace(found, replay=self._replay(seed))
                    if found.reason is not Reason.ASSUMPTION:  # others may show more
                        break
        self._outside = []
        seconds = time.process_time() - begin
        name = getattr(call, "__name__", "call")
        name = name if name != "<lambda>" else f"run {len(self.checks) + 1}"
        checked = Checked(name, schedules, seconds, violation, coverage, _WANTED, accesses)
        self.checks.append(checked)
        if violation is not None:
            raise CheckFailed(checked)

    def _memory(self) -> Iterator[tuple[torch.Tensor, DeclaredHeap]]:
        return zip(self._arenas, self._heaps, strict=True)

    def _restore(self) -> None:
        """Make memory what it was before the first schedule, and free what calls allocated."""
        for (arena, heap), before in zip(self._memory(), self._before, strict=True):
            arena[: len(before)] = before
            heap.rewind(len(before))
        self._blocks = [each for each in self._blocks if self._heaps[each[0]].holds(each[1])]
        for tensor, storage in self._outside:
            tensor.untyped_storage().copy_(storage)
        self._outside = []

    def _run_schedule(
        self, seed: int, call: Callable[..., object], calls: int, barrier: bool
    ) -> Outcome:
        parameters = inspect.signature(call).parameters.values()
        required = [each for each in parameters if each.default is inspect.Parameter.empty]
        takes_number = len(required) > 1

        def of_rank(rank: int, number: int) -> None:
            call(rank, number) if takes_number else call(rank)
            if barrier:
                self.barrier()

        def setup(schedule: Schedule) -> list[list[Callable[[], object]]]:
            self._restore()
            self._schedule = schedule
            schedule.on_argument = self._keep
            for block in self._blocks:
                schedule.declare(*block)
            return [
                [partial(of_rank, rank, number) for number in range(calls)]
                for rank in range(self.ranks)
            ]

        try:
            return run_schedule(
                setup,
                self.ranks,
                seed,
                self._sizes,
                co_resident=self.co_resident,
                launches_fence=True,
            )
        finally:
            self._schedule = None

    def _keep(self, tensor: torch.Tensor) -> None:
        """Remember what memory outside of the heaps holds before a schedule uses it."""
        self._outside.append((tensor, tensor.untyped_storage().clone()))

    def _name_after(self, call: Callable[..., object]) -> None:
        """Name tensors after the variables that a function knows them by."""
        found = inspect.getclosurevars(inspect.unwrap(call))
        for name, value in {**found.globals, **found.nonlocals}.items():
            if isinstance(value, Symmetric) and value.name.startswith("symmetric tensor"):
                value.name = name

    def _replay(self, seed: int) -> str:
        if self._asked.replay:
            return f"{self._asked.replay} --first-seed {seed} --seeds 1"
        return f"World(ranks={self.ranks}, seeds=1, first_seed={seed})"

    # -- inside of a call -------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank whose call is running."""
        assert self._schedule is not None, "no call is running"
        return self._schedule.thread.actor.rank

    @property
    def is_running(self) -> bool:
        """Whether a call is running."""
        return self._schedule is not None and self._schedule.is_running

    def barrier(self) -> None:
        """In a call: wait until the devices of all ranks are idle and all hosts have come here."""
        if self._schedule is not None:
            self._schedule.barrier()

    def side_stream(self) -> Stream:
        """In a call: another stream of the rank.

        ``with stream.forked():`` launches on it, after what the rank has launched so far;
        ``stream.join()`` orders what the rank launches next after it. A call joins what it forks.
        """
        assert self._schedule is not None, "no call is running"
        return self._schedule.side_stream(self.rank)

    # -- the context ------------------------------------------------------------------------------

    def __enter__(self) -> World:
        from taxfree_kernels.checker.conventions import installed

        self._stack = contextlib.ExitStack()
        _present.append(self)
        self._stack.enter_context(installed(self))
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        _present.pop()
        self._stack.close()
        if kind is None and self._covered and not any(each.violation for each in self.checks):
            together = Coverage()
            for each in self.checks:
                together.add(each.coverage)
            if together.missing(_WANTED):
                first = self.checks[0]
                raise CheckFailed(replace(first, name="all runs", coverage=together))


def present() -> World:
    """The world whose ``with`` block is running.

    Raises:
        PlanError: there is none.
    """
    if not _present:
        raise PlanError("no world: symmetric memory is simulated in one only", "with World(...):")
    return _present[-1]


def _failure(check: Callable[[], object] | None) -> Violation | None:
    """The wrong result that a check finds."""
    if check is None:
        return None
    try:
        check()
    except AssertionError as error:
        lines = str(error).strip().splitlines() or ["the check after the schedule failed"]
        return Violation(Reason.WRONG_RESULT, tuple(lines[:8]))
    return None
