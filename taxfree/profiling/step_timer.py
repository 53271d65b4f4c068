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
import torch.distributed as dist

from taxfree.measuring import timer
from taxfree.measuring.trial import Candidate, open_bench
from taxfree.taxes import Alignment, ClockReadings, Measurement, Nanoseconds, StepInfo, Times
from taxfree_kernels.device import step_clock
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Step

#: the steps of a call on the i-th set of inputs
StepsOf = Callable[[int], Sequence[Step]]

_ROUNDS = 100  # of a comparison of clocks
_CLOCK_READS = 2000
_PROBE_NS = 20_000  # for which a program counts its cycles
_EMPTY_KERNELS = 10  # of a call whose period is the gap
_DEVICE_WORK = (0, 1, 2)  # types of graph nodes: kernel, copy, fill


@dataclass(frozen=True)
class Pipeline:
    """What to time.

    Args:
        call: the whole, on the i-th set of inputs.
        steps: the same in parts.
    """

    call: timer.Call
    steps: StepsOf


@dataclass(frozen=True)
class Alone:
    """A step repeated on its own, for comparison with its time in place.

    Args:
        name: of the step.
        us: microseconds, median of the slowest rank.
        mhz: the slowest rank's clock right after; None if it cannot be read.
    """

    name: str
    us: float
    mhz: float | None


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
        eager_step_us: steps in the eager sequence, [step], of the slowest rank; at small sizes
            they contain the host's time.
        alone: steps on their own, in a graph.
        mhz: sequence -> clock of the slowest rank's compute units right after it; None where it
            cannot be read.
        spans: the calls of one repetition of the sequence in place.
    """

    measurement: Measurement
    eager_step_us: tuple[float, ...]
    alone: tuple[Alone, ...]
    mhz: dict[str, float]
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
    found = []
    for candidate in candidates:
        plan = bench.plan(candidate)

        def steps(step: int, plan: Any = plan) -> Sequence[Step]:
            copy = step % len(bench.inputs)
            return list(plan.steps(*bench.inputs[copy], bench.outputs[copy]))

        found.append(time_steps(fabric, Pipeline(bench.call(plan), steps), repetitions))
    fabric.synchronize()
    fabric.pool.check()
    return found


def time_steps(fabric: Fabric, pipeline: Pipeline, repetitions: int) -> TimedPipeline:
    """Time a pipeline and its parts; collective.

    Args:
        fabric: of this rank.
        pipeline: the same on every rank, but for its timing.
        repetitions: of each sequence.
    """
    steps = pipeline.steps(0)
    mode = "graph" if fabric.has_graphs else "eager"
    sequences = _sequences(fabric, pipeline, steps)
    slots: list[tuple[str, timer.Call, str]] = [("eager", pipeline.call, "eager")]
    if fabric.has_graphs:
        slots.append(("graph", pipeline.call, "graph"))
        slots.append(("eager in place", sequences["in place"], "eager"))
    slots += [(name, sequence, mode) for name, sequence in sequences.items()]
    if fabric.has_graphs:
        if len(steps) > 1:
            slots += [(f"alone: {s.name}", _alone(pipeline, i), mode) for i, s in enumerate(steps)]
        slots.append(("empty", _empty_kernels(fabric), mode))
    probe = _ClockRate(fabric)
    readings: dict[str, list[Nanoseconds]] = {name: [] for name, _, _ in slots}
    rates: dict[str, list[float]] = {name: [] for name, _, _ in slots}

    def after(index: int) -> None:
        name, sequence, _ = slots[index]
        rates[name].append(probe.mhz())
        if isinstance(sequence, _Sequence):
            readings[name].append(sequence.read())

    first = compare_clocks(fabric)
    timings = dict(
        zip(
            (name for name, _, _ in slots),
            timer.time_together(fabric, [s[1:] for s in slots], repetitions, after),
            strict=True,
        )
    )
    second = compare_clocks(fabric)
    own = _Own(first, second, _clock_step(fabric), readings, rates)
    everyone: list[_Own] = [own] * fabric.world_size
    dist.all_gather_object(everyone, own, fabric.group)
    return _timed(fabric, steps, _step_infos(fabric, steps), timings, everyone)


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
            _kernel(self.fabric, step_clock.read_clock)
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


def _sequences(fabric: Fabric, pipeline: Pipeline, steps: Sequence[Step]) -> dict[str, _Sequence]:
    """The sequence in place, and those that differ from it in one thing."""
    make = functools.partial(_Sequence, fabric, pipeline.steps, len(steps), timer.chain_of(fabric))
    found = {"in place": make()}
    if any(step.latency_probe is not None for step in steps):
        found["latency probe"] = make(latency_probe=True)
    consumer = next((i for i, step in enumerate(steps) if step.reads is not None), None)
    if consumer is not None:
        found["hot"] = make(before={consumer: _touch})
        # On the host there is no telling what its cache holds.
        if fabric.has_graphs:
            found["cold"] = make(before={consumer: _evict(fabric)})
    return found


def _touch(step: Step) -> None:
    assert step.reads is not None
    step.reads.sum()


def _evict(fabric: Fabric) -> Callable[[Step], Any]:
    other = torch.zeros(timer.ROTATED_BYTES // 4, dtype=torch.float32, device=fabric.device)
    return lambda step: other.sum()


def _alone(pipeline: Pipeline, index: int) -> timer.Call:
    return lambda call: pipeline.steps(call)[index].run()


def _empty_kernels(fabric: Fabric) -> timer.Call:
    log = torch.zeros(1, dtype=torch.int64, device=fabric.device)
    kernel = Kernel(step_clock.empty, grid=1, options={"num_warps": 1})

    def call(_: int) -> None:
        for _ in range(_EMPTY_KERNELS):
            kernel(log)

    return call


def _kernel(fabric: Fabric, function: Any, **constants: Any) -> Kernel:
    options = {"num_warps": 1} if fabric.has_graphs else {}
    return Kernel(function, 1, {"BACKEND": fabric.backend, **constants}, options)


# -- clocks --


def _clock_step(fabric: Fabric) -> float:
    """Resolution of this device's clock, in nanoseconds."""
    log = torch.zeros(1, dtype=torch.int64, device=fabric.device)
    _kernel(fabric, step_clock.clock_step)(log, _CLOCK_READS if fabric.has_graphs else 10)
    return float(log.item())


