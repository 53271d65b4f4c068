"""Times the steps of pipelines in place: reads the device's clock between the launches of a call.

The whole sequence is captured in a graph, with a kernel that stores the clock before each step. In
the same repetitions, other versions of it run: without readings, to know what the readings add;
with a minimal collective; and with the consumer's input hot in cache or evicted.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from taxfree._runtime.collectives import vote
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Step
from taxfree_tune.measuring import timer
from taxfree_tune.measuring.trial import Candidate, open_bench
from taxfree_tune.profiling import step_clock
from taxfree_tune.profiling.clock_sync import (
    ClockComparison,
    aligned,
    clock_kernel,
    clock_step,
    compare_clocks,
)
from taxfree_tune.taxes import ClockReadings, Nanoseconds, PipelineMeasurement, StepInfo, Times

#: the steps of a call on the i-th set of inputs
StepsOf = Callable[[int], Sequence[Step]]

_FEW, _MANY = 10, 40  # empty kernels of two calls; what one more kernel takes is the gap


@dataclass(frozen=True)
class Span:
    """One step of one call on one rank, on the common clock, in microseconds."""

    rank: int
    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class TimedPipeline:
    """A pipeline, timed; the same on every rank.

    Args:
        measurement: what the account is made of.
        spans: the calls of one repetition of the sequence in place.
    """

    measurement: PipelineMeasurement
    spans: tuple[Span, ...]


def measure_pipelines(
    fabric: Fabric,
    op: str,
    problem: dict[str, Any],
    candidates: Sequence[Candidate],
    repetitions: int,
) -> list[TimedPipeline]:
    """Time the parts of candidates that are known to be right; a task of the workers."""
    bench = open_bench(fabric, op, problem)
    pipelines_timed = []
    for candidate in candidates:
        plan = bench.plan(candidate)

        def steps(step: int, plan: Any = plan) -> Sequence[Step]:
            copy = step % len(bench.inputs)
            return list(plan.steps(*bench.inputs[copy], bench.outputs[copy]))

        pipelines_timed.append(time_steps(fabric, bench.call(plan), steps, repetitions))
    fabric.synchronize()
    fabric.pool.check()
    return pipelines_timed


def time_steps(
    fabric: Fabric, call: timer.Call, steps_of: StepsOf, repetitions: int
) -> TimedPipeline:
    """Time a pipeline and its parts; collective.

    Args:
        fabric: of this rank.
        call: the whole, on the i-th set of inputs; the same on every rank, but for its timing.
        steps_of: the same in parts.
        repetitions: of each sequence.
    """
    steps = steps_of(0)
    mode = "graph" if fabric.has_graphs else "eager"
    sequences = _sequences(fabric, steps_of, steps)
    slots: list[tuple[str, timer.Call, str]] = [("eager", call, "eager")]
    if fabric.has_graphs:
        slots.append(("graph", call, "graph"))
    slots += [(name, sequence, mode) for name, sequence in sequences.items()]
    if fabric.has_graphs:
        slots += [(f"{n} empty", _empty_kernels(fabric, n), mode) for n in (_FEW, _MANY)]
    readings: dict[str, list[Nanoseconds]] = {name: [] for name, _, _ in slots}

    def after(index: int) -> None:
        name, sequence, _ = slots[index]
        if isinstance(sequence, _Sequence):
            readings[name].append(sequence.read())

    first = compare_clocks(fabric)
    times = timer.time_together(fabric, [slot[1:] for slot in slots], repetitions, after)
    timings = {name: timing for (name, _, _), timing in zip(slots, times, strict=True)}
    second = compare_clocks(fabric)
    result = _Own(first, second, clock_step(fabric), readings)
    infos = tuple(
        StepInfo(step.name, step.kind, _kernels(fabric, step), step.memory_bytes) for step in steps
    )
    return _timed(fabric, steps, infos, timings, vote(fabric.group, result))


# -- sequences --


@dataclass
class _Sequence:
    """A chain of calls with a clock reading before each step, and one behind the last.

    Args:
        fabric: of this rank.
        steps: of a call.
        calls: of a chain.
        before: index of a step -> what to run before the reading that precedes it.
        latency_probe: whether steps run their latency probe instead, where they have one.
    """

    fabric: Fabric
    steps: StepsOf
    count: int
    calls: int
    before: Mapping[int, Callable[[Step], Any]] = field(default_factory=dict)
    latency_probe: bool = False

    def __post_init__(self) -> None:
        size = self.calls * self.count + 1
        self._log = torch.zeros(size, dtype=torch.int64, device=self.fabric.device)
        self._read_clock = (
            clock_kernel(self.fabric, step_clock.read_clock)
            if self.fabric.has_graphs
            else _read_host_clock
        )

    def __call__(self, call: int) -> None:
        for index, step in enumerate(self.steps(call)):
            if index in self.before:
                self.before[index](step)
            self._read_clock(self._log, call * self.count + index)
            run = (
                step.latency_probe
                if self.latency_probe and step.latency_probe is not None
                else step.run
            )
            run()
        if call == self.calls - 1:
            self._read_clock(self._log, self.calls * self.count)

    def read(self) -> Nanoseconds:
        """The readings of the chain that ran last."""
        return np.asarray(self._log.cpu().numpy().copy(), dtype=np.int64)


def _read_host_clock(log: torch.Tensor, index: int) -> None:
    """As `step_clock.read_clock`, on the host, where interpreting that would distort the timing."""
    log[index] = time.perf_counter_ns()


def _sequences(fabric: Fabric, steps_of: StepsOf, steps: Sequence[Step]) -> dict[str, _Sequence]:
    """The sequence in place, and those that differ from it in one thing."""
    make = functools.partial(_Sequence, fabric, steps_of, len(steps), timer.chain_of(fabric))
    sequences = {"in place": make()}
    if any(step.latency_probe is not None for step in steps):
        sequences["latency probe"] = make(latency_probe=True)
    consumer = next((i for i, step in enumerate(steps) if step.reads is not None), None)
    if consumer is not None:
        sequences["hot"] = make(before={consumer: _touch})
        # On the host there is no telling what its cache holds.
        if fabric.has_graphs:
            sequences["cold"] = make(before={consumer: _evict(fabric)})
    return sequences


def _touch(step: Step) -> None:
    assert step.reads is not None
    step.reads.sum()


def _evict(fabric: Fabric) -> Callable[[Step], Any]:
    other = torch.zeros(timer.ROTATED_BYTES // 4, dtype=torch.float32, device=fabric.device)
    return lambda step: other.sum()


def _empty_kernels(fabric: Fabric, count: int) -> timer.Call:
    log = torch.zeros(1, dtype=torch.int64, device=fabric.device)
    kernel = Kernel(step_clock.empty, grid=1, options={"num_warps": 1})

    def call(_: int) -> None:
        for _ in range(count):
            kernel(log)

    return call


# -- putting it together --


@dataclass(frozen=True)
class _Own:
    """One rank's readings."""

    first: ClockComparison
    second: ClockComparison
    clock_step_ns: float
    readings: Mapping[str, Sequence[Nanoseconds]]


