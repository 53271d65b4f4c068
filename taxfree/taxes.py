"""The three taxes of one pipeline: arithmetic on times and clock readings, wherever they come from.

For each rank, in microseconds per call::

    t_eager = t_bound + launch + bulk synchronous + locality + graph penalty + residual

docs/taxes.md defines the parts, and says why each is measured as it is. Parts may be negative and
are kept so. What cannot be attributed is not a part and therefore stays in the residual. The share
of the residual that was observed to be kernels' work, beyond the bound, is reported separately.
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
INSIDE = "what happens inside the kernels is in the residual"
NO_GRAPHS = "no graphs on this fabric: launches are in the residual"
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
class Notes:
    """Events recorded by the programs of an instrumented fused kernel: one call per repetition.

    Times are in microseconds on the ranks' common clock, NaN where nothing was noted.

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
        """Whether in every call each rank has a program of which start and end were noted."""
        return bool((self.done >= self.started).any(axis=2).all())

    @property
    def shows_starts(self) -> bool:
        """Whether no program recorded its end without its start."""
        return not bool((np.isnan(self.started) & ~np.isnan(self.done)).any())


@dataclass(frozen=True)
class Measurement:
    """One pipeline, measured on all ranks, its sequences interleaved.

    Args:
        steps: of a call.
        eager_us, graph_us: per call, [rank, repetition]; no graph where the fabric has none.
        stamped_us: as `graph_us` (or `eager_us`), of the sequence with clock readings.
        calls: of a repetition.
        in_place: readings of the unmodified sequence.
        least: with the collective on the smallest possible data; None if it has no such form.
        hot, cold: with the consumer's input read once more, or evicted, right before the consumer.
        gap_us: period of empty kernels in a chain; 0 if launches cannot be told apart from kernels.
        gap_iqr_us: its interquartile range.
        alignment: of the ranks' clocks.
        notes: events of a fused kernel, from an instrumented build; None for others.
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
    notes: Notes | None = None

    @property
    def kernels(self) -> int:
        return sum(step.kernels for step in self.steps)

    def stamp_us(self) -> Times:
        """What one clock reading adds to the sequence, by rank."""
        plain = self.eager_us if self.graph_us is None else self.graph_us
        added = np.median(self.stamped_us, axis=1) - np.median(plain, axis=1)
        readings = self.calls * len(self.steps) + 1
        return np.asarray(added * self.calls / readings, dtype=np.float64)

    def notes_us(self) -> float:
        """What noting adds to a call, of the slowest rank."""
        assert self.notes is not None
        plain = self.eager_us if self.graph_us is None else self.graph_us
        noted, usual = (np.median(each, axis=1).max() for each in (self.notes.call_us, plain))
        return float(noted - usual)

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
        unsplit: why taxes have no parts; empty if they have.
        kernel_us: the share of the residual observed to be kernels' work beyond the bound; None if
            nothing was observed.
    """

    rank: int
    t_eager_us: float
    t_graph_us: float | None
    t_bound_us: float
    parts: tuple[Part, ...]
    residual_iqr_us: float | None
    unsplit: str = ""
    kernel_us: float | None = None

    def tax_us(self, tax: Tax) -> float | None:
        """The sum of a tax's parts; None where it has none."""
        parts = [part.us for part in self.parts if part.tax == tax]
        return sum(parts) if parts else None

    @property
    def residual_us(self) -> float:
        """What is neither bound nor tax: kernel inefficiency, and what cannot be attributed."""
        return self.t_eager_us - self.t_bound_us - sum(part.us for part in self.parts)

    @property
    def unexplained_us(self) -> float | None:
        """The residual without the observed kernel work; None if nothing was observed."""
        return None if self.kernel_us is None else self.residual_us - self.kernel_us

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
            text = f"the residual is {share:.0%} of t_eager"
            if self.kernel_us is not None and self.unexplained_us is not None:
                kernels, rest = (
                    self.kernel_us / self.t_eager_us,
                    self.unexplained_us / self.t_eager_us,
                )
                text += f": work of kernels {kernels:.0%}, unexplained {rest:.0%}"
            found.append(text)
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
            "kernel_us": self.kernel_us,
            "unexplained_us": self.unexplained_us,
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
    unsplit = [NO_GRAPHS] if graph is None and measured.notes is None else []
    work: Times | None = None
    if measured.notes is not None and measured.notes.shows_programs:
        parts, work = _inside(measured, measured.notes, bounds, rank)
        found += parts
    elif measured.only("collective") is None:
        unsplit.append(INSIDE)
    else:
        found += _bulk_synchronous(measured, bounds, rank)
        found += _locality(measured, rank)
        work = _work(measured, rank) - bounds.t_floor_us
    # Of the notes there may be another number of repetitions.
    spent = sum(
        (part.us if len(times) != len(eager) else times for part, times in found), 0 * eager
    )
    return Account(
        rank,
        float(np.median(eager)),
        None if graph is None else float(np.median(graph)),
        bounds.t_bound_us,
        tuple(part for part, _ in found),
        _iqr(eager - spent),
        "; ".join(unsplit),
        None if work is None else float(np.median(work)),
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
    # The part of the link's time that is in the bound cannot be hidden.
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


def _work(measured: Measurement, rank: int) -> Times:
    """What producers take in their place, and consumers on an input that was just read."""
    of_kind = {
        kind: [index for index, step in enumerate(measured.steps) if step.kind == kind]
        for kind in ("producer", "consumer")
    }
    hot = measured.in_place if measured.hot is None else measured.hot
    produced = _kernel_us(measured, measured.in_place, rank)[:, of_kind["producer"]]
    consumed = _kernel_us(measured, hot, rank)[:, of_kind["consumer"]]
    return np.asarray(produced.sum(axis=1) + consumed.sum(axis=1), dtype=np.float64)


# -- inside fused kernels --


@dataclass(frozen=True)
class Inside:
    """Where the time of one recorded call went on one rank, in microseconds.

    Args:
        outside: no program of it was observed to run.
        starting: waiting for critical programs to start.
        skew, latency, transfer: waits of critical programs, by cause.
        work: the rest of the critical programs' time.
    """

    outside: float
    starting: float
    skew: float
    latency: float
    transfer: float
    work: float


def inside(notes: Notes, rank: int, repetition: int) -> Inside:
    """Follow the critical path of programs, backwards from the end of a call on a rank.

    The last program to end is critical. The program that it waited for in order to start is taken
    to be the last one that ended before; that one is critical too; and so on.
    """
    started, done = notes.started[:, repetition], notes.done[:, repetition]
    ran = done >= started  # false for programs of earlier launches, which count as outside
    begin = np.nanmin(np.where(ran, started, np.nan), axis=1)
    own_done = np.where(ran[rank], done[rank], -np.inf)
    program = int(np.argmax(own_done))
    outside = float(notes.call_us[rank, repetition]) - float(own_done[program] - begin[rank])
    starting = skew = latency = work = waiting = 0.0
    while True:
        start = float(started[rank, program])
        work += float(own_done[program]) - start
        for wait in _waits(notes, rank, repetition, program):
            source, signalled = _last_signal(notes, rank, repetition, wait)
            since = _own_part(notes, rank, repetition, wait)
            after = max(0.0, wait.end - max(since, signalled))
            late = max(0.0, float(begin[source] - begin[rank]))
            waiting += wait.end - since
            latency += after
            skew += min(late, wait.end - since - after)
        # By a coarse clock a short program may have no length and would be its own predecessor.
        before = np.where((own_done <= start) & (started[rank] < start), own_done, -np.inf)
        previous = int(np.argmax(before))
        if before[previous] == -np.inf:
            starting += start - float(begin[rank])
            break
        starting += start - float(before[previous])
        program = previous
    transfer = waiting - skew - latency
    return Inside(outside, starting, skew, latency, transfer, work - waiting)


@dataclass(frozen=True)
class _Wait:
    """A wait of a program: when, and for whom."""

    begin: float
    end: float
    sources: tuple[int, ...]


def _waits(notes: Notes, rank: int, repetition: int, program: int) -> list[_Wait]:
    """The waits of a program; overlapping waits for several sources count as one."""
    began = notes.began[rank, repetition, program]
    ended = notes.ended[rank, repetition, program]
    since = notes.started[rank, repetition, program]
    found: list[_Wait] = []
    for source in np.argsort(began).tolist():
        begin, end = float(began[source]), float(ended[source])
        if not since <= begin <= end:  # nothing was noted, or by an earlier launch
            continue
        if found and begin < found[-1].end:
            last = found.pop()
            found.append(_Wait(last.begin, max(end, last.end), (*last.sources, source)))
        else:
            found.append(_Wait(begin, end, (source,)))
    return found


def _own_part(notes: Notes, rank: int, repetition: int, wait: _Wait) -> float:
    """When a wait becomes one for others: until its own rank has sent its part, it is work."""
    sent = notes.sent[rank, repetition, :, rank]
    meanwhile = sent[(sent >= wait.begin) & (sent <= wait.end)]
    return float(meanwhile.max()) if len(meanwhile) else wait.begin


def _last_signal(notes: Notes, rank: int, repetition: int, wait: _Wait) -> tuple[int, float]:
    """Who sent the signal that ended a wait, and when: the last one of each source until then.

    A signal is recorded after its release, so a peer may see it before its recorded time.
    """
    latest = []
    for source in wait.sources:
        sent = notes.sent[source, repetition, :, rank]
        sent = sent[~np.isnan(sent)]
        seen = sent[sent <= wait.end]
        first = sent.min() if len(sent) else wait.begin
        latest.append((float(seen.max() if len(seen) else first), source))
    when, source = max(latest)
    return source, when


def _inside(
    measured: Measurement, notes: Notes, bounds: Bounds, rank: int
) -> tuple[list[tuple[Part, Times]], Times]:
    """Parts of a fused kernel's account, and its work beyond the bound."""
    calls = [inside(notes, rank, each) for each in range(notes.call_us.shape[1])]
    by_name = {
        field.name: np.array([getattr(call, field.name) for call in calls])
        for field in dataclasses.fields(Inside)
    }
    # The part of the link's time in the bound cannot be hidden; it may show up as senders' work.
    exposed = max(0.0, bounds.t_link_us - bounds.t_floor_us)
    allowed = np.minimum(exposed, by_name["transfer"])
    transfer, work = by_name["transfer"] - allowed, by_name["work"] - (exposed - allowed)
    found = []
    # Otherwise other kernels of the call ran then, or programs that had not recorded anything.
    if notes.shows_starts and notes.launches == 1:
        method = "a call - from its first program's start to its last one's end"
        found.append(_part("ends", "launch", by_name["outside"], method))
    else:
        work = work + by_name["outside"] - max(0, measured.kernels - 1) * measured.gap_us
    if notes.shows_starts:
        method = "until critical programs run"
        found.append(_part("start", "launch", by_name["starting"], method))
    else:
        work = work + by_name["starting"]
    bulk: Tax = "bulk synchronous"
    error = float(measured.alignment.error_ns.max()) * 1e-3
    clocks = f"clocks aligned to {error:.2f} us"
    taken_off = f" - {exposed:.1f} us of the bound" if exposed else ""
    found += [
        _part("skew", bulk, by_name["skew"], f"waits for a rank whose call began later, {clocks}"),
        _part("latency", bulk, by_name["latency"], "waits after the last signal was sent"),
        _part("transfer", bulk, transfer, f"other waits of critical programs{taken_off}"),
    ]
    return found, work - bounds.t_floor_us


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
