"""Simulated ranks with symmetric memory, as hosts see them: allocation, barriers, streams."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from taxfree_check.checker.fabric import DeclaredHeap
from taxfree_check.checker.simulate import Schedule
from taxfree_check.checker.streams import Stream
from taxfree_kernels.errors import PlanError

_present: list[Ranks] = []  # not a context variable: programs are coroutines with their own


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
        self.bases = torch.tensor([value.data_ptr() for value in locals])

    def local(self, rank: int) -> torch.Tensor:
        """A rank's tensor; also a host may write into it before a run, and read it after that."""
        return self._locals[rank]

    def describe(self, offset: int) -> str:
        """The element at a byte offset, for reports."""
        index = offset // self.dtype.itemsize
        if len(self.shape) > 1 and index < self._locals[0].numel():
            position_text = ", ".join(
                str(position) for position in np.unravel_index(index, tuple(self.shape))
            )
            return f"{self.name}[{position_text}]"
        return f"{self.name}[{index}]"


class Allocator(ABC):
    """What allocates symmetric tensors of several ranks."""

    ranks: int

    @abstractmethod
    def empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, name: str = ""
    ) -> Symmetric:
        """A symmetric tensor; its bytes are 0xFF, NaN in every floating-point type."""

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

    @abstractmethod
    def barrier(self) -> None:
        """In a call: wait until all hosts have come here; their devices are idle."""

    def of_rank(self, call: Callable[..., object], barrier: bool) -> Callable[[int, int], None]:
        """A call that takes the rank, or the rank and the call's number, as one that takes both."""
        parameters = inspect.signature(call).parameters.values()
        takes_number = (
            sum(parameter.default is inspect.Parameter.empty for parameter in parameters) > 1
        )

        def called(rank: int, number: int) -> None:
            call(rank, number) if takes_number else call(rank)
            if barrier:
                self.barrier()

        return called


class Ranks(Allocator):
    """Ranks with symmetric memory, and the call that runs on them.

    Args:
        ranks: how many there are.
        heap_bytes: of each rank's symmetric heap.
    """

    def __init__(self, ranks: int, heap_bytes: int) -> None:
        if ranks < 1:
            raise PlanError(f"a world of {ranks} ranks", "one rank or more")
        self.ranks = ranks
        self._arenas = list(torch.empty(ranks, heap_bytes, dtype=torch.uint8))
        self._blocks: list[tuple[int, torch.Tensor, Callable[[int], str]]] = []
        self._heaps = [
            DeclaredHeap(arena, partial(self._declare, rank))
            for rank, arena in enumerate(self._arenas)
        ]
        self._names: list[str] = []
        self._shared: dict[str, list[torch.Tensor]] = {}
        self._tables: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._outside: list[tuple[torch.Tensor, torch.UntypedStorage]] = []
        self._schedule: Schedule | None = None
        self.heap_bases = torch.tensor([arena.data_ptr() for arena in self._arenas])

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
        blocks = self._shared.get(name)
        if blocks is None or not self._heaps[0].holds(blocks[0]) or blocks[0].numel() < count:
            blocks = [self.allocate(rank, count, dtype, name) for rank in range(self.ranks)]
            for block in blocks if value is not None else ():
                block.numpy().fill(value)  # no host's operation: it is there before any call
            self._shared[name] = blocks
        return blocks

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

    # -- the same memory before each schedule -----------------------------------------------------

    def _save(self) -> None:
        """Remember what memory holds before the first schedule."""
        self._before = [arena[: heap.used_bytes].clone() for arena, heap in self._memory()]

    def _memory(self) -> Iterator[tuple[torch.Tensor, DeclaredHeap]]:
        return zip(self._arenas, self._heaps, strict=True)

    def _restore(self) -> None:
        """Make memory what it was before the first schedule, and free what calls allocated."""
        for (arena, heap), before in zip(self._memory(), self._before, strict=True):
            arena[: len(before)] = before
            heap.rewind(len(before))
        self._blocks = [block for block in self._blocks if self._heaps[block[0]].holds(block[1])]
        for tensor, storage in self._outside:
            tensor.untyped_storage().copy_(storage)
        self._outside = []

    def _keep(self, tensor: torch.Tensor) -> None:
        """Remember what memory outside of the heaps holds before a schedule uses it."""
        self._outside.append((tensor, tensor.untyped_storage().clone()))

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

    def barrier(self, channel: int = 0) -> None:
        """In a call: wait until the devices of all ranks are idle and all hosts have come here.

        Args:
            channel: hosts at barriers of different channels wait for each other without end.
        """
        if self._schedule is not None:
            self._schedule.barrier(channel)

    def refuse(self, what: str) -> None:
        """In a kernel: end the run, as it does what is not simulated."""
        if self._schedule is not None:
            self._schedule.refuse(what)

    def exchange(self, word: torch.Tensor, before: int, after: int, sem: str) -> None:
        """In a call: on the present stream, wait until an int32 word holds `before`; set `after`.

        Args:
            sem: of the exchange, at system scope.
        """
        if self._schedule is not None:
            self._schedule.exchange(word, before, after, sem)

    def side_stream(self) -> Stream:
        """In a call: another stream of the rank.

        ``with stream.forked():`` launches on it, after what the rank has launched so far;
        ``stream.join()`` orders what the rank launches next after it. A call joins what it forks.
        """
        assert self._schedule is not None, "no call is running"
        return self._schedule.side_stream(self.rank)


@contextlib.contextmanager
def entered(ranks: Ranks) -> Iterator[None]:
    """Within the context, :func:`present` returns these ranks."""
    _present.append(ranks)
    try:
        yield
    finally:
        _present.pop()


def present() -> Ranks:
    """The world whose ``with`` block is running.

    Raises:
        PlanError: there is none.
    """
    if not _present:
        raise PlanError("no world: symmetric memory is simulated in one only", "with World(...):")
    return _present[-1]
