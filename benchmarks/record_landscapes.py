"""Records landscapes on one GPU: compiles on all cores, and times one config at a time.

    python -m benchmarks.record_landscapes --out benchmarks/results/landscapes

Each worker compiles for one operation; whoever has compiled a few configs times them, alone on the
GPU. Results are written as they come, so that a run which is ended keeps what it has measured. A
config that hangs or takes its worker down is marked, and the worker replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record_landscapes_ranks as ranks
from benchmarks.commands import exit_code, positive
from benchmarks.landscapes import SUBJECTS, Subject, on_grids
from taxfree import devices, fingerprints
from taxfree.errors import TaxfreeError
from taxfree.measuring import environment
from taxfree.measuring.results import machine_name, write
from taxfree.measuring.trial import Candidate, key
from taxfree.tuning.candidates import every_candidate
from taxfree.workers.group import WorkerGroup, Workers
from taxfree_kernels.fabric.layout import arena_bytes
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem

_BATCH = 4  # configs that a worker compiles before it asks for the GPU
_OPEN_S, _COMPILE_S, _TIME_S, _TIMEOUT_S = 100.0, 60.0, 12.0, 5.0
_WORTH_A_WORKER = 40  # configs that wait, for the seconds that a worker takes to start
_LAST_BATCH_S = 20.0  # before the end no more is begun
_WRITTEN_EVERY_S = 10.0

Job = tuple[Candidate, list[int]]


class Recording:
    """What is recorded of one operation.

    Args:
        subjects: its landscapes.
        hardware: of the GPU.
        limit: configs of each landscape, the first configs of a search among them; None for all.
    """

    def __init__(self, subjects: Sequence[Subject], hardware: Hardware, limit: int | None) -> None:
        self.op, self.subjects = subjects[0].op, subjects
        self.problems: list[Problem] = [subject.problem for subject in subjects]
        self.grids = [on_grids(problem, hardware, self.op) for problem in self.problems]
        self.found: list[dict[str, ranks.Found]] = [{} for _ in subjects]
        jobs: dict[str, Job] = {}
        for at, (problem, grid) in enumerate(zip(self.problems, self.grids, strict=True)):
            seeds = [
                Candidate(name, config)
                for name, variant in grid.items()
                for config in variant.seed_configs(problem, hardware)
            ]
            every = every_candidate(grid, problem, hardware, seed=0)
            others = [candidate for candidate in every if candidate not in seeds]
            for candidate in [*seeds, *others][:limit]:
                jobs.setdefault(key(candidate), (candidate, []))[1].append(at)
        self.jobs = deque(jobs.values())
        self.workers = 0
        self._versions = fingerprints.versions(self.op)

    @property
    def to_measure(self) -> int:
        """Configs that wait, counted once for each problem."""
        return sum(len(indices) for _, indices in self.jobs)

    @property
    def arena_bytes(self) -> int:
        """Of an emulated rank; 0 where the problems have one rank."""
        if self.problems[0].world_size == 1:
            return 0
        return max(arena_bytes(problem.slot_bytes) for problem in self.problems)

    @property
    def heap_bytes(self) -> int:
        if not self.arena_bytes:
            return devices.heap_bytes(self.problems)
        return arena_bytes(self.problems[0].world_size * self.arena_bytes)

    def document(self, at: int, hardware: Hardware, machine: dict[str, Any]) -> str:
        """The landscape of a subject, as JSON."""
        problem, grid = self.problems[at], self.grids[at]
        spaces = {name: each.space(problem, hardware) for name, each in grid.items()}
        trials: dict[str, list[list[Any]]] = {name: [] for name in grid}
        for text, found in list(self.found[at].items()):
            candidate = json.loads(text)
            values = [candidate["config"][name] for name in spaces[candidate["variant"]]]
            us = found if isinstance(found, str) else round(found, 3)
            trials[candidate["variant"]].append([*values, us])
        content = {
            "schema": 1,
            "environment": machine,
            "op": self.op,
            "problem": dataclasses.asdict(problem),
            "emulated": "alone" if self.arena_bytes else None,
            "held_out": self.subjects[at].held_out,
            "timing": {"mode": "graph", "calls": ranks.CHAIN, "repetitions": ranks.REPETITIONS},
            "versions": {name: self._versions[name] for name in grid},
            "spaces": spaces,
            "trials": trials,  # the values of a config in the order of its space, and us or why not
        }
        return json.dumps(content, separators=(",", ":")) + "\n"


class Crew:
    """Workers that take the jobs of recordings, until these are done or time is over.

    Args:
        fabric: "cuda", or "host" to test it.
        recordings: one for each operation.
        count: workers.
        end: in seconds of `time.monotonic`.
    """

    def __init__(
        self, fabric: str, recordings: Sequence[Recording], count: int, end: float
    ) -> None:
        self._fabric, self._recordings, self._count, self._end = fabric, recordings, count, end
        self._jobs, self._gpu = threading.Lock(), threading.Lock()
        self._groups: list[WorkerGroup] = []
        self._all_open = threading.Barrier(count)
        self.compile_s: list[float] = []
        self.timed_s: list[float] = []
        self.errors: Counter[str] = Counter()

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._count)]
        for thread in threads:
            thread.start()
        return threads

    def kill(self) -> None:
        for group in self._groups:
            group.kill()

    def _work(self) -> None:
        is_first = True
        while (recording := self._next_recording()) is not None:

            def start(recording: Recording = recording) -> WorkerGroup:
                variables = {"OMP_NUM_THREADS": "1"}
                group = WorkerGroup(1, self._fabric, recording.heap_bytes, _TIMEOUT_S, variables)
                self._groups.append(group)
                return group

            try:
                with Workers(start) as workers:
                    self._open(workers.group(), recording)
                    if is_first:  # making inputs takes the GPU from others
                        is_first = False
                        with contextlib.suppress(threading.BrokenBarrierError):
                            self._all_open.wait(_OPEN_S)
                    while jobs := self._next_jobs(recording):
                        self._try(workers, recording, jobs)
            except Exception as error:  # no worker can be started; another one may
                self.errors[f"{type(error).__name__}: {error}"[:300]] += 1
                self._all_open.abort()
                is_first = False
            finally:
                with self._jobs:
                    recording.workers -= 1

    def _next_recording(self) -> Recording | None:
        """The one with the most to measure for each of its workers."""
        if self._is_over or sum(self.errors.values()) > 100:
            return None
        with self._jobs:
            waiting = [
                each
                for each in self._recordings
                if len(each.jobs) > (_WORTH_A_WORKER if each.workers else 0)
            ]
            if not waiting:
                return None
            found = max(waiting, key=lambda each: each.to_measure / (each.workers + 1))
            found.workers += 1
            return found

    def _next_jobs(self, recording: Recording) -> list[Job]:
        with self._jobs:
            count = 0 if self._is_over else min(_BATCH, len(recording.jobs))
            return [recording.jobs.popleft() for _ in range(count)]

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._end - _LAST_BATCH_S

    def _try(self, workers: Workers, recording: Recording, jobs: list[Job]) -> None:
        """Record jobs; where a worker is lost, each of them alone."""
        try:
            found = self._measured(workers.group(), recording, jobs)
        except TaxfreeError as error:
            self.errors[error.message[:200]] += 1
            if len(jobs) > 1:
                for job in jobs:
                    if not self._is_over:
                        self._try(workers, recording, [job])
                return
            found = [[f"ends its worker: {error.message[:200]}"] * len(jobs[0][1])]
        for (candidate, indices), times in zip(jobs, found, strict=True):
            for at, each in zip(indices, times, strict=True):
                recording.found[at][key(candidate)] = each

    def _open(self, group: WorkerGroup, recording: Recording) -> None:
        problems = [dataclasses.asdict(problem) for problem in recording.problems]
        group.call(
            ranks.open_all, _OPEN_S, op=recording.op, problems=problems,
            arena_bytes=recording.arena_bytes,
        )  # fmt: skip

    def _measured(
        self, group: WorkerGroup, recording: Recording, jobs: list[Job]
    ) -> list[list[ranks.Found]]:
        self._open(group, recording)
        begun = time.monotonic()
        group.call(ranks.compile_all, _COMPILE_S, jobs=jobs)
        compiled = time.monotonic()
        with self._gpu:
            free = time.monotonic()
            found: list[list[ranks.Found]] = group.call(ranks.time_all, _TIME_S, jobs=jobs)[0]
            self.timed_s.append((time.monotonic() - free) / sum(len(at) for _, at in jobs))
        self.compile_s.append((compiled - begun) / len(jobs))
        return found


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fabric", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--workers", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=positive, help="configs of each landscape")
    parser.add_argument("--op", action="append", help="only this one; repeatable")
    options = parser.parse_args()
    return exit_code(lambda: _record(options))


def _record(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.budget
    fabric = devices.fabric_for(options.fabric)
    devices.require(fabric, 1)
    with WorkerGroup(1, fabric, arena_bytes(1 << 20), _TIMEOUT_S) as group:
        hardware = group.hardware
    machine = environment.record(fabric, hardware)
    by_op: dict[str, list[Subject]] = {}
    for subject in SUBJECTS:
        by_op.setdefault(subject.op, []).append(subject)
    recordings = [
        Recording(subjects, hardware, options.limit)
        for op, subjects in by_op.items()
        if not options.op or op in options.op
    ]
    crew = Crew(fabric, recordings, options.workers, end)
    threads = crew.start()
    folder = options.out / machine_name(hardware.name)

    def keep() -> None:
        for recording in recordings:
            for at, subject in enumerate(recording.subjects):
                text = recording.document(at, hardware, machine)
                write(folder / f"{subject.name}.json", text)

    written = time.monotonic()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        time.sleep(0.5)
        if time.monotonic() > written + _WRITTEN_EVERY_S:
            keep()
            written = time.monotonic()
            left = {recording.op: recording.to_measure for recording in recordings}
            print(f"{end - written:.0f} s left; to measure: {left}", flush=True)
    keep()
    _tell(recordings, crew)
    print(f"errors: {dict(crew.errors)}", flush=True)
    crew.kill()
    os._exit(0)  # threads may wait for a worker that is late


def _tell(recordings: Sequence[Recording], crew: Crew) -> None:
    for recording in recordings:
        for subject, found in zip(recording.subjects, list(recording.found), strict=True):
            states = Counter(
                each.partition(":")[0][:40] if isinstance(each, str) else "measured"
                for each in list(found.values())
            )
            best = min((us for us in list(found.values()) if not isinstance(us, str)), default=0.0)
            print(f"{subject.name}: {len(recording.jobs)} left, best {best:.1f} us, {dict(states)}")
    if crew.compile_s:
        compiling, timing = statistics.mean(crew.compile_s), statistics.mean(crew.timed_s)
        print(f"{compiling:.2f} s to compile, {1e3 * timing:.0f} ms to time", flush=True)


if __name__ == "__main__":
    sys.exit(main())
