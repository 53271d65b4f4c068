"""Pipelines whose taxes are known, simulated: what the clocks of ranks would have read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from taxfree_tune.taxes import Alignment, ClockReadings, PipelineMeasurement, ProgramTrace, StepInfo

CALLS, REPETITIONS = 20, 5
EPOCH_NS = 1_700_000_000_000_000_000  # a GPU's clock counts since 1970


@dataclass(frozen=True)
class Truth:
    """What is true of a pipeline of a collective, a copy and a consumer; in microseconds.

    Args:
        host: of an eager call beyond its time in a graph.
        gap, reading: between two kernels, and of a clock reading.
        latency, transfer: of the collective, from the arrival of the last rank.
        copy, copy_kernels: of all kernels of the copy together, and how many they are.
        consumer, missed: on an input in cache, and what it takes longer in place.
        late: by which the consumer of the last rank takes longer than the others'.
        offsets_ms, drift: of the ranks' clocks.
        step_ns: by which clocks move.
    """

    host: float = 50.0
    gap: float = 1.0
    reading: float = 0.7
    latency: float = 9.0
    transfer: float = 12.0
    copy: float = 4.0
    copy_kernels: int = 1
    consumer: float = 20.0
    missed: float = 3.0
    late: float = 0.0
    offsets_ms: Sequence[float] = (0.0, 3.7, -250.0)
    drift: Sequence[float] = (0.0, 20e-6, -5e-6)
    step_ns: int = 32

    @property
    def ranks(self) -> int:
        return len(self.offsets_ms)

    def _own_clock(self, rank: int, true_us: np.ndarray) -> np.ndarray:
        nanoseconds = true_us * 1e3 * (1 + self.drift[rank]) + self.offsets_ms[rank] * 1e6
        return EPOCH_NS + (nanoseconds // self.step_ns).astype(np.int64) * self.step_ns

    def run(
        self, start: float, *, instrumented: bool, transfer: float, missed: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run a chain of calls from a common start.

        Returns:
            Microseconds per call, [rank]; and readings of own clocks, [rank, reading].
        """
        now = np.full(self.ranks, start)
        late = np.where(np.arange(self.ranks) == self.ranks - 1, self.late, 0.0)
        readings: list[np.ndarray] = []

        def read() -> None:
            nonlocal now
            if instrumented:
                readings.append(now + self.gap)
                now = now + self.gap + self.reading

        for _ in range(CALLS):
            read()
            now = np.full(self.ranks, (now + self.gap).max() + self.latency + transfer)
            read()
            now = now + self.copy_kernels * self.gap + self.copy
            read()
            now = now + self.gap + self.consumer + missed + late
        read()
        clocks = [self._own_clock(rank, own) for rank, own in enumerate(np.array(readings).T)]
        return (now - start) / CALLS, np.array(clocks)

    def measurement(self) -> PipelineMeasurement:
        """What would be measured of it."""
        names = {"plain": (False, self.transfer, self.missed)}
        names["in place"] = (True, self.transfer, self.missed)
        names["latency probe"] = (True, 0.0, self.missed)
        names["hot"] = (True, self.transfer, 0.0)
        times: dict[str, list] = {name: [] for name in names}
        clocks: dict[str, list] = {name: [] for name in names}
        start = 1000.0
        for _ in range(REPETITIONS):
            for name, (instrumented, transfer, missed) in names.items():
                took, read = self.run(
                    start, instrumented=instrumented, transfer=transfer, missed=missed
                )
                times[name].append(took)
                clocks[name].append(read)
                start += 12_345.678
        readings = {
            n: ClockReadings(np.array(c).swapaxes(0, 1), 3)
            for n, c in clocks.items()
            if n != "plain"
        }
        graph = np.array(times["plain"]).T
        return PipelineMeasurement(
            steps=(
                StepInfo("all-gather", "collective", 1, 0),
                StepInfo("re-layout", "copy", self.copy_kernels, 2048),
                StepInfo("matmul", "consumer", 1, 1024),
            ),
            eager_us=graph + self.host,
            graph_us=graph,
            instrumented_us=np.array(times["in place"]).T,
            calls=CALLS,
            in_place=readings["in place"],
            latency_probe=readings["latency probe"],
            hot=readings["hot"],
            cold=None,
            gap_us=self.gap,
            gap_iqr_us=0.0,
            alignment=self.alignment(start),
        )

    def alignment(self, end: float) -> Alignment:
        """Two comparisons of clocks: before everything, and after it."""
        at = np.array(
            [[self._own_clock(r, np.array(t)) for r in range(self.ranks)] for t in (0.0, end)]
        )
        return Alignment(at, at - at[:, :1], np.full(self.ranks, 700.0), float(self.step_ns))


# -- inside a fused kernel --

#: one clock for all ranks, in nanoseconds
TRUE_CLOCKS = Alignment(np.zeros((2, 3), dtype=np.int64), np.zeros((2, 3), dtype=np.int64),
                        np.zeros(3), 1.0)  # fmt: skip


@dataclass(frozen=True)
class Fused:
    """A call of three ranks: a sender, and waves of tiles that wait for the senders of all peers.

    Args:
        begin: of the call.
        gap: outside of the call's programs.
        ramp, dispatch: until the first tile starts, and from the end of a tile to the next's start.
        before, tile: of a tile, until it waits and after that.
        send: of a sender, from its start to its signal.
        latency: from a signal to the end of a wait for it.
        late: by which the last rank's call begins later.
        waves: of tiles.
    """

    begin: float = 1000.0
    gap: float = 3.0
    ramp: float = 1.5
    dispatch: float = 0.5
    before: float = 4.0
    tile: float = 18.0
    send: float = 11.5
    latency: float = 2.0
    late: float = 0.0
    waves: int = 1

    def _begin(self, rank: int) -> float:
        return self.begin + self.late * (rank == 2)

    def _tiles(self, rank: int) -> Iterator[tuple[float, float, float, float]]:
        """Start, begin and end of the wait, and end, of a tile of each wave."""
        sent = max(self._begin(peer) for peer in range(3) if peer != rank) + self.send
        start = self._begin(rank) + self.ramp
        for _ in range(self.waves):
            began = start + self.before
            ended = max(began, sent + self.latency)
            yield start, began, ended, ended + self.tile
            start = ended + self.tile + self.dispatch

    def call_us(self, rank: int) -> float:
        *_, (_, _, _, end) = self._tiles(rank)
        return end - self._begin(rank) + self.gap

    def trace(self) -> ProgramTrace:
        """What programs would have recorded: the sender is program 0."""
        shape = (3, 1, 1 + self.waves)
        started, done = np.full(shape, np.nan), np.full(shape, np.nan)
        sent, began, ended = (np.full((*shape, 3), np.nan) for _ in range(3))
        for rank in range(3):
            peers = [peer for peer in range(3) if peer != rank]
            begin = self._begin(rank)
            started[rank, 0, 0], done[rank, 0, 0] = begin, begin + self.send
            sent[rank, 0, 0, peers] = begin + self.send
            for program, times in enumerate(self._tiles(rank), 1):
                started[rank, 0, program], done[rank, 0, program] = times[0], times[3]
                began[rank, 0, program, peers] = times[1]
                ended[rank, 0, program, peers] = times[2]
        call_us = np.array([[self.call_us(rank)] for rank in range(3)])
        return ProgramTrace(started, done, sent, began, ended, call_us, launches=1)
