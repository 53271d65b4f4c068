"""Timelines of the programs of fused kernels, from instrumented builds that record events.

An instrumented build needs its own processes: workers with `TAXFREE_TIMELINE` in their environment.
Recording costs stores, so call times are those of the usual build, and the added time is printed
beside them. On the host one build serves for both: recording is switched on and off at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from taxfree._runtime.collectives import vote
from taxfree_kernels.device import peers, sync
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, compiling, launching_through
from taxfree_tune.measuring import timer
from taxfree_tune.measuring.trial import Candidate, open_bench
from taxfree_tune.profiling.clock_sync import aligned, compare_clocks
from taxfree_tune.taxes import Alignment, ProgramTrace, Times

_BACKENDS = {"cuda": "cuda", "rocm": "hip", "host": "interpreter"}

Kind = Literal["send", "wait", "compute"]


@dataclass(frozen=True)
class Activity:
    """One activity of a program, on the common clock, in microseconds.

    Args:
        rank, program: who.
        kind: "send" from its start to its last signal; "wait" for a peer; "compute" from its start
            to its end, which contains its waits.
        peer: that was signalled last or waited for; None for "compute".
    """

    rank: int
    program: int
    kind: Kind
    peer: int | None
    begin_us: float
    end_us: float


def variables(fabric: str) -> dict[str, str]:
    """The environment variables with which workers build instrumented kernels."""
    return {"TAXFREE_TIMELINE": _BACKENDS[fabric]}


# -- in instrumented workers --


def trace_programs(
    fabric: Fabric,
    op: str,
    problem: dict[str, Any],
    candidates: Sequence[Candidate],
    repetitions: int,
) -> list[ProgramTrace]:
    """Time chains of calls that record events; a task of instrumented workers.

    Returns:
        The last call of each chain, by candidate; empty except on rank 0.
    """
    bench = open_bench(fabric, op, problem)
    traces = [
        trace_call(fabric, bench.call(plan), repetitions) for plan in map(bench.plan, candidates)
    ]
    fabric.synchronize()
    fabric.pool.check()
    return traces if fabric.rank == 0 else []


def trace_call(fabric: Fabric, call: timer.Call, repetitions: int) -> ProgramTrace:
    """Time chains of a call that records events; collective."""
    grids = _grids(call)
    with compiling():
        call(0)
    fabric.barrier()
    size = (max(grids), sync.EVENTS.value, sync.PEERS.value)
    log = torch.zeros(size, dtype=torch.int64, device=fabric.device)
    logs: list[npt.NDArray[np.int64]] = []

    def after(_: int) -> None:
        logs.append(log[:, :, : fabric.world_size].cpu().numpy().copy())

    first = compare_clocks(fabric)
    fabric.pool.control[peers.LOG.value] = log.data_ptr()
    fabric.barrier()
    mode = "graph" if fabric.has_graphs else "eager"
    (timing,) = timer.time_together(fabric, [(call, mode)], repetitions, after)
    fabric.pool.control[peers.LOG.value] = 0
    of_rank = (first, compare_clocks(fabric), np.array(logs))
    everyone = vote(fabric.group, of_rank)
    alignment = aligned([answer[:2] for answer in everyone], 0.0)
    events = [answer[2] for answer in everyone]
    return trace_of(events, alignment, np.array(timing.by_rank_us), len(grids))


def _grids(call: timer.Call) -> list[int]:
    """Programs of each launch of a call."""
    grids: list[int] = []

    def launch(kernel: Kernel, args: tuple[Any, ...]) -> None:
        grids.append(kernel.grid)

    with launching_through(launch):
        call(0)
    return grids


def trace_of(
    events: Sequence[npt.NDArray[np.int64]], alignment: Alignment, call_us: Times, launches: int
) -> ProgramTrace:
    """The events on the ranks' common clock.

    Args:
        events: logs of each rank, in nanoseconds of its own clock, 0 where nothing was recorded,
            [repetition, program, event, peer].
        call_us, launches: as of `ProgramTrace`.
    """
    times = np.array(
        [
            np.where(events_of_rank > 0, alignment.common_us(rank, events_of_rank), np.nan)
            for rank, events_of_rank in enumerate(events)
        ]
    )

    def of(event: Any) -> Times:
        return np.asarray(times[:, :, :, event.value], dtype=np.float64)

    return ProgramTrace(
        started=of(sync.STARTED)[..., 0],
        done=of(sync.DONE)[..., 0],
        sent=of(sync.SENT),
        began=of(sync.WAIT_BEGAN),
        ended=of(sync.WAIT_ENDED),
        call_us=call_us,
        launches=launches,
    )


# -- activities --


def activities(trace: ProgramTrace) -> Iterator[Activity]:
    """Activities of all ranks' programs in the last call."""
    started, done, sent, began, ended = (
        times[:, -1] for times in (trace.started, trace.done, trace.sent, trace.began, trace.ended)
    )
    for rank, program in np.argwhere(~np.isnan(started)).tolist():
        begin, end = float(started[rank, program]), float(done[rank, program])
        # The second of two launches overwrites the first one's events, except for the signals.
        signals = np.where(sent[rank, program] >= begin, sent[rank, program], -np.inf)
        last = int(np.argmax(signals))
        if signals[last] > -np.inf:
            yield Activity(rank, program, "send", last, begin, float(signals[last]))
        elif end >= begin:
            yield Activity(rank, program, "compute", None, begin, end)
        for peer in range(len(signals)):
            span = float(began[rank, program, peer]), float(ended[rank, program, peer])
            if begin <= span[0] <= span[1]:
                yield Activity(rank, program, "wait", peer, *span)
