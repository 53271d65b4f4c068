"""A model of L2 caches: hit rate and memory traffic of a kernel, from its schedule's own accesses.

A trace-driven simulator of one cache at a time. Programs run where the device's dispatcher puts
them, program p at cache p % caches, as many at a time as fit. Each reads two streams of tiles (K
and V; A and W), one step after another. A step waits for its tiles, then computes. So a program
whose tiles hit goes faster than one whose tiles miss, and programs that read the same tiles bunch
up behind the one that is ahead. That, and how far they drift apart, decides the hit rate.

- The cache is set-associative with least-recently-used replacement, in granules: a tile, or an
  equal part of it, whose lines are read together. A hash of the granule chooses the sets.
- Reads count; writes are left out. A line that is on its way counts as a hit; its reader waits.
- Misses queue for the cache's share of memory bandwidth. Where the programs of n caches read the
  same data, 1 / n of each one's misses goes to memory, the rest to the memory-side cache (MALL),
  whose size is not modelled.

With numba installed the simulation takes seconds per shape; without, it is the same, interpreted.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from triton.runtime.jit import KernelInterface

from taxfree_kernels.device.tiles import attention_tile, swizzle2d, xcd_swizzle
from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_tune.cost.machines import SHEETS, DataSheet
from taxfree_tune.cost.pieces import ITEM_BYTES

try:
    from numba import njit
except ImportError:

    def njit(function: Callable[..., Any]) -> Callable[..., Any]:
        """Without numba: the function itself."""
        return function


_NORMALS = 1 << 16
_HASH = 2654435761  # Knuth's: odd, near 2**32 divided by the golden ratio

Integers = NDArray[np.int64]


_NUMPY = {
    "min": np.minimum,
    "max": np.maximum,
    "tl": SimpleNamespace(where=np.where),
}


@functools.cache
def on_host(function: KernelInterface[Any]) -> Callable[..., Any]:
    """A device function as a Python function of integers and NumPy arrays of them.

    The function, and those that it calls, may use arithmetic, min, max and tl.where.
    """
    python: FunctionType = function.fn
    names = {
        name: on_host(value) if isinstance(value, KernelInterface) else value
        for name, value in python.__globals__.items()
        if name in python.__code__.co_names
    }
    return FunctionType(python.__code__, names | _NUMPY, python.__name__)


@dataclass(frozen=True)
class L2:
    """The L2 caches of a device.

    Args:
        hardware: the device.
        sheet: its peak rates.
        caches: their number; programs are assigned to them round-robin.
        capacity: bytes of one.
        ways: of a set.
        side_bytes_per_s: of the memory-side cache.
        hit_ns, memory_ns, side_ns: time of a read that hits, that goes to memory, and that goes to
            the memory-side cache.
        jitter: standard deviation of a step's compute time, relative to its mean.
    """

    hardware: Hardware
    sheet: DataSheet
    caches: int
    capacity: int
    ways: int
    side_bytes_per_s: float
    hit_ns: float = 200.0
    memory_ns: float = 700.0
    side_ns: float = 450.0
    jitter: float = 0.3

    @property
    def units(self) -> int:
        """Compute units that share one."""
        return self.hardware.compute_units // self.caches

    def step_ns(self, flops: float) -> float:
        """Compute time of a step that has a unit to itself."""
        return 1e9 * flops * self.hardware.compute_units / self.sheet.flops_per_s


# Sizes, ways and rates are the vendors'. The three latencies are assumed, of the size that public
# pointer chases show. Jitter is the one fitted number: see docs/chiplets.md.
MI300X = L2(KNOWN["mi300x"], SHEETS["mi300x"], 8, 4 << 20, 16, 17.2e12)
MI350X = L2(KNOWN["mi350x"], SHEETS["mi350x"], 8, 4 << 20, 16, 17.2e12)
# Assumed: each of two partitions keeps its own copy of what its SMs read, with 16 ways; what the
# other has comes from there, at memory's rate.
H200 = L2(KNOWN["h200"], SHEETS["h200"], 2, 25 << 20, 16, SHEETS["h200"].memory_bytes_per_s)


@dataclass(frozen=True)
class Traffic:
    """Reads through the L2s.

    Args:
        requested: bytes that programs read.
        missed: bytes that the L2s read from memory or the memory-side cache.
        imbalance: steps of the programs of the cache that has most, relative to the mean.
        us: time of the kernel, to compare schedules and tiles by; it has neither a start nor an
            epilogue.
    """

    requested: int
    missed: int
    imbalance: float
    us: float

    @property
    def hit_rate(self) -> float:
        """Of bytes, 0 to 1."""
        return 1 - self.missed / self.requested


@dataclass(frozen=True)
class _Programs:
    """A launch: arrays with one entry per program, in the order of program ids.

    Args:
        begins: [programs, 2], number of the first granule of each stream.
        steps: of each program.
        sharers: [programs, 2], caches whose programs read the same stream.
        granules: of a step, of each stream.
        granule: bytes.
        compute_ns: of a step on a unit of its own.
        once: bytes that each program reads that no other does.
    """

    begins: Integers
    steps: Integers
    sharers: Integers
    granules: tuple[int, int]
    granule: int
    compute_ns: float
    once: int = 0


@njit  # type: ignore[untyped-decorator]
def _simulate(
    begins: Integers, steps: Integers, sharers: Integers, granules: Integers, slots: int,
    sets: int, ways: int, compute_ns: float, hit_ns: float, memory_ns: float, side_ns: float,
    memory_granule_ns: float, side_granule_ns: float, jitter: float, normals: NDArray[np.float64],
) -> tuple[int, int, float]:  # fmt: skip
    """Run the programs of one cache, which begin in their order.

    Returns:
        Granules requested, granules missed, nanoseconds until the last program's end.
    """
    tags = np.full((sets, ways), -1, np.int64)
    used = np.zeros((sets, ways), np.int64)
    ready = np.zeros((sets, ways))
    running = np.empty(slots, np.int64)
    step = np.zeros(slots, np.int64)
    started = 0
    events = [(0.0, 0)]
    events.pop()
    for slot in range(min(slots, len(steps))):
        running[slot] = started
        started += 1
        heapq.heappush(events, (0.0, slot))
    memory_free = 0.0
    side_free = 0.0
    requested = 0
    missed = 0
    last = 0.0
    while len(events) > 0:
        now, slot = heapq.heappop(events)
        program = running[slot]
        arrival = now
        for stream in range(2):
            share = 1.0 / sharers[program, stream]
            first = begins[program, stream] + step[slot] * granules[stream]
            for granule in range(first, first + granules[stream]):
                requested += 1
                row = ((granule * _HASH & 0xFFFFFFFF) >> 16) % sets
                way = 0
                oldest = 0
                while way < ways and tags[row, way] != granule:
                    if used[row, way] < used[row, oldest]:
                        oldest = way
                    way += 1
                if way == ways:
                    missed += 1
                    way = oldest
                    tags[row, way] = granule
                    memory_free = max(memory_free, now) + memory_granule_ns * share
                    side_free = max(side_free, now) + side_granule_ns * (1 - share)
                    ready[row, way] = max(memory_free, side_free)
                    ready[row, way] += memory_ns * share + side_ns * (1 - share)
                used[row, way] = requested
                arrival = max(arrival, now + hit_ns, ready[row, way])
        noise = 1 + jitter * normals[requested % len(normals)]
        end = arrival + compute_ns * max(noise, 0.0)
        last = max(last, end)
        step[slot] += 1
        if step[slot] == steps[program]:
            if started == len(steps):
                continue
            running[slot] = started
            step[slot] = 0
            started += 1
        heapq.heappush(events, (end, slot))
    return requested, missed, last


def _traffic(
    l2: L2, programs: _Programs, in_flight: int, cache_of: Integers,
    simulated: Sequence[int],
) -> Traffic:  # fmt: skip
    """Of the caches `simulated`, scaled to all."""
    sets = l2.capacity // l2.ways // programs.granule
    memory_ns = 1e9 * programs.granule * l2.caches / l2.sheet.memory_bytes_per_s
    side_ns = 1e9 * programs.granule * l2.caches / l2.side_bytes_per_s
    work = np.bincount(cache_of, programs.steps, l2.caches)
    requested = missed = 0
    done, slowest_us = 0.0, 0.0
    for cache in simulated:
        of_cache = np.flatnonzero(cache_of == cache)
        normals = np.random.default_rng(cache).standard_normal(_NORMALS)
        granules, misses, ns = _simulate(
            programs.begins[of_cache], programs.steps[of_cache], programs.sharers[of_cache],
            np.array(programs.granules), l2.units * in_flight, sets,
            l2.ways, programs.compute_ns * in_flight, l2.hit_ns, l2.memory_ns, l2.side_ns,
            memory_ns, side_ns, l2.jitter, normals,
        )  # fmt: skip
        once = len(of_cache) * programs.once
        requested += granules * programs.granule + once
        missed += misses * programs.granule + once
        simulated_work = float(programs.steps[of_cache].sum())
        done += simulated_work
        slowest_us = max(slowest_us, ns / 1e3 * float(work.max()) / simulated_work)
    scale = float(work.sum()) / done
    imbalance = float(work.max() / work.mean())
    return Traffic(int(requested * scale), int(missed * scale), imbalance, slowest_us)


def _sharers(data: Integers, cache_of: Integers) -> Integers:
    """Caches whose programs read the same `data`, for each program."""
    pairs = np.unique(np.stack([data, cache_of]), axis=1)
    return np.bincount(pairs[0])[data]


def attention(
    l2: L2, mapping: str, *, heads: int, length: int, kv_heads: int = 0, batch: int = 1,
    head_dim: int = 128, causal: bool = False, block_m: int = 128, block_n: int = 64,
    in_flight: int = 2, xcds: int = 0, simulated: Sequence[int] = (0,),
) -> Traffic:  # fmt: skip
    """Traffic of attention's forward pass.

    Args:
        mapping: of ``taxfree_kernels.device.tiles.ATTENTION_MAPPINGS``.
        kv_heads: 0 is as many as `heads`.
        length: of queries and of keys, of each sequence.
        block_n: keys of a step; their K and V are a granule each.
        in_flight: programs that run on a compute unit at a time.
        xcds: to which the mapping assigns heads; 0 is as many as there are.
        simulated: caches to simulate; the result is scaled to all.
    """
    kv_heads = kv_heads or heads
    blocks = -(-length // block_m)
    program = np.arange(blocks * heads * batch)
    schedule = on_host(attention_tile)
    xcds = xcds or l2.hardware.num_xcds
    sequence, head, block = schedule(program, blocks, heads, batch, xcds, mapping)
    pair = sequence * kv_heads + head // (heads // kv_heads)
    steps_all = -(-length // block_n)
    seen = np.minimum((block + 1) * block_m, length) if causal else np.full_like(block, length)
    cache_of = program % l2.caches
    flops = 4 * block_m * block_n * head_dim
    programs = _Programs(
        begins=np.stack([pair, pair + batch * kv_heads], 1) * steps_all,
        steps=-(-seen // block_n),
        sharers=np.repeat(_sharers(pair, cache_of)[:, None], 2, 1),
        granules=(1, 1),
        granule=block_n * head_dim * ITEM_BYTES,
        compute_ns=l2.step_ns(flops),
        once=block_m * head_dim * ITEM_BYTES,
    )
    return _traffic(l2, programs, in_flight, cache_of, simulated)


def matmul(
    l2: L2, m: int, n: int, k: int, *, xcds: int, group_m: int, block_m: int = 16,
    block_n: int = 32, block_k: int = 256, in_flight: int = 1, queue: bool = False,
    simulated: Sequence[int] = (0,),
) -> Traffic:  # fmt: skip
    """Traffic of a matmul; see :mod:`taxfree_kernels.device.tiles` for `xcds`, `group_m`.

    `simulated` is that of :func:`attention`.

    Args:
        block_n: a multiple of `block_m`.
        queue: programs take tiles from one queue of the device, so that any cache may get any tile.
    """
    tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
    steps = -(-k // block_k)
    program = np.arange(tiles_m * tiles_n)
    index = on_host(xcd_swizzle)(program, len(program), xcds)
    tile_m, tile_n = on_host(swizzle2d)(index, tiles_m, tiles_n, group_m)
    cache_of = program % l2.caches
    if queue:
        cache_of = np.random.default_rng(0).permutation(cache_of)
    wide = block_n // block_m
    flops = 2 * block_m * block_n * block_k
    programs = _Programs(
        begins=np.stack([tile_m, tiles_m + tile_n * wide], 1) * steps,
        steps=np.full(len(program), steps),
        sharers=np.stack([_sharers(tile_m, cache_of), _sharers(tile_n, cache_of)], 1),
        granules=(1, wide),
        granule=block_m * block_k * ITEM_BYTES,
        compute_ns=l2.step_ns(flops),
    )
    return _traffic(l2, programs, in_flight, cache_of, simulated)
