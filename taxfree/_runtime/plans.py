"""Plans of a runtime: what serves a problem of which size, and how all ranks make it together.

Sizes are rows, or sequences. They are planned in buckets, which end at the sizes on record and at
the powers of two. The plan of a bucket is made for its largest size: a call of a recorded size runs
exactly what was measured, and one of a size below it the same config, with fewer rows.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from taxfree._runtime import collectives, lending
from taxfree._runtime.collectives import Failure
from taxfree._runtime.dispatch import Choice, Dispatcher, Kind
from taxfree._runtime.legality import illegal_reason
from taxfree._runtime.ready import ready_plans
from taxfree.errors import TaxfreeError, UsageError, one_line
from taxfree.fingerprints import capacity_field, rows_field
from taxfree_kernels.fabric.base import Fabric, Workspace
from taxfree_kernels.launch import Kernel
from taxfree_kernels.meta import meta_tensors
from taxfree_kernels.variant import Plan, Problem, Ready, SizeRange, op_of, resized, variants
from taxfree_tuning_db import Record

BASELINE = "baseline"


@dataclass(frozen=True)
class Bucket:
    """Sizes that are planned together.

    Args:
        problem: of the largest size.
        low: the smallest size.
    """

    problem: Problem
    low: int

    @property
    def high(self) -> int:
        """The largest size."""
        return rows_of(self.problem)

    @property
    def sizes(self) -> range:
        return range(self.low, self.high + 1)

    def of(self, size: int) -> Problem:
        """The problem of a size."""
        problem: Problem = resized(self.problem, **{rows_field(op_of(self.problem)): size})
        return problem


@dataclass
class Entry:
    """The plans that serve calls of some sizes.

    Args:
        bucket: the sizes.
        choice: what, and why.
        plan: the choice.
        eager: takes its place outside of graph capture, if there is one.
        kernels: what is compiled for them, and for the other sizes of their plan.
        is_tuned: the largest of the sizes that share the plan was tuned.
        calls: how many there were.
    """

    bucket: Bucket
    choice: Choice
    plan: Ready
    eager: Ready | None = None
    kernels: frozenset[Any] = frozenset()
    is_tuned: bool = False
    calls: int = 0

    @property
    def plans(self) -> tuple[Ready, ...]:
        """For graphs and, if another runs there, for eager calls."""
        return (self.plan,) if self.eager is None else (self.plan, self.eager)

    def __str__(self) -> str:
        """The problem, with all sizes."""
        low, high, text = self.bucket.low, self.bucket.high, str(self.bucket.problem)
        name = rows_field(op_of(self.bucket.problem))
        return text if low == high else text.replace(f"({name}={high}", f"({name}={low}..{high}")


@dataclass
class _Part:
    """What this rank has made of a choice.

    Args:
        plan: None until it is ready.
        refused: sizes that the choice does not serve.
        kernels: what is compiled for the others.
    """

    plan: Ready | None = None
    refused: frozenset[int] = frozenset()
    kernels: frozenset[Any] = frozenset()


@dataclass
class _Made:
    """A bucket, and what this rank has made for it so far.

    Args:
        bucket, choice: what is planned.
        parts: of each mode, "graph" or "eager", that does not run the baseline; and the baseline's,
            as "library", if it is needed.
    """

    bucket: Bucket
    choice: Choice
    parts: dict[str, _Part] = field(default_factory=dict)

    @property
    def modes(self) -> dict[str, Choice]:
        """The choice in graphs and, if it differs, in eager calls."""
        eager = self.choice.eager
        return {"graph": self.choice} if eager is None else {"graph": self.choice, "eager": eager}

    @property
    def ours(self) -> list[tuple[_Made, str, Choice]]:
        """The modes that do not run the baseline."""
        return [
            (self, mode, choice)
            for mode, choice in self.modes.items()
            if choice.variant != BASELINE
        ]

    @property
    def refused(self) -> set[int]:
        """Sizes that the library serves, because a choice does not."""
        return {size for _, mode, _ in self.ours for size in self.parts[mode].refused}

    @property
    def needs_trial(self) -> bool:
        """Whether another device lent it, and it is not the baseline."""
        return self.choice.kind == "lent" and bool(self.ours)

    @property
    def needs_library(self) -> bool:
        return self.needs_trial or bool(self.refused) or len(self.ours) < len(self.modes)

    def part(self, mode: str) -> _Part:
        """What serves a mode."""
        return self.parts["library" if self.modes[mode].variant == BASELINE else mode]

    @property
    def kernels(self) -> frozenset[Any]:
        """What is compiled for the sizes."""
        library = [self.parts["library"]] if self.refused else []
        return frozenset().union(
            *(part.kernels for part in (*library, *map(self.part, self.modes)))
        )

    @property
    def tried(self) -> list[tuple[Choice, _Part]]:
        """The library and ours, to be tried beside each other."""
        ours = [(choice, self.parts[mode]) for _, mode, choice in self.ours]
        return [(Choice("baseline", BASELINE), self.parts["library"]), *ours]

    def settle(self, choice: Choice) -> None:
        """Run what was the fastest of those that were tried."""

        def tried(wanted: Choice) -> _Part:
            key = wanted.variant, wanted.config
            return next(
                part for choice, part in self.tried if (choice.variant, choice.config) == key
            )

        parts = {mode: tried(choice.of(mode)) for mode in ("graph", "eager")}
        self.choice = choice
        self.parts |= parts

    def fall_back(self, kind: Kind, why: str) -> None:
        """Let the library serve the bucket, with a warning that says why."""
        warnings.warn(
            f"{self.bucket.problem} runs the library: {why}", RuntimeWarning, stacklevel=6
        )
        self.choice, self.parts = Choice(kind, BASELINE, why=why), {}


class Plans:
    """All plans of a runtime.

    Args:
        fabric: the ranks.
        dispatcher: chooses what is planned.
        keep: stores the records of what was tried, on one rank.
    """

    def __init__(
        self, fabric: Fabric, dispatcher: Dispatcher, keep: lending.Keep | None = None
    ) -> None:
        self._fabric, self._dispatcher, self._keep = fabric, dispatcher, keep
        self._entries: dict[Any, list[Entry | None]] = {}  # by family, then by size
        self._replaced: dict[int, Entry] = {}  # by id; captured graphs may hold their addresses

    def __iter__(self) -> Iterator[Entry]:
        """Each entry once, with those that were replaced."""
        distinct = {
            id(entry): entry
            for entries in list(self._entries.values())
            for entry in entries
            if entry
        }
        return iter((distinct | self._replaced).values())

    def clear(self) -> None:
        """Forget all."""
        for entries in self._entries.values():
            entries.clear()  # a runtime holds these lists
        self._entries.clear()
        self._replaced.clear()

    def by_size(self, problem: Problem) -> list[Entry | None]:
        """The entries of all sizes of a problem; it grows as sizes are planned."""
        return self._entries.setdefault(self._family(problem), [])

    def find(self, problem: Problem) -> Entry | None:
        """The entry of a problem, if it has been planned."""
        entries, size = self.by_size(problem), rows_of(problem)
        return entries[size] if size < len(entries) else None

    def is_tuned(self, problem: Problem) -> bool:
        """Whether the largest problem that is planned with this one was tuned."""
        answer = self._dispatcher.answer(op_of(problem), self.bucket(problem).problem)
        return answer.kind == "exact" and answer.record is not None and not answer.record.lender

    def untuned(self, ranges: Iterable[SizeRange]) -> Iterator[Problem]:
        """Problems whose records would serve all sizes of the ranges that were not tuned yet."""
        for sizes in ranges:
            name = rows_field(op_of(sizes.problem))
            first, last = sizes.bounds
            size = max(first, 1)
            while size <= last:
                problem = resized(sizes.problem, **{name: size})
                high = self.bucket(problem).high
                if not self.is_tuned(problem):
                    high = min(high, last, 1 << (size - 1).bit_length())
                    yield resized(problem, **{name: high})
                size = high + 1

    def choice(self, problem: Problem) -> Choice:
        """The variant that runs, or would run, for a problem, and why."""
        entry = self.find(problem)
        if entry is not None:
            return entry.choice
        bucket = self.bucket(problem)
        choice = self._dispatcher.choose(op_of(problem), bucket.problem)
        return choice if problem == bucket.problem else _below(choice, bucket)

    def measured_us(self, problem: Problem) -> dict[str, tuple[float, float]]:
        """By mode, the times of the library and of the choice; none without a record of both."""
        choice, op = self.choice(problem), op_of(problem)
        record = self._dispatcher.answer(op, self.bucket(problem).problem).record
        if record is None:
            return {}
        times = {
            (measurement.variant, mode, *measurement.config.items()): us
            for measurement in (*record.runners_up, record.winner, record.baseline)
            for mode, us in measurement.median_us.items()
        }
        library = record.baseline.median_us
        ours = {
            mode: times.get((choice.of(mode).variant, mode, *choice.of(mode).config.items()))
            for mode in library
        }
        both = {mode: (us, of_us) for mode, us in library.items() if (of_us := ours[mode])}
        return both if len(both) == len(library) else {}

    def kernels(self) -> dict[str, int]:
        """How many kernels are compiled for the sizes of each operation."""
        counts = {
            (op_of(entry.bucket.problem), kernel) for entry in self for kernel in entry.kernels
        }
        return dict(Counter(op for op, _ in counts))

    def buckets(self, sizes: SizeRange) -> dict[Problem, Bucket]:
        """The buckets that hold some of these sizes, each by the problem of the first such size."""
        first, last = sizes.bounds
        size, buckets = max(first, 1), {}  # calls without rows need no plan
        while size <= last:
            problem = resized(sizes.problem, **{rows_field(op_of(sizes.problem)): size})
            buckets[problem] = self.bucket(problem)
            size = buckets[problem].high + 1
        return buckets

    def _family(self, problem: Problem) -> Any:
        """A problem without rows; the keys that it has room for are those of its bucket."""
        op = op_of(problem)
        return resized(problem, **{rows_field(op): 0}, **self._capacity(op, problem))

    def bucket(self, problem: Problem) -> Bucket:
        """The sizes that are planned together with that of a problem."""
        op = op_of(problem)
        name = rows_field(op)
        low, high = self._dispatcher.bounds(op, problem, name)
        return Bucket(resized(problem, **{name: high}, **self._capacity(op, problem)), low)

    def _capacity(self, op: str, problem: Problem) -> dict[str, int]:
        name = capacity_field(op)
        return {} if name is None else {name: self._dispatcher.bounds(op, problem, name)[1]}

    # -- planning ----------------------------------------------------------------------------

    def prepare(self, buckets: Mapping[Problem, Bucket], called: Problem | None = None) -> None:
        """Plan the buckets of problems that are not planned yet; collective.

        All ranks vote on what they plan. Each then makes and compiles it without its peers, and all
        vote again: what one rank cannot run runs on none.

        Args:
            buckets: of problems that are the same on all ranks.
            called: the problem of a call that all ranks make.

        Raises:
            UsageError: ranks give different problems.
            TaxfreeError: a rank cannot even run the library's path.
            NoRecord: with ``TAXFREE_STRICT``, a problem has no record of its own.
            PeerTimeout: not all ranks call this.
        """
        missing = sorted((bucket for bucket in buckets if self.find(bucket) is None), key=repr)
        wanted = dict.fromkeys(buckets[size] for size in missing)
        made = [
            _Made(bucket, self._dispatcher.choose(op_of(bucket.problem), bucket.problem))
            for bucket in sorted(wanted, key=lambda bucket: -bucket.high)  # scratch grows only once
        ]
        self._agree(missing, called, made)
        self._add_ours([step for entry in made for step in entry.ours])
        self._add_library([entry for entry in made if entry.needs_library])
        if self._dispatcher.settings.verify:
            self._try_lent([entry for entry in made if entry.needs_trial])
        for entry in made:
            self._enter(entry)

    def renew(self, records: Collection[Record]) -> None:
        """Plan by new records, the same on all ranks, what was not tuned yet; collective."""
        self._dispatcher.add(records)
        ops, wanted = {record.op for record in records}, dict[Problem, Bucket]()
        for entries in self._entries.values():
            high = 0
            for size, entry in enumerate(entries):
                if entry is None or entry.is_tuned or op_of(entry.bucket.problem) not in ops:
                    continue
                self._replace(entries, size)
                if size > high:
                    problem = entry.bucket.of(size)
                    wanted[problem] = self.bucket(problem)
                    high = wanted[problem].high
        self.prepare(wanted)

    def _replace(self, entries: list[Entry | None], size: int, by: Entry | None = None) -> None:
        old = entries[size]
        if old is not None:
            self._replaced[id(old)] = old
        entries[size] = by

    def unprepared(self, problem: Problem, why: str) -> Entry:
        """The library's path for a call that all ranks make unplanned; nothing of it is kept.

        It has scratch memory of its own: under graph capture, memory is the graph's.
        """
        alone = copy.copy(self._fabric)
        alone.__dict__["workspace"] = Workspace(self._fabric.device, has_pool=False)
        plan = Ready(variants(op_of(problem))[BASELINE].plan(problem, alone, {}))
        choice = Choice("unprepared", BASELINE, why=why)
        bucket, is_tuned = Bucket(problem, rows_of(problem)), self.is_tuned(problem)
        return Entry(bucket, choice, plan, is_tuned=is_tuned)

    def _agree(self, missing: list[Problem], called: Problem | None, made: list[_Made]) -> None:
        """Vote on what is planned; where ranks choose differently, the library runs.

        Raises:
            UsageError: ranks give different problems.
        """
        told = [(entry.bucket, list(entry.modes.items())) for entry in made]
        answers = collectives.vote(self._fabric.group, (missing, called, told))
        self._require_same_calls([(missing, called) for missing, called, _ in answers])
        for number, entry in enumerate(made):
            if any(theirs[number : number + 1] != [told[number]] for _, _, theirs in answers):
                why = "ranks choose differently: their records or their hardware differ"
                entry.fall_back("disabled", why)

    def _add_ours(self, steps: Sequence[tuple[_Made, str, Choice]]) -> None:
        """Make the choices ready; where one fails on a rank, the library serves its bucket."""
        plans = ready_plans(self._fabric, [partial(self._make, *step) for step in steps])
        for (made, mode, choice), plan in zip(steps, plans, strict=True):
            if made.modes.get(mode) is not choice:  # it has fallen back
                continue
            if isinstance(plan, Failure):
                made.fall_back("baseline", f"{choice.variant}: {plan.why}")
            else:
                made.parts[mode].plan = plan

    def _make(self, made: _Made, mode: str, choice: Choice) -> Plan:
        """Plan and compile a choice for the sizes that it serves, without the peers."""
        bucket, variant = made.bucket, variants(op_of(made.bucket.problem))[choice.variant]
        refused = frozenset(
            size
            for size in bucket.sizes[:-1]
            if illegal_reason(variant, bucket.of(size), self._fabric.hardware, choice.config)
            is not None
        )
        plan = variant.plan(bucket.problem, self._fabric, choice.config)
        served = (size for size in bucket.sizes if size not in refused)
        made.parts[mode] = _Part(None, refused, self._compile(plan, bucket, served))
        return plan

    def _compile(self, plan: Plan, bucket: Bucket, sizes: Iterable[int]) -> frozenset[Any]:
        """Compile all that calls of these sizes launch; what that is."""
        rank, architecture = self._fabric.rank, self._fabric.hardware.architecture
        first: dict[tuple[Any, ...], tuple[int, tuple[Kernel, ...]]] = {}  # of those compiled alike
        for size in sizes:
            kernels = plan.kernels(size)
            first.setdefault(tuple(kernel.specialization for kernel in kernels), (size, kernels))
        for size, _ in first.values():
            plan.compile(size, *meta_tensors(bucket.of(size), rank, architecture))
        return frozenset(
            (
                kernel.function,
                *kernel.constants.items(),
                *kernel.options.items(),
                *kernel.specialization,
            )
            for _, kernels in first.values()
            for kernel in kernels
        )

    def _require_same_calls(self, calls: Sequence[tuple[list[Problem], Problem | None]]) -> None:
        """Raise, on every rank, when one of them gives other problems."""

        def said(problems: list[Problem], called: Problem | None, others: list[Problem]) -> str:
            if called is not None:
                return f"calls with {called}"
            more = [problem for problem in problems if problem not in others]
            return f"prepares {more[0] if more else 'less'}"

        own_calls = calls[self._fabric.rank]
        for rank, theirs in enumerate(calls):
            if theirs != own_calls:
                raise UsageError(
                    f"rank {self._fabric.rank} {said(*own_calls, theirs[0])}, "
                    f"rank {rank} {said(*theirs, own_calls[0])}",
                    "all ranks make the same calls in the same order",
                )

    def _add_library(self, made: Sequence[_Made]) -> None:
        """Make the library's path where it is needed; collective if it is anywhere."""

        def make(entry: _Made) -> Plan:
            problem = entry.bucket.problem
            try:
                plan = variants(op_of(problem))[BASELINE].plan(problem, self._fabric, {})
                kernels = self._compile(plan, entry.bucket, entry.bucket.sizes)
            except Exception as error:
                raise TaxfreeError(
                    f"cannot run {problem} even by the library: {one_line(error)}"
                ) from error
            entry.parts["library"] = _Part(kernels=kernels)
            return plan

        plans = ready_plans(self._fabric, [partial(make, entry) for entry in made])
        for entry, plan in zip(made, plans, strict=True):
            if isinstance(plan, Failure):
                raise TaxfreeError(f"rank {plan.rank} {plan.why}", "is its memory exhausted?")
            entry.parts["library"].plan = plan

    def _try_lent(self, made: Sequence[_Made]) -> None:
        """Try lent choices beside the library, run what is faster, and keep it; collective."""
        records = []
        for entry in made:
            op, problem = op_of(entry.bucket.problem), entry.bucket.problem
            lent = self._dispatcher.answer(op, problem).record
            assert lent is not None
            plans = [(choice, part.plan) for choice, part in entry.tried if part.plan is not None]
            record = lending.tried(self._fabric, problem, lent, plans)
            if isinstance(record, str):
                entry.fall_back("baseline", f"{entry.choice.source}: {record}")
                self._add_library([entry])
            else:
                records.append(record)
                entry.settle(self._dispatcher.after_trial(entry.choice, problem, record))
        if records and self._keep is not None:
            self._keep(records)

    def _enter(self, made: _Made) -> None:
        """Let a bucket's sizes run what was made."""
        bucket, choice, kernels = made.bucket, made.choice, made.kernels
        entries = self.by_size(bucket.problem)
        entries.extend([None] * (bucket.high + 1 - len(entries)))
        plan, *eagers = (made.part(mode).plan for mode in made.modes)
        eager = eagers[0] if eagers else None
        assert plan is not None
        is_tuned = choice.kind == "exact" and not choice.lender
        last = Bucket(bucket.problem, bucket.high)
        self._replace(entries, bucket.high, Entry(last, choice, plan, eager, kernels, is_tuned))
        if bucket.low == bucket.high:
            return
        below = Bucket(bucket.of(bucket.high - 1), bucket.low)
        entry = Entry(below, _below(choice, bucket), plan, eager, kernels, is_tuned)
        for size in bucket.sizes[:-1]:
            self._replace(entries, size, entry)
        if made.refused:
            why = f"{choice.variant} {choice.config} does not serve this size"
            library = Choice("baseline", BASELINE, why=why)
            plan = made.parts["library"].plan
            assert plan is not None
            entry = Entry(below, library, plan, None, kernels)
            for size in made.refused:
                entries[size] = entry


def rows_of(problem: Problem) -> int:
    """The size of a problem: its rows, or sequences."""
    size: int = getattr(problem, rows_field(op_of(problem)))
    return size


def _below(choice: Choice, bucket: Bucket) -> Choice:
    """The choice for sizes below that of a bucket's record."""
    if choice.kind not in ("exact", "another version"):
        return choice
    name = rows_field(op_of(bucket.problem))
    why, eager = f"the record of {name}={bucket.high}", choice.eager
    if eager is not None:
        eager = dataclasses.replace(eager, kind="neighbour")
    return dataclasses.replace(choice, kind="neighbour", why=why, eager=eager)
