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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from taxfree._runtime.collectives import vote
from taxfree._runtime.dispatch import Choice, Dispatcher
from taxfree._runtime.legality import refusal
from taxfree.errors import TaxfreeError, UsageError, one_line
from taxfree.fingerprints import capacity_field, rows_field
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.workspace import Workspace
from taxfree_kernels.launch import compiling
from taxfree_kernels.meta import meta_tensors
from taxfree_kernels.variant import Plan, Problem, SizeRange, op_of, resized, variants

LIBRARY = "baseline"


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

    def of(self, size: int) -> Any:
        """The problem of a size."""
        return resized(self.problem, **{rows_field(op_of(self.problem)): size})


@dataclass
class Entry:
    """What the calls of some sizes run.

    Args:
        bucket: the sizes.
        choice: what, and why.
        plan: the choice, made ready.
        eager: takes its place outside of graph capture, if there is one.
        kernels: what is compiled for them, and for the other sizes of their plan.
        is_tuned: the largest of the sizes that share the plan has a record of its own.
        calls: how many there were.
    """

    bucket: Bucket
    choice: Choice
    plan: Plan
    eager: Plan | None = None
    kernels: frozenset[Any] = frozenset()
    is_tuned: bool = False
    calls: int = 0

    @property
    def plans(self) -> tuple[Plan, ...]:
        """For graphs and, if another runs there, for eager calls."""
        return (self.plan,) if self.eager is None else (self.plan, self.eager)

    def __str__(self) -> str:
        """The problem, with all sizes."""
        low, high, text = self.bucket.low, self.bucket.high, str(self.bucket.problem)
        name = rows_field(op_of(self.bucket.problem))
        return text if low == high else text.replace(f"({name}={high}", f"({name}={low}..{high}")


@dataclass
class _Made:
    """What a rank has made for a bucket, without its peers.

    Args:
        bucket, choice: what it is.
        refused: sizes that the choice does not serve.
        plans: for "graph" and perhaps for "eager" calls, where ours, and the "library" if needed.
        kernels: what is compiled for them.
        failure: why the choice cannot be made here, or None.
    """

    bucket: Bucket
    choice: Choice
    refused: frozenset[int]
    plans: dict[str, Plan] = field(default_factory=dict)
    kernels: set[Any] = field(default_factory=set)
    failure: str | None = None

    @property
    def runs(self) -> list[Any]:
        """What the calls of a rank run, for its peers."""
        return [self.bucket, *((each.variant, each.config) for each in _modes(self.choice))]

    @property
    def needs_library(self) -> bool:
        """Whether some calls run the library's path."""
        return bool(self.refused) or any(each.variant == LIBRARY for each in _modes(self.choice))

    def plan(self, mode: str, choice: Choice) -> Plan:
        """What a choice runs in a mode."""
        return self.plans["library" if choice.variant == LIBRARY else mode]

    def fall_back(self, choice: Choice) -> None:
        """Let the library serve the bucket, with a warning that says why."""
        warnings.warn(
            f"{self.bucket.problem} runs the baseline: {choice.why}", RuntimeWarning, stacklevel=6
        )
        self.choice, self.refused, self.plans, self.kernels = choice, frozenset(), {}, set()


