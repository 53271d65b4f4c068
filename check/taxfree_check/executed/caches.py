"""Memory as LLVM's memory model for gfx942 shows it: what a wave sees, and what its stores reach.

The rules are those of "Memory Model GFX942" in LLVM's *User Guide for AMDGPU Backend* (tables of
code sequences): plain accesses go through the L1 of the compute unit and the L2 of the chiplet
(XCD), which nothing keeps coherent but ``buffer_inv``, ``buffer_wbl2``, and accesses with scope
bits.

What the L2 does further depends on the kind of memory (MTYPE of its pages), that is, on whose
memory it is and on how it was allocated:

=========  =======================  ==========================  ====================
grain      a GPU's own memory       that of another GPU         that of the host
=========  =======================  ==========================  ====================
any        cached (NC)              cached (NC)                 cached (NC)
coarse     cached and probed (RW)   cached (NC)                 not cached (UC)
fine       cached and probed (RW)   not cached (UC)             not cached (UC)
=========  =======================  ==========================  ====================

A write that arrives in probed memory drops the line from the L2 of its GPU. The code sequences do
not depend on the kind, so they must be right for "any", which allows most. The L1 caches all.

Each cache here is a copy of all memory, taken when it was last invalidated, with what was stored
through it since: every line is fetched at once and kept as long as the model allows. A third copy,
one for each GPU, stands for what has been released to that GPU only: a write-back at agent scope
ends there. So a missing invalidation shows stale bytes, a missing write-back leaves peers without
the bytes, and a scope that is too narrow does either. By seed, caches are also refreshed at random
moments.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from enum import IntEnum
from random import Random
from typing import Any

import numpy as np
import torch

from taxfree_check.executed.errors import BadAccess
from taxfree_check.executed.lanes import Lanes

Span = tuple[int, int]  # the first byte, and the one behind the last

_CAPACITY = 1 << 25  # bytes of address space; only what is used is ever touched
_GAP = 256  # between tensors: no access reaches from one into the next
_LINE = 128  # bytes of a cache line


class Scope(IntEnum):
    """How far an access reaches; the level of the view that it goes down to at least."""

    UNIT = 0
    CHIPLET = 1
    AGENT = 2
    SYSTEM = 3


def scope_of(modifiers: Any) -> Scope:
    """The scope of a load or store, from its bits."""
    if "sc1" not in modifiers:
        return Scope.UNIT
    return Scope.SYSTEM if "sc0" in modifiers else Scope.AGENT


class Level:
    """Bytes of all memory, as one cache or the memory itself has them.

    Args:
        below: where its contents come from and go to; None for the memory itself.
        current: for each `_GAP` bytes, whether arriving writes update it. None for nowhere.
    """

    def __init__(self, below: Level | None = None, current: Lanes | None = None) -> None:
        self.below, self._current = below, current
        self.probed: list[Level] = []  # the caches that a write which arrives here concerns
        self.bytes = np.zeros(_CAPACITY, np.uint8)
        self.of = {size: self.bytes.view(f"u{size}") for size in (1, 2, 4, 8)}
        dirty = np.zeros(_CAPACITY if below else 0, np.uint8)
        self.dirty = {size: dirty.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.is_dirty = False

    def mark(self, places: Lanes, size: int) -> None:
        """Note that these elements have to be written back."""
        if self.below is not None:
            self.dirty[size][places] = (1 << 8 * size) - 1
            self.is_dirty = True

    def arrive(self, indices: Lanes, size: int, values: Lanes) -> None:
        """Take elements that are written no further."""
        self.of[size][indices] = values
        self.mark(indices, size)
        for level in self.probed:
            level._probe(indices, size, values)

    def _probe(self, indices: Lanes, size: int, values: Lanes) -> None:
        assert self._current is not None
        concerns = self._current[indices * size // _GAP]
        indices, values = indices[concerns], values[concerns]
        if indices.size:
            dirty = self.dirty[size][indices]
            self.of[size][indices] = values & ~dirty | self.of[size][indices] & dirty
            for level in self.probed:
                level._probe(indices, size, values)

    def refresh(self, span: slice) -> None:
        """Forget everything but what has to be written back, and fetch it again."""
        assert self.below is not None
        if self.is_dirty:
            is_clean = self.dirty[1][span] == 0
            np.copyto(self.bytes[span], self.below.bytes[span], where=is_clean)
        else:
            self.bytes[span] = self.below.bytes[span]

    def write_back(self, used: int) -> None:
        """Write what is dirty to the level below."""
        if not self.is_dirty:
            return
        assert self.below is not None
        words = np.flatnonzero(self.dirty[8][: -(-used // 8)])
        places = np.add.outer(8 * words, np.arange(8)).ravel()
        places = places[self.dirty[1][places] != 0]
        self.below.arrive(places, 1, self.bytes[places])
        self.dirty[1][places] = 0
        self.is_dirty = False


class DeviceMemory:
    """The memory of all GPUs, and the tensors in it.

    Args:
        grain: "any", "coarse" or "fine".
    """

    def __init__(self, grain: str = "any") -> None:
        self.grain = grain
        self.gpus: list[GpuMemory] = []
        self.level = Level()
        self.version = 0  # counts what changes any level
        self.arrivals = 0  # of these, what may bring new values where atomics read
        self.base = self.level.bytes.ctypes.data
        self.used = _GAP
        self._begins: list[int] = []
        self._ends: list[int] = []

    def empty(self, count: int, dtype: torch.dtype, home: int | None = None) -> torch.Tensor:
        """A tensor that kernels may touch; its address is that which they see.

        Args:
            home: the GPU whose memory it is in; None for the host's.
        """
        begin, size = self.used, count * dtype.itemsize
        self.used = -(-(begin + size + _GAP) // _GAP) * _GAP
        if self.used > _CAPACITY:
            raise BadAccess("the problem does not fit the executor's memory", "take a smaller one")
        self._begins.append(begin)
        self._ends.append(begin + size)
        for gpu in self.gpus:
            gpu.map(slice(begin // _GAP, self.used // _GAP), home)
        return torch.from_numpy(self.level.bytes[begin : begin + size]).view(dtype)

    def copy_of(self, tensor: torch.Tensor, home: int) -> torch.Tensor:
        """A tensor's copy in the memory of a GPU, with the same strides."""
        storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        copy = self.empty(storage.numel(), tensor.dtype, home).copy_(storage)
        return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        return 0 <= tensor.data_ptr() - self.base < _CAPACITY

    def places(self, addresses: Lanes, size: int) -> tuple[Lanes, Span]:
        """Addresses as offsets into the memory, and the bytes that they span.

        Args:
            addresses: uint64; none is an error neither.
            size: bytes of each access.

        Raises:
            BadAccess: one is not inside a tensor.
        """
        places = (addresses - np.uint64(self.base)).view(np.int64)
        if not places.size:
            return places, (0, 0)
        if places.size == 1:
            low = high = places.item()
        else:
            low, high = int(np.minimum.reduce(places)), int(np.maximum.reduce(places))
        index = bisect(self._begins, low) - 1
        if index < 0 or high + size > self._ends[index]:
            for address in places.tolist():
                self._check(address, size)
        return places, (low, high + size)

    def _check(self, address: int, size: int) -> None:
        index = bisect(self._begins, address) - 1
        if index < 0 or address + size > self._ends[index]:
            behind = (
                f"{address - self._ends[index]} bytes behind tensor {index}"
                if index >= 0
                else "nowhere"
            )
            raise BadAccess(f"access of {size} bytes outside of all tensors: {behind}")