def _timed(
    fabric: Fabric,
    steps: Sequence[Step],
    infos: tuple[StepInfo, ...],
    timings: Mapping[str, timer.Timing],
    everyone: Sequence[_Own],
) -> TimedPipeline:
    alignment = aligned(
        [(result.first, result.second) for result in everyone],
        max(result.clock_step_ns for result in everyone),
    )

    def read(name: str) -> ClockReadings | None:
        if name not in everyone[0].readings or not everyone[0].readings[name]:
            return None
        return ClockReadings(np.array([result.readings[name] for result in everyone]), len(steps))

    def times(name: str) -> Times:
        return np.array(timings[name].by_rank_us)

    in_place = read("in place")
    assert in_place is not None
    gaps = _gaps_us(timings) if f"{_MANY} empty" in timings else np.zeros(1)
    measurement = PipelineMeasurement(
        steps=infos,
        eager_us=times("eager"),
        graph_us=times("graph") if fabric.has_graphs else None,
        instrumented_us=times("in place"),
        calls=timer.chain_of(fabric),
        in_place=in_place,
        latency_probe=read("latency probe"),
        hot=read("hot"),
        cold=read("cold"),
        gap_us=float(np.median(gaps)),
        gap_iqr_us=float(np.subtract(*np.percentile(gaps, (75, 25)))),
        alignment=alignment,
    )
    return TimedPipeline(measurement, _spans(measurement))


def _gaps_us(timings: Mapping[str, timer.Timing]) -> Times:
    """The period of empty kernels, by repetition.

    A difference: the period of one chain contains its share of what starting a graph takes, and
    on H100s was 13 % above the period of the same kernels amid a pipeline.
    """
    few, many = (np.array(timings[f"{count} empty"].samples_us) for count in (_FEW, _MANY))
    return np.asarray((many - few) / (_MANY - _FEW), dtype=np.float64)


def _spans(measured: PipelineMeasurement) -> tuple[Span, ...]:
    """The last repetition, on the common clock."""
    names = [step.name for step in measured.steps]
    spans = []
    for rank, repetitions in enumerate(measured.in_place.clock_ns):
        times = measured.alignment.common_us(rank, repetitions[-1]).tolist()
        for index, (begin, end) in enumerate(itertools.pairwise(times)):
            spans.append(Span(rank, names[index % len(names)], begin, end))
    return tuple(spans)


# -- kernels of a step --


def _kernels(fabric: Fabric, step: Step) -> int:
    """Kernels, copies and fills that a step has in a graph; 0 where there are no graphs."""
    if not fabric.has_graphs:
        return 0
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with timer.capturing(graph):
        step.run()
    return count_nodes(graph.raw_cuda_graph())


_DEVICE_WORK = (0, 1, 2)  # types of graph nodes: kernel, copy, fill


def count_nodes(graph: int) -> int:
    """Nodes of a captured graph that are work for the device.

    Torch does not list a graph's nodes; the driver that it has loaded does.

    Args:
        graph: the address of a `cudaGraph_t` or `hipGraph_t`.
    """
    if torch.version.hip:
        driver, prefix = ctypes.CDLL("libamdhip64.so"), "hip"
    else:
        driver, prefix = ctypes.CDLL("libcuda.so.1"), "cu"
    get_nodes = getattr(driver, f"{prefix}GraphGetNodes")
    get_type = getattr(driver, f"{prefix}GraphNodeGetType")
    count = ctypes.c_size_t()
    _succeed(get_nodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    if count.value == 0:  # a rank without rows has nothing to copy; the driver lists no empty graph
        return 0
    nodes = (ctypes.c_void_p * count.value)()
    _succeed(get_nodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    kind = ctypes.c_int()
    work = 0
    for node in nodes:
        _succeed(get_type(ctypes.c_void_p(node), ctypes.byref(kind)))
        work += kind.value in _DEVICE_WORK
    return work


def _succeed(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver cannot list a graph's nodes: status {status}")
