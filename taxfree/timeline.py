"""What programs of fused kernels do when, from kernels that were built to note it.

Such a build is a process of its own: workers that have `TAXFREE_TIMELINE` in their environment.
Noting costs a store per event, so times of it are for looking at, and in no account.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from taxfree.bench import deadline_s, heap_bytes
from taxfree.group import WorkerGroup
from taxfree.settings import Settings
from taxfree.stamping import aligned, compare_clocks
from taxfree.trial import Candidate, open_bench
from taxfree_kernels.device import sync
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, launching_through
from taxfree_kernels.variant import Plan

VARIABLE = "TAXFREE_TIMELINE"
_BACKENDS = {"cuda": "cuda", "rocm": "hip", "host": "interpreter"}
_WARM_UP = 3

Kind = Literal["send", "wait", "compute"]


@dataclass(frozen=True)
class Activity:
    """What a program was doing, on the common clock, in microseconds.

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


def record(
    op: str, problem: Any, fabric: str, candidates: Sequence[Candidate]
) -> list[tuple[Activity, ...]]:
    """Run one call of each candidate on instrumented ranks.

    Raises:
        TaskFailed: the fabric cannot be opened, or a candidate failed.
        WorkerLost: a worker died or hung.
    """
    variables = {VARIABLE: _BACKENDS[fabric]}
    size, timeout_s = heap_bytes(fabric, [problem]), Settings.from_environment().timeout_s
    with WorkerGroup(problem.world_size, fabric, size, timeout_s, variables) as group:
        found: list[tuple[Activity, ...]] = group.call(
            "taxfree.timeline:record_calls",
            deadline_s(group.hardware),
            op=op,
            problem=dataclasses.asdict(problem),
            candidates=list(candidates),
        )[0]
    return found


def record_calls(
    fabric: Fabric, op: str, problem: dict[str, Any], candidates: Sequence[Candidate]
) -> list[tuple[Activity, ...]]:
    """Activities of one call of each candidate, of all ranks; a task of instrumented workers."""
    bench = open_bench(fabric, op, problem)
    found = []
    for candidate in candidates:
        plan = bench.plan(candidate)
        size = _programs(bench, plan) * sync.EVENTS.value * sync.PEERS.value
        log = torch.zeros(size, dtype=torch.int64, device=fabric.device)
        for step in range(_WARM_UP):
            bench.call(plan, step)
        first = compare_clocks(fabric)
        fabric.pool.control[sync.LOG.value] = log.data_ptr()
        fabric.barrier()
        fabric.device_barrier()
        bench.call(plan, _WARM_UP)
        fabric.synchronize()
        fabric.pool.control[sync.LOG.value] = 0
        second = compare_clocks(fabric)
        fabric.pool.check()
        everyone: list[Any] = [None] * fabric.world_size
        dist.all_gather_object(everyone, (log.cpu().numpy(), first, second), fabric.group)
        alignment = aligned([own[1:3] for own in everyone], 0.0)
        activities: list[Activity] = []
        for rank, (own, _, _) in enumerate(everyone):
            events = own.reshape(-1, sync.EVENTS.value, sync.PEERS.value)
            times = alignment.common_us(rank, events)
            activities += activities_of(rank, events > 0, times, fabric.world_size)
        found.append(tuple(activities))
    return found


def _programs(bench: Any, plan: Plan) -> int:
    """Of the largest launch of a plan."""
    grids = []

    def launch(kernel: Kernel, args: tuple[Any, ...]) -> None:
        grids.append(kernel.grid)

    with launching_through(launch):
        plan(*bench.inputs[0], bench.outputs[0])
    return max(grids)


def activities_of(rank: int, noted: Any, times: Any, world_size: int) -> Iterator[Activity]:
    """What the programs of one rank did.

    Args:
        noted: whether there is a time, [program, event, peer].
        times: of events, in microseconds, [program, event, peer].
    """
    started, done = sync.STARTED.value, sync.DONE.value
    sent, began, ended = sync.SENT.value, sync.WAIT_BEGAN.value, sync.WAIT_ENDED.value
    for program in range(len(times)):
        if not noted[program, started, 0]:
            continue
        begin = float(times[program, started, 0])
        peers = [p for p in range(world_size) if noted[program, sent, p]]
        last = max(peers, key=lambda peer: times[program, sent, peer], default=0)
        # Of a plan with two launches, the second notes over the first, but for the signals.
        if peers and times[program, sent, last] >= begin:
            yield Activity(rank, program, "send", last, begin, float(times[program, sent, last]))
        elif noted[program, done, 0]:
            end = float(times[program, done, 0])
            yield Activity(rank, program, "compute", None, begin, end)
        for peer in range(world_size):
            if noted[program, began, peer] and noted[program, ended, peer]:
                span = times[program, began, peer], times[program, ended, peer]
                yield Activity(rank, program, "wait", peer, float(span[0]), float(span[1]))
