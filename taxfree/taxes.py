"""The three taxes of one pipeline: arithmetic on times and clock readings, wherever they come from.

For each rank, in microseconds per call::

    t_eager = t_bound + launch + bulk synchronous + locality + graph penalty + residual

The definitions, and why each part is measured as it is, are in docs/taxes.md. Parts may be negative
and stay so. What cannot be told apart, such as waiting inside a fused kernel, is no part and is
therefore in the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from taxfree.bounds import Bounds

Tax: TypeAlias = Literal["launch", "bulk synchronous", "locality", "graph penalty"]
Times: TypeAlias = npt.NDArray[np.float64]
Nanoseconds: TypeAlias = npt.NDArray[np.int64]

TAXES: tuple[Tax, ...] = ("launch", "bulk synchronous", "locality", "graph penalty")
INSIDE = "waits and loads inside a fused kernel are in the residual"
ALLOWED = 0.1  # of t_eager, for the residual and for any negative part


# -- what is measured --


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
    """How the clocks of ranks relate: linearly, by two comparisons with the clock of rank 0.

    Args:
        at_ns: own clock of each rank at the comparisons, [2, rank].
        offset_ns: own clock minus that of rank 0 then, [2, rank].
        error_ns: the most by which an offset is wrong: half of the shortest round trip, [rank].
        step_ns: by which a clock moves, the coarsest rank's.
    """

    at_ns: Nanoseconds
    offset_ns: Nanoseconds
    error_ns: Times
    step_ns: float

    def common_us(self, rank: int, clock_ns: Nanoseconds) -> Times:
        """Readings of a rank's clock in microseconds since the first comparison, on one clock."""
        # Differences first: readings are too large for a float64 that keeps nanoseconds.
        since = (clock_ns - self.at_ns[0, rank]).astype(np.float64)
        between = float(self.at_ns[1, rank] - self.at_ns[0, rank])
        drift = float(self.offset_ns[1, rank] - self.offset_ns[0, rank]) / between if between else 0
        start = self.at_ns[0, rank] - self.offset_ns[0, rank] - self.at_ns[0, 0]
        return np.asarray((since * (1 - drift) + float(start)) * 1e-3, dtype=np.float64)


@dataclass(frozen=True)
class Stamps:
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
                alignment.common_us(rank, own[:, step :: self.steps])
                for rank, own in enumerate(self.clock_ns)
            ]
        )
        calls = (self.clock_ns.shape[2] - 1) // self.steps
        arrivals = arrivals[:, :, :calls]
        return np.asarray((arrivals.max(axis=0) - arrivals).mean(axis=2), dtype=np.float64)


@dataclass(frozen=True)
class Measurement:
    """One pipeline, measured on all ranks, its sequences interleaved.

    Args:
        steps: of a call.
        eager_us, graph_us: per call, [rank, repetition]; no graph where the fabric has none.
        stamped_us: as `graph_us` (or `eager_us`), of the sequence with clock readings.
        calls: of a repetition.
        in_place: readings of the sequence as it is.
        least: with the collective on as little data as it takes; None where there is none such.
        hot, cold: with the consumer's input read once more, or evicted, right before the consumer.
        gap_us: an empty kernel's period in a chain; 0 where launches cannot be told from kernels.
        gap_iqr_us: its spread.
        alignment: of the ranks' clocks.
    """

    steps: tuple[StepInfo, ...]
    eager_us: Times
    graph_us: Times | None
    stamped_us: Times
    calls: int
    in_place: Stamps
    least: Stamps | None
    hot: Stamps | None
    cold: Stamps | None
    gap_us: float
    gap_iqr_us: float
    alignment: Alignment

    @property
    def kernels(self) -> int:
        return sum(step.kernels for step in self.steps)

    def stamp_us(self) -> Times:
        """What one clock reading adds to the sequence, by rank."""
        plain = self.eager_us if self.graph_us is None else self.graph_us
        added = np.median(self.stamped_us, axis=1) - np.median(plain, axis=1)
        readings = self.calls * len(self.steps) + 1
        return np.asarray(added * self.calls / readings, dtype=np.float64)

    def only(self, kind: str) -> int | None:
        """Index of the first step of a kind."""
        return next((i for i, step in enumerate(self.steps) if step.kind == kind), None)