class GpuMemory:
    """The caches of one GPU; make all before tensors.

    Args:
        memory: of all GPUs.
        chiplets, units: XCDs, and compute units of each, that workgroups are dealt to.
    """

    def __init__(self, memory: DeviceMemory, chiplets: int = 2, units: int = 2) -> None:
        self.memory, self._number = memory, len(memory.gpus)
        memory.gpus.append(self)
        current, self.uncached = (np.zeros(_CAPACITY // _GAP, bool) for _ in range(2))
        self._current = current
        self.agent = Level(memory.level, current)
        self.chiplets = [Level(self.agent, current) for _ in range(chiplets)]
        if memory.grain != "any":
            memory.level.probed.append(self.agent)
            self.agent.probed += self.chiplets
        self.views = [
            [
                View(self, number, (Level(chiplet), chiplet, self.agent, memory.level))
                for _ in range(units)
            ]
            for number, chiplet in enumerate(self.chiplets)
        ]

    def map(self, pages: slice, home: int | None) -> None:
        """Note whose memory new pages are."""
        grain, is_own = self.memory.grain, home == self._number
        is_cached = is_own or (home is not None and grain == "coarse") or grain == "any"
        self.uncached[pages] = not is_cached
        self._current[pages] = is_own or not is_cached

    def begin_launch(self) -> None:
        """Caches are invalidated before a kernel begins."""
        for level in (self.agent, *self.chiplets, *self._units()):
            level.refresh(slice(0, self.memory.used))

    def end_launch(self) -> None:
        """Caches are written back when a kernel has ended."""
        self.memory.version += 1
        self.memory.arrivals += 1
        for level in (*self.chiplets, self.agent):
            level.write_back(self.memory.used)

    def churn(self, rng: Random) -> None:
        """Evict one cache's lines, and fetch them again, as happens at any time."""
        self.memory.version += 1
        self.memory.arrivals += 1
        level = rng.choice([self.agent, *self.chiplets, *self._units()])
        level.write_back(self.memory.used)
        begin, end = sorted(rng.randrange(self.memory.used) & -_LINE for _ in "ab")
        level.refresh(rng.choice([slice(begin, end + _LINE), slice(0, self.memory.used)]))

    def _units(self) -> list[Level]:
        return [view.levels[0] for views in self.views for view in views]


class View:
    """Memory as the waves of one compute unit see it.

    Args:
        chiplet: the number of the unit's chiplet.
        levels: L1, L2, what the GPU's chiplets share, memory.
    """

    def __init__(
        self, gpu: GpuMemory, chiplet: int, levels: tuple[Level, Level, Level, Level]
    ) -> None:
        self.gpu, self.memory, self.chiplet, self.levels = gpu, gpu.memory, chiplet, levels

    def load(self, places: Lanes, size: int, scope: Scope) -> Lanes:
        """Elements of 1, 2, 4 or 8 bytes at offsets that are multiples of it."""
        indices = places // size if size > 1 else places
        if scope == Scope.UNIT:
            return self.levels[0].of[size][indices]
        return self._fetch(places, size, scope)

    def _fetch(self, places: Lanes, size: int, scope: Scope) -> Lanes:
        """Read at a level, past the caches above it but for what they have to write back."""
        indices = places // size if size > 1 else places
        values = self.levels[scope].of[size][indices]
        for level in self.levels[scope - 1 :: -1]:
            if level.is_dirty:
                dirty = level.dirty[size][indices]
                values = values & ~dirty | level.of[size][indices] & dirty
            level.of[size][indices] = values
        return values

    def store(self, places: Lanes, size: int, values: Lanes, scope: Scope) -> None:
        """Write through to a level, at least to the L2, which keeps it if it caches this memory."""
        if scope < Scope.SYSTEM and self.memory.grain != "any":
            is_uncached = self.gpu.uncached[places // _GAP]
            if is_uncached.any():
                self._store(places[is_uncached], size, values[is_uncached], Scope.SYSTEM)
                places, values = places[~is_uncached], values[~is_uncached]
        self._store(places, size, values, scope)

    def _store(self, places: Lanes, size: int, values: Lanes, scope: Scope) -> None:
        indices = places // size if size > 1 else places
        last = max(scope, Scope.CHIPLET)
        self.memory.version += 1
        self.memory.arrivals += 1
        for level in self.levels[:last]:
            level.of[size][indices] = values
            if level.is_dirty:
                level.dirty[size][indices] = 0
        self.levels[last].arrive(indices, size, values)

    def update(
        self,
        places: Lanes,
        size: int,
        operands: Lanes,
        function: Callable[[int, int], int],
        scope: Scope,
    ) -> Lanes:
        """Let each lane in turn replace an element by a function of it; returns what was there."""
        before = np.empty(len(places), f"u{size}")
        mask = (1 << 8 * size) - 1
        for lane in range(len(places)):
            address = places[lane : lane + 1]
            before[lane] = self._fetch(address, size, scope)[0]
            old = before[lane].item()
            value = function(old, operands[lane].item()) & mask
            if value != old:
                self.store(address, size, np.array([value], f"u{size}"), scope)
        return before

    def invalidate(self, scope: Scope) -> None:
        """``buffer_inv``: caches above a scope fetch again, the lowest first."""
        self.memory.version += 1
        for level in self.levels[max(scope - 1, 0) :: -1]:
            level.refresh(slice(0, self.memory.used))

    def write_back(self, scope: Scope) -> None:
        """``buffer_wbl2``: the L2 writes back, and at system scope what the GPU shares does too."""
        self.memory.version += 1
        for level in self.levels[Scope.CHIPLET : scope]:
            self.memory.arrivals += level.is_dirty
            level.write_back(self.memory.used)
