"""Pipelines on GPUs whose taxes are known; what rank workers run for the tests of the instrument.

A pipeline is a barrier of all ranks (the collective), empty kernels (a copy), something that evicts
the cache, and a consumer. One knob at a time is turned from its usual value.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from taxfree_kernels.device.sync import clock_ns
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Step
from taxfree_tune.measuring import timer
from taxfree_tune.measuring.bounds import Bounds
from taxfree_tune.profiling import step_clock, step_timer
from taxfree_tune.taxes import accounts

#: name -> microseconds, and the distance of their quartiles over the repetitions
Parts: TypeAlias = dict[str, tuple[float, float]]

REPETITIONS = 15
NO_BOUNDS = Bounds(0.0, 0.0, None)
_BLOCK = 1024  # int32 of an input that are read at a time


@triton.jit
def _read(total_ptr, data_ptr, blocks, BLOCK: tl.constexpr):
    """Read zeros block by block, each after the one before has arrived."""
    total = tl.zeros((), tl.int32)
    for block in range(blocks):
        at = block * BLOCK + tl.arange(0, BLOCK) + total
        total += tl.sum(tl.load(data_ptr + at), 0)
    tl.store(total_ptr, total)


@triton.jit(do_not_specialize=["duration_ns"])
def _busy(log_ptr, duration_ns, BACKEND: tl.constexpr):
    """Keep one program busy; log the nanoseconds taken."""
    begin = clock_ns(BACKEND)
    now = begin
    while now - begin < duration_ns:
        now = clock_ns(BACKEND)
    tl.store(log_ptr, now - begin)


@dataclass(frozen=True)
class Knobs:
    """What a pipeline costs.

    Args:
        host_us: that the host takes for a call, all in all.
        empty_kernels: of the copies.
        late_us: by which the consumer of the last rank takes longer.
        blocks: of the consumer's input, which something evicts before it is read.
    """

    host_us: float = 0.0
    empty_kernels: int = 1
    late_us: float = 0.0
    blocks: int = 1


class _Pipeline:
    def __init__(self, fabric: Fabric, knobs: Knobs) -> None:
        self._fabric, self._knobs = fabric, knobs
        device = fabric.device
        self._log = torch.zeros(2, dtype=torch.int64, device=device)
        self._data = torch.zeros(knobs.blocks * _BLOCK, dtype=torch.int32, device=device)
        self._total = torch.zeros(1, dtype=torch.int32, device=device)
        self._other = torch.zeros(timer.ROTATED_BYTES // 4, dtype=torch.float32, device=device)
        one_warp = {"num_warps": 1}
        self._nothing = Kernel(step_clock.empty, 1, options=one_warp)
        self._busy = Kernel(_busy, 1, {"BACKEND": fabric.backend}, one_warp)
        self._read = Kernel(_read, 1, {"BLOCK": _BLOCK}, {"num_warps": 4})
        self.host_us: list[float] = []

    def steps(self, _: int) -> list[Step]:
        return [
            Step("barrier", "collective", self._fabric.device_barrier,
                 latency_probe=self._fabric.device_barrier),
            Step("empty", "copy", self._run_empty),
            Step("evict", "copy", self.evict),
            Step("read", "consumer", self._consume, reads=self._data,
                 memory_bytes=self._data.nbytes),
        ]  # fmt: skip

    def call(self, index: int) -> None:
        """Launch the steps, then wait until the host has taken its time.

        A pace, not a pause: what launching takes varies by more than what is to be found.
        """
        begin = now = time.perf_counter()
        for step in self.steps(index):
            step.run()
        while now - begin < self._knobs.host_us * 1e-6:
            now = time.perf_counter()
        self.host_us.append((time.perf_counter() - begin) * 1e6)

    def evict(self) -> None:
        self._other.sum()

    def touch(self) -> None:
        self._data.sum()

    def read(self) -> None:
        self._read(self._total, self._data, self._knobs.blocks)

    def _run_empty(self) -> None:
        for _ in range(self._knobs.empty_kernels):
            self._nothing(self._log)

    def _consume(self) -> None:
        self.read()
        if self._knobs.late_us:
            last = self._fabric.rank == self._fabric.world_size - 1
            self._busy(self._log, round(1000 * self._knobs.late_us * last))


@contextlib.contextmanager
def _undisturbed(fabric: Fabric) -> Iterator[None]:
    """Within the context, this thread has a core of its own, and Python collects no garbage."""
    cores = os.sched_getaffinity(0)
    gc.collect()
    gc.disable()
    os.sched_setaffinity(0, {sorted(cores)[fabric.rank % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        gc.enable()


def parts_with(fabric: Fabric, **knobs: Any) -> list[Parts]:
    """The parts of a pipeline with some meta-parameters turned, by rank."""
    return _timed(fabric, _Pipeline(fabric, Knobs(**knobs)))


def paced(fabric: Fabric, host_us: float) -> tuple[list[Parts], float]:
    """The parts of a pipeline whose calls take the host so long; and how long they took it."""
    pipeline = _Pipeline(fabric, Knobs(host_us=host_us))
    with _undisturbed(fabric):
        parts = _timed(fabric, pipeline)
    return parts, statistics.median(pipeline.host_us)


def evicted(fabric: Fabric, blocks: int) -> tuple[list[Parts], float]:
    """The parts of a pipeline whose consumer reads so much; and what reading it cold costs."""
    pipeline = _Pipeline(fabric, Knobs(blocks=blocks))
    before = _cold_minus_warm(fabric, pipeline)
    parts = _timed(fabric, pipeline)
    return parts, (before + _cold_minus_warm(fabric, pipeline)) / 2


def _timed(fabric: Fabric, pipeline: _Pipeline) -> list[Parts]:
    timed = step_timer.time_steps(fabric, pipeline.call, pipeline.steps, REPETITIONS)
    return [
        {part.name: (part.us, part.iqr_us or 0.0) for part in account.parts}
        | {"residual": (account.residual_us, account.residual_iqr_us or 0.0)}
        for account in accounts(timed.measurement, NO_BOUNDS)
    ]


def _cold_minus_warm(fabric: Fabric, pipeline: _Pipeline) -> float:
    """What a read of evicted data takes longer than one of data just read, without readings.

    Both follow a touch: of the data, or, as what is launched before a kernel may matter, of a twin.
    """
    twin = torch.zeros_like(pipeline._data)
    warm = (pipeline.evict, pipeline.touch, pipeline.read)
    cold = (pipeline.evict, twin.sum, pipeline.read)
    timings = timer.time_together(
        fabric, [(_chain(*functions), "graph") for functions in (warm, cold)], REPETITIONS
    )
    return timings[1].median_us - timings[0].median_us


def _chain(*functions: Any) -> timer.Call:
    def call(_: int) -> None:
        for function in functions:
            function()

    return call


def instrument(fabric: Fabric) -> dict[str, float]:
    """How good the clocks are, and what a graph of so many kernels is counted to have."""
    pipeline = _Pipeline(fabric, Knobs(empty_kernels=7))
    timed = step_timer.time_steps(fabric, pipeline.call, pipeline.steps, 5)
    measured = timed.measurement
    return {
        "step_us": measured.alignment.step_ns * 1e-3,
        "error_us": float(measured.alignment.error_ns.max()) * 1e-3,
        "clock_reading_us": float(measured.clock_reading_us().max()),
        "gap_us": measured.gap_us,
        "empty_kernels": measured.steps[1].kernels,
    }


def kernels_of_copies(fabric: Fabric, rows: list[int]) -> list[int]:
    """How many kernels copies of so many rows are counted to have."""
    found = []
    for count in rows:
        target = torch.zeros(count, 64, device=fabric.device)
        step = Step("copy", "copy", partial(target.copy_, torch.ones_like(target)))
        found.append(step_timer._kernels(fabric, step))
    return found