class Plans:
    """All plans of a runtime.

    Args:
        fabric: the ranks.
        dispatcher: chooses what is planned.
    """

    def __init__(self, fabric: Fabric, dispatcher: Dispatcher) -> None:
        self._fabric, self._dispatcher = fabric, dispatcher
        self._entries: dict[Any, list[Entry | None]] = {}  # by family, then by size

    def __iter__(self) -> Iterator[Entry]:
        """Each entry once."""
        found = {
            id(each): each for entries in list(self._entries.values()) for each in entries if each
        }
        return iter(found.values())

    def clear(self) -> None:
        """Forget all."""
        for entries in self._entries.values():
            entries.clear()  # a runtime holds these lists
        self._entries.clear()

    def by_size(self, problem: Problem) -> list[Entry | None]:
        """The entries of all sizes of a problem; it grows as sizes are planned."""
        return self._entries.setdefault(self._family(problem), [])

    def find(self, problem: Problem) -> Entry | None:
        """What serves a problem, if it has been planned."""
        entries, size = self.by_size(problem), rows_of(problem)
        return entries[size] if size < len(entries) else None

    def choice(self, problem: Problem) -> Choice:
        """What runs, or would run, for a problem, and why."""
        entry = self.find(problem)
        if entry is not None:
            return entry.choice
        bucket = self.bucket(problem)
        choice = self._dispatcher.choose(op_of(problem), bucket.problem)
        return choice if problem == bucket.problem else _below(choice, bucket)

    def kernels(self) -> dict[str, int]:
        """How many kernels are compiled for the sizes of each operation."""
        found = {(op_of(entry.bucket.problem), each) for entry in self for each in entry.kernels}
        return dict(Counter(op for op, _ in found))

    def ends(self, sizes: SizeRange) -> Iterator[Any]:
        """A problem for each bucket that holds some of these sizes."""
        first, last = sizes.bounds
        size = max(first, 1)  # calls without rows need no plan
        while size <= last:
            problem = resized(sizes.problem, **{rows_field(op_of(sizes.problem)): size})
            yield problem
            size = self.bucket(problem).high + 1

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

    def prepare(self, problems: Iterable[Any], called: Any = None) -> None:
        """Plan the buckets of problems that are not planned yet; collective.

        Each rank first makes and compiles all it needs without its peers; then all vote. What one
        rank cannot run runs on none.

        Args:
            problems: the same on all ranks.
            called: the problem of a call that all ranks make.

        Raises:
            UsageError: ranks come with different problems.
            TaxfreeError: a rank cannot even run the library's path.
            NoRecord: with ``TAXFREE_STRICT``, a problem has no record of its own.
            PeerTimeout: not all ranks have come.
        """
        missing = sorted({each for each in problems if self.find(each) is None}, key=repr)
        buckets = {self.bucket(each): None for each in missing}
        made = [
            self._make(bucket, self._dispatcher.choose(op_of(bucket.problem), bucket.problem))
            for bucket in sorted(buckets, key=lambda each: -each.high)  # scratch grows only once
        ]
        told = [(each.runs, each.failure) for each in made]
        answers = vote(self._fabric.group, (missing, called, told))
        self._require_same_calls([(missing, called) for missing, called, _ in answers])
        for number, each in enumerate(made):
            self._settle(each, [told[number : number + 1] for _, _, told in answers])
        self._connect(made)
        self._add_library([each for each in made if each.needs_library])
        for each in made:
            self._enter(each)

    def unprepared(self, problem: Problem, why: str) -> Entry:
        """The library's path for a call that all ranks make unplanned; nothing of it is kept.

        It has scratch memory of its own: under graph capture, memory is the graph's.
        """
        alone = copy.copy(self._fabric)
        alone.__dict__["workspace"] = Workspace(self._fabric.device, has_pool=False)
        plan = variants(op_of(problem))[LIBRARY].plan(problem, alone, {})
        choice = Choice("unprepared", LIBRARY, why=why)
        record = self._dispatcher.look_up(op_of(problem), self.bucket(problem).problem)
        is_tuned = record.kind == "exact"
        return Entry(Bucket(problem, rows_of(problem)), choice, plan, is_tuned=is_tuned)

    def _make(self, bucket: Bucket, choice: Choice) -> _Made:
        """What this rank can make of a choice without its peers."""
        made, known = (
            _Made(bucket, choice, self._refused(bucket, choice)),
            variants(op_of(bucket.problem)),
        )
        served = [size for size in bucket.sizes if size not in made.refused]
        for mode, each in zip(("graph", "eager"), _modes(choice), strict=False):
            try:
                if each.variant != LIBRARY:
                    plan = known[each.variant].plan(bucket.problem, self._fabric, each.config)
                    made.kernels |= self._compile(plan, bucket, served)
                    made.plans[mode] = plan
            except Exception as error:  # whatever a compiler raises: the peers wait for the vote
                made.failure = f"{each.variant}: {one_line(error)}"
        return made

    def _refused(self, bucket: Bucket, choice: Choice) -> frozenset[int]:
        """The sizes of a bucket, but for the largest, that a choice does not serve."""
        known, hardware = variants(op_of(bucket.problem)), self._fabric.hardware
        return frozenset(
            size
            for mode in _modes(choice)
            if mode.variant != LIBRARY
            for size in bucket.sizes[:-1]
            if refusal(known[mode.variant], bucket.of(size), hardware, mode.config) is not None
        )

    def _compile(self, plan: Plan, bucket: Bucket, sizes: Iterable[int]) -> set[Any]:
        """Compile all that calls of these sizes launch; what that is."""
        first: dict[tuple[Any, ...], int] = {}  # size of each set of compiled kernels
        for size in sizes:
            kernels = plan.kernels(size)
            if not kernels:
                return set()
            first.setdefault(tuple(each.specialization for each in kernels), size)
        with compiling():
            for size in first.values():
                plan(*meta_tensors(bucket.of(size), self._fabric.rank))
        return {
            (each.function, *each.constants.items(), *each.options.items(), *each.specialization)
            for size in first.values()
            for each in plan.kernels(size)
        }

    def _require_same_calls(self, calls: Sequence[tuple[list[Any], Any]]) -> None:
        """Raise, on every rank, when one of them has come with other problems."""

        def said(problems: list[Any], called: Any, others: list[Any]) -> str:
            if called is not None:
                return f"calls with {called}"
            return f"prepares {next((each for each in problems if each not in others), 'less')}"

        own = calls[self._fabric.rank]
        for rank, theirs in enumerate(calls):
            if theirs != own:
                raise UsageError(
                    f"rank {self._fabric.rank} {said(*own, theirs[0])}, "
                    f"rank {rank} {said(*theirs, own[0])}",
                    "all ranks make the same calls in the same order",
                )

    def _settle(self, made: _Made, told: Sequence[list[Any]]) -> None:
        """Keep the choice if all ranks have made it and can run it.

        Args:
            told: by rank, what it runs here, and why it cannot, if it has told anything.
        """
        failures = [failure for each in told for _, failure in each if failure is not None]
        if any([runs for runs, _ in each] != [made.runs] for each in told):
            why = "ranks choose differently: their records or their hardware differ"
            made.fall_back(Choice("disabled", LIBRARY, why=why))
        elif failures:
            made.fall_back(Choice("baseline", LIBRARY, why=failures[0]))

    def _connect(self, made: Sequence[_Made]) -> None:
        """Do what plans do once with all peers; where that fails on a rank, fall back on all."""
        failures: list[str | None] = [None] * len(made)
        connecting = [
            (number, mode, plan)
            for number, each in enumerate(made)
            for mode, plan in each.plans.items()
            if type(plan).connect is not Plan.connect
        ]
        for number, mode, plan in connecting:
            try:
                plan.connect()
            except Exception as error:  # whatever a library raises
                variant = made[number].choice.of(mode).variant
                failures[number] = failures[number] or f"{variant}: {one_line(error)}"
        if not connecting:
            return
        for each, told in zip(
            made, zip(*vote(self._fabric.group, failures), strict=True), strict=True
        ):
            reason = next(filter(None, told), None)
            if reason is not None:
                each.fall_back(Choice("baseline", LIBRARY, why=reason))

    def _add_library(self, made: Sequence[_Made]) -> None:
        """Make the library's path where it is needed; collective if it is anywhere."""
        failure: str | None = None
        for each in made:
            try:
                known = variants(op_of(each.bucket.problem))
                plan = known[LIBRARY].plan(each.bucket.problem, self._fabric, {})
                each.kernels |= self._compile(plan, each.bucket, each.bucket.sizes)
                each.plans["library"] = plan
            except Exception as error:  # the peers wait for the vote
                failure = f"cannot run {each.bucket.problem} even by the library: {one_line(error)}"
        if not made:
            return
        for rank, told in enumerate(vote(self._fabric.group, failure)):
            if told is not None:
                raise TaxfreeError(f"rank {rank} {told}", "is its memory exhausted?")

    def _enter(self, made: _Made) -> None:
        """Let a bucket's sizes run what was made."""
        bucket, choice, kernels = made.bucket, made.choice, frozenset(made.kernels)
        entries = self.by_size(bucket.problem)
        entries.extend([None] * (bucket.high + 1 - len(entries)))
        plan, eager = made.plan("graph", choice), None
        if choice.eager is not None:
            eager = made.plan("eager", choice.eager)
        is_tuned = choice.kind == "exact"
        last = Bucket(bucket.problem, bucket.high)
        entries[bucket.high] = Entry(last, choice, plan, eager, kernels, is_tuned)
        if bucket.low == bucket.high:
            return
        below = Bucket(bucket.of(bucket.high - 1), bucket.low)
        entry = Entry(below, _below(choice, bucket), plan, eager, kernels, is_tuned)
        entries[bucket.low : bucket.high] = [entry] * (bucket.high - bucket.low)
        if made.refused:
            why = f"{choice.variant} {choice.config} does not serve this size"
            library = Choice("baseline", LIBRARY, why=why)
            entry = Entry(below, library, made.plans["library"], None, kernels)
            for size in made.refused:
                entries[size] = entry


def rows_of(problem: Problem) -> int:
    """The size of a problem: its rows, or sequences."""
    size: int = getattr(problem, rows_field(op_of(problem)))
    return size


def _modes(choice: Choice) -> list[Choice]:
    """What a choice runs in graphs and, if that is something else, in eager calls."""
    return [choice] if choice.eager is None else [choice, choice.eager]


def _below(choice: Choice, bucket: Bucket) -> Choice:
    """The choice for sizes below that of a bucket's record."""
    if choice.kind != "exact":
        return choice
    name = rows_field(op_of(bucket.problem))
    why, eager = f"the record of {name}={bucket.high}", choice.eager
    if eager is not None:
        eager = dataclasses.replace(eager, kind="neighbour")
    return dataclasses.replace(choice, kind="neighbour", why=why, eager=eager)
