"""Pipelines on GPUs whose taxes are known; what rank workers run for the tests of the instrument.

A pipeline is a barrier of all ranks (the collective), empty kernels (a copy), something that evicts
the cache, and a consumer. One knob at a time is turned from its usual value.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree import measure, stamping
from taxfree.bounds import Bounds
from taxfree.taxes import accounts
from taxfree_kernels.device import stamps
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Step

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


@dataclass(frozen=True)
class Knobs:
    """What a pipeline costs.

    Args:
        host_us: that the host waits in a call.
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
        self._other = torch.zeros(measure.ROTATED_BYTES // 4, dtype=torch.float32, device=device)
        one_warp = {"num_warps": 1}
        self._nothing = Kernel(stamps.nothing, 1, options=one_warp)
        self._busy = Kernel(stamps.busy, 1, {"BACKEND": fabric.backend}, one_warp)
        self._read = Kernel(_read, 1, {"BLOCK": _BLOCK}, {"num_warps": 4})

    def steps(self, _: int) -> list[Step]:
        return [
            Step("barrier", "collective", self._fabric.device_barrier,
                 least=self._fabric.device_barrier),
            Step("empty", "copy", self._run_empty),
            Step("evict", "copy", lambda: self._other.sum()),
            Step("read", "consumer", self._consume, reads=self._data,
                 memory_bytes=self._data.nbytes),
        ]  # fmt: skip

    def call(self, index: int) -> None:
        for step in self.steps(index):
            step.run()
        until = time.perf_counter() + self._knobs.host_us * 1e-6
        while time.perf_counter() < until:
            pass

    def _run_empty(self) -> None:
        for _ in range(self._knobs.empty_kernels):
            self._nothing(self._log)

    def _consume(self) -> None:
        self._read(self._total, self._data, self._knobs.blocks)
        if self._knobs.late_us:
            last = self._fabric.rank == self._fabric.world_size - 1
            self._busy(self._log, round(1000 * self._knobs.late_us * last))


def parts_with(fabric: Fabric, **knobs: Any) -> list[dict[str, float]]:
    """The parts of a pipeline with some knobs turned, by rank."""
    pipeline = _Pipeline(fabric, Knobs(**knobs))
    timed = stamping.time_steps(
        fabric, stamping.Pipeline(pipeline.call, pipeline.steps), REPETITIONS
    )
    return [
        {part.name: part.us for part in account.parts} | {"residual": account.residual_us}
        for account in accounts(timed.measurement, NO_BOUNDS)
    ]


def missed_us_per_block(fabric: Fabric) -> float:
    """What a block of evicted input takes longer than one that was just read, without stamps."""
    pipeline = _Pipeline(fabric, Knobs(blocks=200))
    _, _, evict, read = pipeline.steps(0)
    touch = pipeline._data.sum

    def chain(*functions: Any) -> measure.Call:
        def call(_: int) -> None:
            for function in functions:
                function()

        return call

    chains = [(evict.run, touch), (evict.run, touch, read.run), (evict.run,), (evict.run, read.run)]
    timings = measure.time_together(
        fabric, [(chain(*functions), "graph") for functions in chains], REPETITIONS
    )
    touched, hot, evicted, cold = (timing.median_us for timing in timings)
    return ((cold - evicted) - (hot - touched)) / 200


def instrument(fabric: Fabric) -> dict[str, float]:
    """How good the clocks are, and what a graph of so many kernels is counted to have."""
    pipeline = _Pipeline(fabric, Knobs(empty_kernels=7))
    timed = stamping.time_steps(fabric, stamping.Pipeline(pipeline.call, pipeline.steps), 5)
    measured = timed.measurement
    return {
        "step_us": measured.alignment.step_ns * 1e-3,
        "error_us": float(measured.alignment.error_ns.max()) * 1e-3,
        "stamp_us": float(measured.stamp_us().max()),
        "gap_us": measured.gap_us,
        "empty_kernels": measured.steps[1].kernels,
        "mhz": timed.mhz["graph"],
    }
