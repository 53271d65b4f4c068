"""The measuring protocol: the only way in which anything here is timed.

Candidates run in one group of ranks, on the same inputs, interleaved, in an order that changes with
each repetition: what ran before heats the GPU, and under a power cap the same kernel took 7 %
longer in one position than in another. Before each repetition all ranks' streams are aligned by a
kernel that ends once it has started everywhere. A repetition is a chain of calls over rotated
inputs, which together exceed the L2 cache unless the problem is small; its time is the slowest
rank's. Eager calls and captured graphs are timed as separate modes. On the host fabric, where a
call is interpreted and takes milliseconds, a chain is one call.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from taxfree._runtime.collectives import vote
from taxfree_kernels.fabric.base import Fabric

CHAIN = 20  # calls of a repetition on a GPU
ROTATED_BYTES = 256 << 20  # of inputs that a chain walks through, several times any L2

#: one call on the i-th set of inputs
Call = Callable[[int], Any]
#: a chain of calls
Run = Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Times of one callable in one mode.

    Args:
        samples_us: microseconds per call, one per repetition, of the slowest rank.
        skew_us: median over repetitions of slowest minus fastest rank, per call.
        by_rank_us: microseconds per call, [rank][repetition].
    """

    samples_us: tuple[float, ...]
    skew_us: float
    by_rank_us: tuple[tuple[float, ...], ...] = ()

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def iqr_us(self) -> float:
        """Distance of the quartiles, in microseconds."""
        if len(self.samples_us) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return third - first


def copies_needed(fabric: Fabric, input_bytes: int) -> int:
    """Sets of inputs to rotate through, so that those of a call are gone from the L2 cache.

    At most as many as a chain has calls: tiny inputs may be found there all the same.
    """
    if not fabric.has_graphs:
        return 1
    return max(2, min(CHAIN, -(-ROTATED_BYTES // max(1, input_bytes))))


def chain_of(fabric: Fabric) -> int:
    """Calls of a repetition."""
    return CHAIN if fabric.has_graphs else 1


def time_together(
    fabric: Fabric,
    calls: Sequence[tuple[Call, str]],
    repetitions: int,
    after: Callable[[int], None] = lambda index: None,
    chain: int | None = None,
) -> list[Timing]:
    """Time callables in turn, in changing order, `repetitions` times each; collective.

    Args:
        calls: callable and mode; every rank passes the same ones in the same order.
        repetitions: of each.
        after: called with the index of a callable after each timed repetition of it.
        chain: calls of a repetition, for calls so long that fewer than usual suffice.

    Returns:
        One timing per callable, the same on every rank.
    """
    chain = chain or chain_of(fabric)
    runs = [runner(fabric, call, mode, chain) for call, mode in calls]
    return time_runs(fabric, runs, repetitions, chain, after)


def time_runs(
    fabric: Fabric,
    runs: Sequence[Run],
    repetitions: int,
    chain: int,
    after: Callable[[int], None] = lambda index: None,
) -> list[Timing]:
    """The same for what runs chains of calls, see :func:`runner`."""
    clock = _device_clock if fabric.has_graphs else _host_clock
    times = clock(fabric, runs, repetitions, after)
    everyone = vote(fabric.group, [[s / chain for s in samples] for samples in times])
    return [_timing([ranks[index] for ranks in everyone]) for index in range(len(runs))]


def chain_for(fabric: Fabric, us: float, wanted_us: float) -> int:
    """Calls of a repetition, that it takes about as long as wanted; at most as many as usual.

    Args:
        us: that a call takes; the same on all ranks.
        wanted_us: that a repetition takes.
    """
    return max(1, min(chain_of(fabric), int(wanted_us / us)))


def runner(fabric: Fabric, call: Call, mode: str, chain: int) -> Run:
    """What runs a chain of calls in a mode; runs them, and captures them where it replays."""

    def eager() -> None:
        for step in range(chain):
            call(step)

    eager()
    if mode == "eager":
        return eager
    fabric.barrier()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        eager()
    graph.replay()  # the first one uploads it
    return graph.replay


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what the context launches.

    PyTorch ends the process if a graph is freed while another is captured, so cycles of garbage,
    which may hold graphs, are not collected meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


def _device_clock(
    fabric: Fabric,
    runs: Sequence[Run],
    repetitions: int,
    after: Callable[[int], None],
) -> list[list[float]]:
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for turn in range(repetitions):
        fabric.barrier()
        for index in _order(len(runs), turn):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            fabric.device_barrier()
            begin.record()
            runs[index]()
            end.record()
            events[index].append((begin, end))
            torch.cuda.synchronize(fabric.device)
            after(index)
    return [[begin.elapsed_time(end) * 1e3 for begin, end in column] for column in events]


def _host_clock(
    fabric: Fabric,
    runs: Sequence[Run],
    repetitions: int,
    after: Callable[[int], None],
) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in runs]
    for turn in range(repetitions):
        for index in _order(len(runs), turn):
            fabric.barrier()
            begin = time.perf_counter()
            runs[index]()
            samples[index].append((time.perf_counter() - begin) * 1e6)
            after(index)
    return samples


def _order(count: int, turn: int) -> list[int]:
    """In which callables run this time: any, but the same on all ranks."""
    return random.Random(turn).sample(range(count), count)


def _timing(by_rank: list[list[float]]) -> Timing:
    slowest = [max(samples) for samples in zip(*by_rank, strict=True)]
    skews = [max(samples) - min(samples) for samples in zip(*by_rank, strict=True)]
    return Timing(tuple(slowest), statistics.median(skews), tuple(map(tuple, by_rank)))
