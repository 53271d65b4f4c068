"""Inside a fused kernel: the programs that its end waited for, and what they waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taxfree_tune.taxes.measured import ProgramTrace


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


def inside(trace: ProgramTrace, rank: int, repetition: int) -> Inside:
    """Follow the critical path of programs, backwards from the end of a call on a rank.

    The last program to end is critical. The program that it waited for in order to start is taken
    to be the last one that ended before; that one is critical too; and so on.
    """
    started, done = trace.started[:, repetition], trace.done[:, repetition]
    ran = done >= started  # false for programs of earlier launches, which count as outside
    begin = np.nanmin(np.where(ran, started, np.nan), axis=1)
    own_done = np.where(ran[rank], done[rank], -np.inf)
    program = int(np.argmax(own_done))
    outside = float(trace.call_us[rank, repetition]) - float(own_done[program] - begin[rank])
    starting = skew = latency = work = waiting = 0.0
    while True:
        start = float(started[rank, program])
        work += float(own_done[program]) - start
        for wait in _waits(trace, rank, repetition, program):
            source, signalled = _last_signal(trace, rank, repetition, wait)
            since = _own_part(trace, rank, repetition, wait)
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


def _waits(trace: ProgramTrace, rank: int, repetition: int, program: int) -> list[_Wait]:
    """The waits of a program; overlapping waits for several sources count as one."""
    began = trace.began[rank, repetition, program]
    ended = trace.ended[rank, repetition, program]
    since = trace.started[rank, repetition, program]
    waits: list[_Wait] = []
    for source in np.argsort(began).tolist():
        begin, end = float(began[source]), float(ended[source])
        if not since <= begin <= end:  # nothing was recorded, or by an earlier launch
            continue
        if waits and begin < waits[-1].end:
            last = waits.pop()
            waits.append(_Wait(last.begin, max(end, last.end), (*last.sources, source)))
        else:
            waits.append(_Wait(begin, end, (source,)))
    return waits


def _own_part(trace: ProgramTrace, rank: int, repetition: int, wait: _Wait) -> float:
    """When a wait becomes one for others: until its own rank has sent its part, it is work."""
    sent = trace.sent[rank, repetition, :, rank]
    meanwhile = sent[(sent >= wait.begin) & (sent <= wait.end)]
    return float(meanwhile.max()) if len(meanwhile) else wait.begin


def _last_signal(trace: ProgramTrace, rank: int, repetition: int, wait: _Wait) -> tuple[int, float]:
    """Who sent the signal that ended a wait, and when: the last one of each source until then.

    A signal is recorded after its release, so a peer may see it before its recorded time.
    """
    latest = []
    for source in wait.sources:
        sent = trace.sent[source, repetition, :, rank]
        sent = sent[~np.isnan(sent)]
        seen = sent[sent <= wait.end]
        first = sent.min() if len(sent) else wait.begin
        latest.append((float(seen.max() if len(seen) else first), source))
    when, source = max(latest)
    return source, when