class _ClockRate:
    """Measures the current clock rate of the compute units, by counting cycles for a moment."""

    def __init__(self, fabric: Fabric) -> None:
        self._kernel = _kernel(fabric, step_clock.busy) if fabric.has_graphs else None
        self._log = torch.zeros(2, dtype=torch.int64, device=fabric.device)

    def mhz(self) -> float:
        """NaN where it cannot be read."""
        if self._kernel is None:
            return float("nan")
        self._kernel(self._log, _PROBE_NS)
        nanoseconds, cycles = self._log.tolist()
        return float(cycles / nanoseconds * 1e3)


@dataclass(frozen=True)
class Comparison:
    """A rank's clock against that of rank 0.

    Args:
        at_ns: own clock then.
        offset_ns: own clock minus rank 0's.
        error_ns: half of the shortest round trip.
    """

    at_ns: int
    offset_ns: int
    error_ns: float


def compare_clocks(fabric: Fabric) -> Comparison:
    """Compare this rank's clock with that of rank 0; collective."""
    if not fabric.has_graphs:  # all ranks read the clock of one machine
        return Comparison(time.perf_counter_ns(), 0, 0.0)
    return exchange_clocks(fabric, _ROUNDS)


def exchange_clocks(fabric: Fabric, rounds: int) -> Comparison:
    """Compare all clocks with rank 0's, pair by pair, over `rounds` round trips; collective.

    It uses the pool's signals with generations of its own: the pool is reset before and after.
    """
    fabric.pool.reset()
    log = torch.zeros(rounds, 2, dtype=torch.int64, device=fabric.device)
    play = _kernel(fabric, step_clock.exchange_clocks, WORLD=fabric.world_size)
    found = []
    for peer in range(1, fabric.world_size):
        fabric.barrier()
        if fabric.rank in (0, peer):
            other = peer if fabric.rank == 0 else 0
            play(log, fabric.pool.control, fabric.heap_bases, fabric.rank, other, 1, rounds)
        fabric.barrier()
        fabric.pool.check()
        both: list[Any] = [None] * fabric.world_size
        dist.all_gather_object(both, log.tolist(), fabric.group)
        found.append(compare(both[0], both[peer]))
    fabric.pool.reset()
    _kernel(fabric, step_clock.read_clock)(log, 0)
    return [Comparison(int(log[0, 0]), 0, 0.0), *found][fabric.rank]


