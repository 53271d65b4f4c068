"""The interface of fabrics: a rank, its symmetric heap, and the addresses of its peers' heaps.

Each has scratch memory that the calls of one stream share, and side streams.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from triton.runtime import jit

from taxfree_kernels.errors import PeerTimeout, PlanError

if TYPE_CHECKING:
    from taxfree_kernels.fabric.heap import DeviceBarrier, Pool, SymmetricHeap
    from taxfree_kernels.hardware import Hardware

ALIGNMENT = 256  # bytes; more than any vector access or bulk copy needs
_MOST_SIZES = 1024  # whose launches a plan remembers

Made = TypeVar("Made")
Piece = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def aligned(size: int) -> int:
    """The bytes that a block of `size` bytes takes: the next block begins there."""
    return size + -size % ALIGNMENT


class Fabric(ABC):
    """A group of ranks that load from and store to each other's symmetric heaps.

    Attributes:
        group: the process group, for exchanges between hosts and for library collectives.
        rank, world_size: in `group`, which may be part of a bigger world.
        device: of this rank's tensors.
        hardware: limits of the device.
        heap: this rank's arena.
        heap_bases: int64 [world_size] on the device: addresses of each rank's arena on this rank.
        pool: the inboxes that plans share.
        device_barrier: aligns all ranks' streams.
        workspace: scratch memory of the plans.
        static_weights: whether the caller promises what :func:`taxfree.init` says; plans that are
            made afterwards may load weights before the preceding kernel has ended.
        static_cache: whether the caller promises what :func:`taxfree.init` says; plans that are
            made afterwards may load keys before the preceding kernel has ended.
    """

    name: ClassVar[str]
    backend: str  # the kernels' BACKEND: "interpreter", "cuda" or "hip"
    has_graphs: bool

    group: dist.ProcessGroup
    rank: int
    world_size: int
    device: torch.device
    hardware: Hardware
    heap: SymmetricHeap
    heap_bases: torch.Tensor
    pool: Pool
    device_barrier: DeviceBarrier
    static_weights: bool = False
    static_cache: bool = False

    _is_closed = False

    @abstractmethod
    def host_words(self, count: int) -> torch.Tensor:
        """int64 [count] in host memory that this rank's kernels can write; zeros."""

    @abstractmethod
    def ticks(self, seconds: float) -> int:
        """The bound of a wait in the unit in which this fabric's kernels count it."""

    def peer_view(self, block: torch.Tensor, peer: int) -> torch.Tensor:
        """`peer`'s copy of a block of the heap, for torch's own operations on this rank's device.

        Raises:
            PlanError: the fabric shows peers' heaps to kernels only.
        """
        begin = self.heap.offset_of(block)
        view = self._arena_of(peer)[begin : begin + block.nbytes]
        return view.view(block.dtype).view(block.shape)

    def _arena_of(self, peer: int) -> torch.Tensor:
        raise PlanError(f"fabric {self.name} shows peers' memory to kernels only")

    @cached_property
    def workspace(self) -> Workspace:
        return Workspace(self.device)

    @cached_property
    def library_memory(self) -> dict[Any, Workspace]:
        """Scratch memory of libraries, by kind, that plans share as well."""
        return {}

    def memory_of(self, kind: Callable[[Fabric], Any]) -> Any:
        """A library's scratch memory, made when the first plan asks for it."""
        if kind not in self.library_memory:
            self.library_memory[kind] = kind(self)
        return self.library_memory[kind]

    def loss(self, error: RuntimeError) -> PeerTimeout | None:
        """What to raise in place of an error of a call that means a lost peer; None if it does not.

        On one node nobody is named but by kernels.
        """
        return None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory of all kinds."""
        return sum(memory.nbytes for memory in (self.workspace, *self.library_memory.values()))

    def keep_memory(self) -> None:
        """Keep the present scratch memory: a captured graph holds its addresses."""
        for memory in (self.workspace, *self.library_memory.values()):
            memory.capture()

    def side_stream(self) -> SideStream:
        """A stream beside the caller's."""
        return SideStream(self.device)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until this rank's device is idle."""

    def barrier(self) -> None:
        """Wait until every rank's device is idle."""
        self.synchronize()
        self._meet(self.group)

    def _meet(self, group: dist.ProcessGroup) -> None:
        """A barrier of the hosts; NCCL is told its device, which it else warns of guessing."""
        is_nccl = "nccl" in dist.get_backend_config(group)
        dist.barrier(group, device_ids=[self.device.index] if is_nccl else None)

    def close(self) -> None:
        """Free everything once no peer uses it; collective. A second call does nothing.

        If the group has been destroyed, ranks cannot agree, and this is :meth:`release`.
        """
        if self._is_closed:
            return
        group = self.group
        if group not in dist.distributed_c10d._world.pg_map:
            self.release()
            return
        try:
            self.barrier()
        finally:
            self.release()
        self._meet(group)  # a driver frees memory once no peer maps it

    def release(self) -> None:
        """Free this rank's memory and group without its peers; rank and device stay readable.

        Peers keep their own views of the memory. The group's threads end with the last reference to
        it; a thread that outlives the interpreter would abort the process.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.synchronize()
        finally:
            kept = ("_is_closed", "rank", "world_size", "device", "hardware")
            self.__dict__ = {name: self.__dict__[name] for name in kept}
            gc.collect()  # interpreted launches leave cycles, which hold their arguments

    def __enter__(self) -> Fabric:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Workspace:
    """One block of scratch memory, and one of counters, for all plans of a fabric.

    Calls follow one another on a stream, so each may overwrite the data of the last one. The block
    is as large as the largest plan needs. When a plan needs more, a new block replaces it; the old
    one is freed, unless a captured graph holds its address.

    Args:
        device: of the memory.
        beside: another workspace of the same plans: they forget sizes when either is replaced.
        has_pool: its memory comes from its own pool, not from the caller's: the pool of a captured
            graph is freed with the graph.
    """

    def __init__(
        self, device: torch.device, beside: Workspace | None = None, has_pool: bool = True
    ) -> None:
        self._device = device
        self._pool = torch.cuda.MemPool() if has_pool and device.type == "cuda" else None
        self._block = self._nothing()
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        #: by id, since a dict has no hash
        self._dependents: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary() if beside is None else beside._dependents
        )
        self._captured: list[torch.Tensor] = []
        self._is_captured = False

    @property
    def nbytes(self) -> int:
        """Bytes held, those of captured graphs included."""
        return sum(block.nbytes for block in (self._block, self._counters, *self._captured))

    def scratch(self, *pieces: Piece) -> Scratch:
        """Uninitialised tensors, side by side in the block; grows it if they do not fit."""
        size = sum(aligned(_bytes(*piece)) for piece in pieces)
        if size > self._block.numel():
            self._grow(size)
        scratch = Scratch(self, pieces)
        self._dependents[id(scratch)] = scratch
        return scratch

    def counters(self, count: int) -> Callable[[], torch.Tensor]:
        """At least `count` int32 zeros, at their present place; every call leaves them at zero."""
        if count > self._counters.numel():
            self._forget(self._counters)
            with self._own_pool():
                self._counters = torch.zeros(count, dtype=torch.int32, device=self._device)
        return lambda: self._counters

    def by_size(self, make: Callable[[Any], Made]) -> BySize[Made]:
        """Results of `make` by size, kept until the block or the counters are replaced."""
        kept = BySize(make)
        self._dependents[id(kept)] = kept
        return kept

    def capture(self) -> None:
        """Keep the present memory as long as this exists: a graph holds its address."""
        self._is_captured = True

    def _grow(self, size: int) -> None:
        """Replace the block by a larger one; if memory is short, by one of the old size."""
        old = self._block.numel()
        self._forget(self._block)
        self._block = self._nothing()  # frees the old one first, unless a graph holds it
        try:
            self._block = self._allocate(size)
        except Exception:
            self._block = self._allocate(old)
            raise

    def _forget(self, old: torch.Tensor) -> None:
        if self._is_captured and old.numel():
            self._captured.append(old)
        for dependent in self._dependents.values():
            dependent.clear()

    def _carve(self, pieces: tuple[Piece, ...]) -> list[torch.Tensor]:
        begin, tensors = 0, []
        for shape, dtype in pieces:
            size = _bytes(shape, dtype)
            tensors.append(self._block[begin : begin + size].view(dtype).view(shape))
            begin += aligned(size)
        return tensors

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device)

    def _allocate(self, size: int) -> torch.Tensor:
        """A new block: uint8 [size]."""
        with self._own_pool():
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _own_pool(self) -> contextlib.AbstractContextManager[None]:
        if self._pool is None:
            return contextlib.nullcontext()
        return torch.cuda.use_mem_pool(self._pool)


class Scratch:
    """Pieces of a workspace, at the present place of its block."""

    def __init__(self, workspace: Workspace, pieces: tuple[Piece, ...]) -> None:
        self._workspace, self._pieces = workspace, pieces
        self._tensors: list[torch.Tensor] = []

    def __call__(self) -> list[torch.Tensor]:
        if not self._tensors:
            with torch.inference_mode(False):  # calls outside of it will write there, too
                self._tensors = self._workspace._carve(self._pieces)
        return self._tensors

    def clear(self) -> None:
        """Forget where the block was."""
        self._tensors = []


class BySize(dict[Any, Made], Generic[Made]):
    """A dict that makes missing values, and is cleared when it has become large."""

    def __init__(self, make: Callable[[Any], Made]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, size: Any) -> Made:
        if len(self) >= _MOST_SIZES:
            self.clear()
        with torch.inference_mode(False):
            self[size] = made = self._make(size)
        return made


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class SideStream:
    """Work beside the current stream, forked from it and joined to it by events.

    It has high priority: its programs are few, and peers wait for them. On the host everything runs
    in one order.

    Args:
        device: of the fabric.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def fork(self) -> None:
        """Order later work here after all work that the current stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within the context this is the current stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Fork, and enter."""
        self.fork()
        with self.entered():
            yield

    def join(self) -> None:
        """Make the current stream wait for all work here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def find_constants_of_callees_first() -> None:
    """Let the key of a kernel not depend on which kernels its process compiled before; idempotent.

    A key covers the constants of all functions that a kernel calls. Triton 3.6, unlike 3.9, takes a
    callee's before it has looked for them, so it misses those of a callee that is new. Then a
    worker compiles anew what the compile screen has compiled, and an engine what a search has.
    """
    finder: Any = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if update is not None and not hasattr(update, "__wrapped__"):

        def update_hash(self: Any, function: Any) -> None:
            function.cache_key  # noqa: B018  looks for the constants
            update(self, function)

        update_hash.__wrapped__ = update  # type: ignore[attr-defined]
        finder._update_hash = update_hash


find_constants_of_callees_first()  # before any kernel is compiled
