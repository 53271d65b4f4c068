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

from taxfree.collectives import vote
from taxfree.dispatch import Choice, Dispatcher
from taxfree.errors import TaxfreeError, UsageError, one_line
from taxfree.identity import capacity_field, rows_field
from taxfree.legality import refusal
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.fabric.workspace import Workspace
from taxfree_kernels.launch import compiling
from taxfree_kernels.meta import meta_tensors
from taxfree_kernels.variant import Plan, SizeRange, op_of, resized, variants

LIBRARY = "baseline"


@dataclass(frozen=True)
class Bucket:
    """Sizes that are planned together.

    Args:
        problem: of the largest size.
        low: the smallest size.
    """

    problem: Any
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
        is_tuned: the largest of the sizes that share the plan has a record of its own.
        calls: how many there were.
    """

    bucket: Bucket
    choice: Choice
    plan: Plan
    eager: Plan | None = None
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
        choice: what it is.
        plans: those of the choice, for graphs and perhaps for eager calls.
        library: the library's path, for sizes and ranks that cannot run the choice.
        refused: sizes that the choice does not serve.
        failure, library_failure: why the one or the other cannot be made here, or None.
    """

    choice: Choice
    plans: list[Plan] = field(default_factory=list)
    library: Plan | None = None
    refused: frozenset[int] = frozenset()
    failure: str | None = None
    library_failure: str | None = None

    @property
    def told(self) -> tuple[Any, ...]:
        """What the peers are told."""
        runs = [(each.variant, each.config) for each in _modes(self.choice)]
        return runs, self.failure, self.library_failure


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
        found = {id(each): each for entries in self._entries.values() for each in entries if each}
        return iter(found.values())

    def clear(self) -> None:
        """Forget all."""
        for entries in self._entries.values():
            entries.clear()  # a runtime holds these lists
        self._entries.clear()

    def by_size(self, problem: Any) -> list[Entry | None]:
        """The entries of all sizes of a problem; it grows as sizes are planned."""
        return self._entries.setdefault(self._family(problem), [])

    def find(self, problem: Any) -> Entry | None:
        """What serves a problem, if it has been planned."""
        entries, size = self.by_size(problem), rows_of(problem)
        return entries[size] if size < len(entries) else None

    def choice(self, problem: Any) -> Choice:
        """What runs, or would run, for a problem, and why."""
        entry = self.find(problem)
        if entry is not None:
            return entry.choice
        bucket = self._bucket(problem)
        choice = self._dispatcher.choose(op_of(problem), bucket.problem)
        return choice if problem == bucket.problem else _below(choice, bucket)

    def kernels(self) -> dict[str, int]:
        """How many compiled kernels the sizes of each operation launch."""
        found = {
            (op_of(entry.bucket.problem), kernel.function, *kernel.constants.items(),
             *kernel.options.items(), *kernel.specialization)
            for entry in self
            for plan in entry.plans
            for size in _representatives(plan, entry.bucket.sizes)
            for kernel in plan.kernels(size)
        }  # fmt: skip
        return dict(Counter(op for op, *_ in found))

    def ends(self, sizes: SizeRange) -> Iterator[Any]:
        """A problem for each bucket that holds some of these sizes."""
        first, last = sizes.bounds
        size = max(first, 1)  # calls without rows need no plan
        while size <= last:
            problem = resized(sizes.problem, **{rows_field(op_of(sizes.problem)): size})
            yield problem
            size = self._bucket(problem).high + 1

    def _family(self, problem: Any) -> Any:
        """A problem without rows; the keys that it has room for are those of its bucket."""
        op = op_of(problem)
        return resized(problem, **{rows_field(op): 0}, **self._capacity(op, problem))

    def _bucket(self, problem: Any) -> Bucket:
        op = op_of(problem)
        name = rows_field(op)
        low, high = self._dispatcher.bounds(op, problem, name)
        return Bucket(resized(problem, **{name: high}, **self._capacity(op, problem)), low)

    def _capacity(self, op: str, problem: Any) -> dict[str, int]:
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
        missing = [each for each in problems if self.find(each) is None]
        wanted = {self._bucket(each): None for each in missing}
        buckets = sorted(wanted, key=lambda each: -each.high)  # scratch memory grows only once
        chosen = [self._dispatcher.choose(op_of(each.problem), each.problem) for each in buckets]
        made = [self._make(*each) for each in zip(buckets, chosen, strict=True)]
        told = [(bucket, *each.told) for bucket, each in zip(buckets, made, strict=True)]
        answers = vote(self._fabric.group, (missing, called, told))
        self._require_same_calls([(missing, called) for missing, called, _ in answers])
        for number, (bucket, each) in enumerate(zip(buckets, made, strict=True)):
            self._settle(bucket, each, [told[number : number + 1] for _, _, told in answers])
        self._connect(buckets, made)
        for bucket, each in zip(buckets, made, strict=True):
            self._enter(bucket, each)

    def unprepared(self, problem: Any, why: str) -> Entry:
        """The library's path for a call that all ranks make unplanned; nothing of it is kept.

        It has scratch memory of its own: under graph capture, memory is the graph's.
        """
        alone = copy.copy(self._fabric)
        alone.__dict__["workspace"] = Workspace(self._fabric.device, has_pool=False)
        plan = variants(op_of(problem))[LIBRARY].plan(problem, alone, {})
        choice = Choice("unprepared", LIBRARY, why=why)
        record = self._dispatcher.look_up(op_of(problem), self._bucket(problem).problem)
        is_tuned = record.kind == "exact"
        return Entry(Bucket(problem, rows_of(problem)), choice, plan, is_tuned=is_tuned)

    def _make(self, bucket: Bucket, choice: Choice) -> _Made:
        """What this rank can make without its peers."""
        made, known = _Made(choice), variants(op_of(bucket.problem))
        made.refused = self._refused(bucket, choice)
        served = [size for size in bucket.sizes if size not in made.refused]
        try:
            made.library = known[LIBRARY].plan(bucket.problem, self._fabric, {})
            if made.refused or any(mode.variant == LIBRARY for mode in _modes(choice)):
                self._compile(made.library, bucket, bucket.sizes)
        except Exception as error:  # the peers must not wait for this rank's vote
            made.library_failure = one_line(error)
        for mode in _modes(choice):
            plan = made.library
            try:
                if mode.variant != LIBRARY:
                    plan = known[mode.variant].plan(bucket.problem, self._fabric, mode.config)
                    self._compile(plan, bucket, served)
            except Exception as error:  # whatever a compiler raises
                made.failure = f"{mode.variant}: {one_line(error)}"
            if plan is not None:
                made.plans.append(plan)
        return made

    def _refused(self, bucket: Bucket, choice: Choice) -> frozenset[int]:
        """The sizes of a bucket, but for the largest, that a choice does not serve."""
        known, hardware = variants(op_of(bucket.problem)), self._fabric.hardware
        return frozenset(
            size
            for mode in _modes(choice)
            for size in bucket.sizes[:-1]
            if refusal(known[mode.variant], bucket.of(size), hardware, mode.config) is not None
        )

    def _compile(self, plan: Plan, bucket: Bucket, sizes: Sequence[int]) -> None:
        """Compile all that calls of these sizes launch."""
        with compiling():
            for size in _representatives(plan, sizes):
                plan(*meta_tensors(bucket.of(size), self._fabric.rank))

    def _require_same_calls(self, calls: Sequence[tuple[list[Any], Any]]) -> None:
        """Raise, on every rank, when one of them has come with other problems."""
        own = calls[self._fabric.rank]
        for rank, theirs in enumerate(calls):
            if theirs != own:
                (mine, my_call), (others, their_call) = own, theirs
                first = my_call or next((each for each in mine if each not in others), "less")
                second = their_call or next((each for each in others if each not in mine), "less")
                raise UsageError(
                    f"rank {self._fabric.rank} calls with {first}, rank {rank} with {second}",
                    "all ranks make the same calls in the same order",
                )

    def _settle(self, bucket: Bucket, made: _Made, told: Sequence[list[Any]]) -> None:
        """Keep the choice if all ranks can run it, else take the library's path.

        Args:
            told: by rank, what it has told of this bucket: sizes, runs and failures, if anything.
        """
        alike = [each for each in told if each and each[0][:2] == (bucket, made.told[0])]
        failures = [each[0][2] for each in alike if each[0][2] is not None]
        if len(alike) < len(told):
            why = "ranks choose differently: their records or their hardware differ"
            self._fall_back(bucket, made, Choice("disabled", LIBRARY, why=why))
        elif failures:
            self._fall_back(bucket, made, Choice("baseline", LIBRARY, why=failures[0]))
        elif not made.refused and all(mode.variant != LIBRARY for mode in _modes(made.choice)):
            return
        for rank, each in enumerate(told):
            if each and each[0][3] is not None:
                raise TaxfreeError(
                    f"rank {rank} cannot run {bucket.problem} even by the library: {each[0][3]}",
                    "is its memory exhausted?",
                )

    def _fall_back(self, bucket: Bucket, made: _Made, choice: Choice) -> None:
        """Let the library serve a bucket, with a warning that says why."""
        warnings.warn(
            f"{bucket.problem} runs the baseline: {choice.why}", RuntimeWarning, stacklevel=6
        )
        made.choice, made.refused, made.plans = choice, frozenset(), []
        if made.library is not None:
            made.plans = [made.library]

    def _connect(self, buckets: Sequence[Bucket], made: Sequence[_Made]) -> None:
        """Do what plans do once with all peers; where that fails on a rank, fall back on all."""
        failures: list[str | None] = [None] * len(made)
        connecting = [
            (number, plan)
            for number, each in enumerate(made)
            for plan in each.plans
            if type(plan).connect is not Plan.connect
        ]
        for number, plan in connecting:
            try:
                plan.connect()
            except Exception as error:  # whatever a library raises
                failures[number] = failures[number] or one_line(error)
        if not connecting:
            return
        for number, told in enumerate(zip(*vote(self._fabric.group, failures), strict=True)):
            reason = next(filter(None, told), None)
            if reason is not None:
                choice = Choice("baseline", LIBRARY, why=f"{made[number].choice.variant}: {reason}")
                self._fall_back(buckets[number], made[number], choice)

    def _enter(self, bucket: Bucket, made: _Made) -> None:
        """Let a bucket's sizes run what was made."""
        entries = self.by_size(bucket.problem)
        entries.extend([None] * (bucket.high + 1 - len(entries)))
        plan, eager = made.plans[0], made.plans[-1] if len(made.plans) > 1 else None
        choice, last = made.choice, Bucket(bucket.problem, bucket.high)
        is_tuned = choice.kind == "exact"
        entries[bucket.high] = Entry(last, choice, plan, eager, is_tuned)
        if bucket.low == bucket.high:
            return
        below = Bucket(bucket.of(bucket.high - 1), bucket.low)
        entry = Entry(below, _below(choice, bucket), plan, eager, is_tuned)
        entries[bucket.low : bucket.high] = [entry] * (bucket.high - bucket.low)
        if made.refused:
            assert made.library is not None
            why = f"{choice.variant} {choice.config} does not serve this size"
            library = Entry(below, Choice("baseline", LIBRARY, why=why), made.library)
            for size in made.refused:
                entries[size] = library


def rows_of(problem: Any) -> int:
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


def _representatives(plan: Plan, sizes: Iterable[int]) -> list[int]:
    """One size for each set of compiled kernels that calls of these sizes launch."""
    found: dict[tuple[Any, ...], int] = {}
    for size in sizes:
        kernels = plan.kernels(size)
        if not kernels:
            return []
        found.setdefault(tuple(each.specialization for each in kernels), size)
    return list(found.values())
