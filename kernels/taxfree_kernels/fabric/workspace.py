"""Scratch memory that the calls of one stream share."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from taxfree_kernels.fabric.layout import aligned

_MOST_SIZES = 1024  # whose launches a plan remembers

Made = TypeVar("Made")
Piece = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


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
        return sum(each.nbytes for each in (self._block, self._counters, *self._captured))

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
        for each in self._dependents.values():
            each.clear()

    def _carve(self, pieces: tuple[Piece, ...]) -> list[torch.Tensor]:
        begin, found = 0, []
        for shape, dtype in pieces:
            size = _bytes(shape, dtype)
            found.append(self._block[begin : begin + size].view(dtype).view(shape))
            begin += aligned(size)
        return found

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
