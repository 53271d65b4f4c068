"""Measurements of a pipeline: times, clock readings, program traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Times: TypeAlias = npt.NDArray[np.float64]
Nanoseconds: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepInfo:
    """A step of a pipeline.

    Args:
        name, kind, memory_bytes: see `taxfree_kernels.variant.Step`.
        kernels: nodes that it has in a graph; 0 where launches cannot be told from kernels.
    """

    name: str
    kind: str
    kernels: int
    memory_bytes: int


@dataclass(frozen=True)
class Alignment:
    """A linear relation between the ranks' clocks, from two comparisons with rank 0's clock.

    Args:
        at_ns: own clock of each rank at the comparisons, [2, rank].
        offset_ns: own clock minus that of rank 0 then, [2, rank].
        error_ns: largest possible error of an offset: half of the shortest round trip, [rank].
        step_ns: resolution of the coarsest rank's clock.
    """

    at_ns: Nanoseconds
    offset_ns: Nanoseconds
    error_ns: Times
    step_ns: float

    def common_us(self, rank: int, clock_ns: Nanoseconds) -> Times:
        """Readings of a rank's clock in microseconds since the first comparison, on one clock."""
        # Subtract as integers first: a float64 cannot hold full readings to the nanosecond.
        since = (clock_ns - self.at_ns[0, rank]).astype(np.float64)
        between = float(self.at_ns[1, rank] - self.at_ns[0, rank])
        drift = float(self.offset_ns[1, rank] - self.offset_ns[0, rank]) / between if between else 0
        start = self.at_ns[0, rank] - self.offset_ns[0, rank] - self.at_ns[0, 0]
        return np.asarray((since * (1 - drift) + float(start)) * 1e-3, dtype=np.float64)


@dataclass(frozen=True)
class ClockReadings:
    """Clock readings of one captured sequence.

    Args:
        clock_ns: before each step of each call, and after the last, on each rank's own clock,
            [rank, repetition, calls * steps + 1].
        steps: of a call.
    """

    clock_ns: Nanoseconds
    steps: int

    def step_us(self) -> Times:
        """From one reading to the next, the mean over the calls of a chain: [rank, rep, step]."""
        between = np.diff(self.clock_ns, axis=2) * 1e-3
        ranks, repetitions, count = between.shape
        chains = between.reshape(ranks, repetitions, count // self.steps, self.steps)
        return np.asarray(chains.mean(axis=2), dtype=np.float64)

    def skew_us(self, step: int, alignment: Alignment) -> Times:
        """Arrival of the last rank at a step minus own, the mean of a chain: [rank, rep]."""
        arrivals = np.stack(
            [
                alignment.common_us(rank, clocks[:, step :: self.steps])
                for rank, clocks in enumerate(self.clock_ns)
            ]
        )
        calls = (self.clock_ns.shape[2] - 1) // self.steps
        arrivals = arrivals[:, :, :calls]
        return np.asarray((arrivals.max(axis=0) - arrivals).mean(axis=2), dtype=np.float64)


@dataclass(frozen=True)
class ProgramTrace:
    """Events recorded by the programs of an instrumented fused kernel: one call per repetition.

    Times are in microseconds on the ranks' common clock, NaN where nothing was recorded.

    Args:
        started, done: start and end of each program, [rank, repetition, program].
        sent: the last signal to each peer, [rank, repetition, program, peer].
        began, ended: the last wait for each source, [rank, repetition, program, source].
        call_us: time per call of the chain, [rank, repetition].
        launches: launches of our kernels per call; programs are those of the last launch.
    """

    started: Times
    done: Times
    sent: Times
    began: Times
    ended: Times
    call_us: Times
    launches: int

    @property
    def shows_programs(self) -> bool:
        """Whether in every call each rank has a program of which start and end were recorded."""
        return bool((self.done >= self.started).any(axis=2).all())

    @property
    def shows_starts(self) -> bool:
        """Whether no program recorded its end without its start."""
        return not bool((np.isnan(self.started) & ~np.isnan(self.done)).any())


@dataclass(frozen=True)
class PipelineMeasurement:
    """One pipeline, measured on all ranks, its sequences interleaved.

    Args:
        steps: of a call.
        eager_us, graph_us: per call, [rank, repetition]; no graph where the fabric has none.
        instrumented_us: as `graph_us` (or `eager_us`), of the sequence with clock readings.
        calls: of a repetition.
        in_place: readings of the unmodified sequence.
        latency_probe: with the collective on the least data it accepts; None if it has no probe.
        hot, cold: with the consumer's input read once more, or evicted, right before the consumer.
        gap_us: period of empty kernels in a chain; 0 if launches cannot be told apart from kernels.
        gap_iqr_us: its interquartile range.
        alignment: of the ranks' clocks.
        trace: events of a fused kernel, from an instrumented build; None for others.
    """

    steps: tuple[StepInfo, ...]
    eager_us: Times
    graph_us: Times | None
    instrumented_us: Times
    calls: int
    in_place: ClockReadings
    latency_probe: ClockReadings | None
    hot: ClockReadings | None
    cold: ClockReadings | None
    gap_us: float
    gap_iqr_us: float
    alignment: Alignment
    trace: ProgramTrace | None = None

    @property
    def kernels(self) -> int:
        return sum(step.kernels for step in self.steps)

    def clock_reading_us(self) -> Times:
        """Time that one clock reading adds to the sequence, by rank."""
        plain = self.eager_us if self.graph_us is None else self.graph_us
        added = np.median(self.instrumented_us, axis=1) - np.median(plain, axis=1)
        readings = self.calls * len(self.steps) + 1
        return np.asarray(added * self.calls / readings, dtype=np.float64)

    def step_us(self) -> list[float]:
        """Time of each step in its place, with the clock reading before it, of the slowest rank."""
        medians: list[float] = np.median(self.in_place.step_us(), axis=1).max(axis=0).tolist()
        return medians

    def program_trace_us(self) -> float:
        """Time that tracing adds to a call, of the slowest rank."""
        assert self.trace is not None
        plain = self.eager_us if self.graph_us is None else self.graph_us
        recorded, usual = (np.median(times, axis=1).max() for times in (self.trace.call_us, plain))
        return float(recorded - usual)

    def of_kind(self, kind: str) -> list[int]:
        """Indices of the steps of a kind."""
        return [index for index, step in enumerate(self.steps) if step.kind == kind]