# -- the account --


@dataclass(frozen=True)
class Part:
    """A part of the time of a call.

    Args:
        name, tax: what it is, and the tax it belongs to.
        us: microseconds per call, the median over repetitions.
        iqr_us: distance of its quartiles; None where it is modelled.
        method: how it was found, in one line.
        memory_bytes: moved for it; 0 where no bytes belong to it.
    """

    name: str
    tax: Tax
    us: float
    iqr_us: float | None
    method: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class Account:
    """The parts of one rank's time; all in microseconds per call.

    Args:
        rank: the rank.
        t_eager_us, t_graph_us: of the rank.
        t_bound_us: of the problem.
        parts: of the taxes, in order.
        residual_iqr_us: spread of the residual; None where it is modelled.
        unsplit: why taxes have no parts; empty where they have.
    """

    rank: int
    t_eager_us: float
    t_graph_us: float | None
    t_bound_us: float
    parts: tuple[Part, ...]
    residual_iqr_us: float | None
    unsplit: str = ""

    def tax_us(self, tax: Tax) -> float | None:
        """The sum of a tax's parts; None where it has none."""
        parts = [part.us for part in self.parts if part.tax == tax]
        return sum(parts) if parts else None

    @property
    def residual_us(self) -> float:
        """What is neither bound nor tax: the kernels' inefficiency, and what is not told apart."""
        return self.t_eager_us - self.t_bound_us - sum(part.us for part in self.parts)

    def problems(self) -> list[str]:
        """What keeps the account from being closed, one line each."""
        allowed = ALLOWED * self.t_eager_us
        found = [
            f"{part.name} is negative: {part.us:.1f} us"
            for part in self.parts
            if part.us < -allowed
        ]
        if abs(self.residual_us) > allowed:
            share = self.residual_us / self.t_eager_us
            found.append(f"the residual is {share:.0%} of t_eager")
        return found

    def is_below_bound(self) -> bool:
        """Whether a time is less than the bound: then one of the two is wrong."""
        times = (self.t_eager_us, self.t_graph_us)
        return any(time is not None and time < self.t_bound_us for time in times)

    def to_json(self) -> dict[str, Any]:
        names = {"launch": "launch_us", "bulk synchronous": "bulk_synchronous_us"}
        names |= {"locality": "locality_us", "graph penalty": "graph_penalty_us"}
        return {
            "rank": self.rank,
            "t_eager_us": self.t_eager_us,
            "t_graph_us": self.t_graph_us,
            "t_bound_us": self.t_bound_us,
            **{names[tax]: self.tax_us(tax) for tax in TAXES},
            "residual_us": self.residual_us,
            "residual_iqr_us": self.residual_iqr_us,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }


def slowest(accounts: Sequence[Account]) -> Account:
    """The account of the rank whose eager calls take longest."""
    return max(accounts, key=lambda account: account.t_eager_us)


def accounts(measured: Measurement, bounds: Bounds) -> tuple[Account, ...]:
    """Reconcile what was measured, rank by rank."""
    return tuple(_account(measured, bounds, rank) for rank in range(len(measured.eager_us)))


def _account(measured: Measurement, bounds: Bounds, rank: int) -> Account:
    eager = measured.eager_us[rank]
    graph = None if measured.graph_us is None else measured.graph_us[rank]
    found = [] if graph is None else _launch(measured, eager - graph)
    unsplit = "no graphs on this fabric: launches are in the residual" if graph is None else ""
    if measured.only("collective") is None or measured.only("consumer") is None:
        unsplit = f"{unsplit}; {INSIDE}" if unsplit else INSIDE
    else:
        found += _bulk_synchronous(measured, bounds, rank)
        found += _locality(measured, rank)
    spent = sum((times for _, times in found), np.zeros_like(eager))
    return Account(
        rank,
        float(np.median(eager)),
        None if graph is None else float(np.median(graph)),
        bounds.t_bound_us,
        tuple(part for part, _ in found),
        _iqr(eager - spent),
        unsplit,
    )