def compare(lower: Sequence[Sequence[int]], higher: Sequence[Sequence[int]]) -> Comparison:
    """Compare two clocks by their readings in a ping-pong.

    Args:
        lower: before the signal was sent and after the answer came, by round, in nanoseconds.
        higher: two readings between those, by round.
    """
    # The first rounds include compilation and wake-up: the shortest round is the most exact.
    before, after, between = min(
        ((sent, came, read) for (sent, came), (read, _) in zip(lower, higher, strict=True)),
        key=lambda round: round[1] - round[0],
    )
    return Comparison(between, between - (before + after) // 2, (after - before) / 2)


def aligned(by_rank: Sequence[tuple[Comparison, Comparison]], clock_step_ns: float) -> Alignment:
    """How clocks relate, from a comparison before and one after, by rank."""
    comparisons = list(zip(*by_rank, strict=True))
    return Alignment(
        at_ns=np.array([[each.at_ns for each in row] for row in comparisons]),
        offset_ns=np.array([[each.offset_ns for each in row] for row in comparisons]),
        error_ns=np.array([[each.error_ns for each in row] for row in comparisons]).max(axis=0),
        step_ns=clock_step_ns,
    )


# -- putting it together --


@dataclass(frozen=True)
class _Own:
    """What one rank read."""

    first: Comparison
    second: Comparison
    clock_step_ns: float
    readings: Mapping[str, Sequence[Nanoseconds]]
    rates: Mapping[str, Sequence[float]]


def _timed(
    fabric: Fabric,
    steps: Sequence[Step],
    infos: tuple[StepInfo, ...],
    timings: Mapping[str, timer.Timing],
    everyone: Sequence[_Own],
) -> TimedPipeline:
    alignment = aligned(
        [(own.first, own.second) for own in everyone],
        max(own.clock_step_ns for own in everyone),
    )

    def read(name: str) -> ClockReadings | None:
        if name not in everyone[0].readings or not everyone[0].readings[name]:
            return None
        return ClockReadings(np.array([own.readings[name] for own in everyone]), len(steps))

    def times(name: str) -> Times:
        return np.array(timings[name].by_rank_us)

    in_place, eager = read("in place"), read("eager in place")
    assert in_place is not None
    empty = timings.get("empty")
    mhz = {name: _slowest_rate(everyone, name) for name in timings}
    measurement = Measurement(
        steps=infos,
        eager_us=times("eager"),
        graph_us=times("graph") if fabric.has_graphs else None,
        instrumented_us=times("in place"),
        calls=timer.chain_of(fabric),
        in_place=in_place,
        latency_probe=read("latency probe"),
        hot=read("hot"),
        cold=read("cold"),
        gap_us=0.0 if empty is None else empty.median_us / _EMPTY_KERNELS,
        gap_iqr_us=0.0 if empty is None else empty.iqr_us / _EMPTY_KERNELS,
        alignment=alignment,
    )
    of_steps = (in_place if eager is None else eager).step_us()
    alone = [timings.get(f"alone: {step.name}") for step in steps]
    return TimedPipeline(
        measurement,
        tuple(np.median(of_steps, axis=1).max(axis=0).tolist()),
        tuple(
            Alone(step.name, timing.median_us, mhz[f"alone: {step.name}"])
            for step, timing in zip(steps, alone, strict=True)
            if timing is not None
        ),
        {name: rate for name, rate in mhz.items() if rate is not None},
        _spans(measurement),
    )


def _slowest_rate(everyone: Sequence[_Own], name: str) -> float | None:
    rate = min(float(np.median(own.rates[name])) for own in everyone)
    return None if np.isnan(rate) else rate


def _spans(measured: Measurement) -> tuple[Span, ...]:
    """The last repetition, on the common clock."""
    names = [step.name for step in measured.steps]
    found = []
    for rank, repetitions in enumerate(measured.in_place.clock_ns):
        times = measured.alignment.common_us(rank, repetitions[-1]).tolist()
        for index, (begin, end) in enumerate(itertools.pairwise(times)):
            found.append(Span(rank, names[index % len(names)], begin, end))
    return tuple(found)


# -- kernels of a step --


def _step_infos(fabric: Fabric, steps: Sequence[Step]) -> tuple[StepInfo, ...]:
    return tuple(
        StepInfo(step.name, step.kind, _kernels(fabric, step), step.memory_bytes) for step in steps
    )


def _kernels(fabric: Fabric, step: Step) -> int:
    """Kernels, copies and fills that a step has in a graph; 0 where there are no graphs."""
    if not fabric.has_graphs:
        return 0
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step.run()
    return count_nodes(graph.raw_cuda_graph())


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