def _launch(measured: Measurement, host: Times) -> list[tuple[Part, Times]]:
    gaps = max(0, measured.kernels - 1)
    method = f"{gaps} x {measured.gap_us:.2f} us, the period of empty kernels in a graph"
    between = Part("gaps", "launch", gaps * measured.gap_us, gaps * measured.gap_iqr_us, method)
    if np.median(host) < 0:
        first = _part("graph penalty", "graph penalty", host, "t_eager - t_graph, negative")
    else:
        first = _part("host", "launch", host, "t_eager - t_graph")
    return [first, (between, np.full_like(host, between.us))]


def _bulk_synchronous(measured: Measurement, bounds: Bounds, rank: int) -> list[tuple[Part, Times]]:
    tax: Tax = "bulk synchronous"
    step = measured.only("collective")
    assert step is not None
    skew = measured.in_place.skew_us(step, measured.alignment)[rank]
    error = float(measured.alignment.error_ns.max()) * 1e-3
    found = [
        _part("skew", tax, skew, f"last rank's arrival - own, clocks aligned to {error:.2f} us")
    ]
    # What of the link's time the bound contains cannot be hidden.
    exposed = max(0.0, bounds.t_link_us - bounds.t_floor_us)
    rest = _kernel_us(measured, measured.in_place, rank)[:, step] - skew - exposed
    method = "the collective in its place - skew"
    if measured.least is not None:
        least = _kernel_us(measured, measured.least, rank)[:, step]
        least = least - measured.least.skew_us(step, measured.alignment)[rank]
        found.append(_part("latency", tax, least, "the least collective in its place - its skew"))
        rest, method = rest - np.median(least), f"{method} - latency"
    if exposed:
        method += f" - {exposed:.1f} us of the bound"
    found.append(_part("transfer", tax, rest, method))
    return found


def _locality(measured: Measurement, rank: int) -> list[tuple[Part, Times]]:
    kernel = _kernel_us(measured, measured.in_place, rank)
    found = [
        _part(
            step.name,
            "locality",
            kernel[:, index],
            "in its place, between clock readings",
            step.memory_bytes,
        )
        for index, step in enumerate(measured.steps)
        if step.kind == "copy"
    ]
    if measured.hot is None:
        return found
    consumer = measured.only("consumer")
    assert consumer is not None
    in_place = measured.in_place.step_us()[rank, :, consumer]
    hot = measured.hot.step_us()[rank, :, consumer]
    method = "in its place - there on an input that was just read"
    if measured.cold is not None:
        limit = np.median(measured.cold.step_us()[rank, :, consumer] - hot)
        method += f"; evicted {limit:+.2f} us"
    step = measured.steps[consumer]
    return [*found, _part(step.name, "locality", in_place - hot, method, step.memory_bytes)]


def _kernel_us(measured: Measurement, stamps: Stamps, rank: int) -> Times:
    """Steps without the clock readings between them and without gaps: [repetition, step]."""
    gaps = measured.gap_us * np.array([step.kernels for step in measured.steps])
    return np.asarray(stamps.step_us()[rank] - measured.stamp_us()[rank] - gaps, dtype=np.float64)


def _part(
    name: str, tax: Tax, times: Times, method: str, memory_bytes: int = 0
) -> tuple[Part, Times]:
    part = Part(name, tax, float(np.median(times)), _iqr(times), method, memory_bytes)
    return part, times


def _iqr(times: Times) -> float:
    first, third = np.percentile(times, (25, 75))
    return float(third - first)
