"""Look-up: the record that serves a problem, and the steps that led to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias

from .records import (
    HardwareFingerprint,
    Record,
    Scalar,
    SoftwareFingerprint,
    record_key,
    stale_reason,
)

_KNOWN = "a known variant"
_RUNS = "a config that runs this problem"
LIBRARY_STEP = "the library's fastest path"
_FIXED = "world_size"  # decides more than any other field which variant is fastest

Kind: TypeAlias = Literal["exact", "another version", "neighbour", "lent", "refused", "miss"]


class Table:
    """Records in memory; the user's take precedence over the shipped ones, record by record.

    A shipped record of today's version of its winner precedes a user's of another version, and any
    that was lent to the user's device.
    """

    def __init__(self, user: Iterable[Record] = (), shipped: Iterable[Record] = ()) -> None:
        self._fill(sorted([*user, *shipped], key=lambda record: record.is_lent))

    def _fill(self, records: Iterable[Record]) -> None:
        self._records = tuple(records)
        self._layers: dict[str, list[Record]] = {}
        for record in self._records:
            self._layers.setdefault(record.key, []).append(record)
        self._lent: dict[HardwareFingerprint, Table] = {}

    @classmethod
    def _of(cls, records: Iterable[Record]) -> Table:
        table = cls()
        table._fill(records)
        return table

    def own(self, hardware: HardwareFingerprint) -> Table:
        """This table, with the records of a device under the fingerprint that it has today."""
        if not any(_has_former_name(record, hardware) for record in self._records):
            return self
        return self._of(
            replace(record, hardware=hardware) if _has_former_name(record, hardware) else record
            for record in self._records
        )

    def lent_to(self, hardware: HardwareFingerprint) -> Table:
        """A table of what other devices lend to one: the nearest in memory first.

        Its records have the borrower's fingerprint, and name the lender in their provenance.
        """
        if hardware not in self._lent:

            def distance(record: Record) -> tuple[int, str]:
                lender = record.hardware
                return abs(lender.memory_bytes - hardware.memory_bytes), lender.gpu

            lenders = [
                record
                for record in self._records
                if record.hardware.computes_like(hardware) and not record.hardware.is_same(hardware)
            ]
            self._lent[hardware] = self._of(
                replace(
                    record,
                    hardware=hardware,
                    provenance=record.provenance | {"lender": record.hardware.gpu},
                )
                for record in sorted(lenders, key=distance)
            )
        return self._lent[hardware]

    def with_records(self, records: Iterable[Record]) -> Table:
        """A table of these records of the user's, and behind them of those of this one."""
        return self._of([*records, *self._records])

    def records(self) -> Iterator[Record]:
        """Yield the record that takes precedence for each key."""
        return (layers[0] for layers in self._layers.values())

    def layers(self, key: str, versions: Mapping[str, int] | None = None) -> tuple[Record, ...]:
        """Return the records of a key, the user's first; first of all those of today's versions."""
        layers = self._layers.get(key, ())
        if versions is None:
            return tuple(layers)
        return tuple(sorted(layers, key=lambda record: stale_reason(record, versions) is not None))

    def serving(self, versions: Mapping[str, int]) -> Iterator[Record]:
        """Yield the record of each key that serves others: the first of a known variant.

        A winner that was lent serves none: it was tried on its own problem alone.
        """
        for key in self._layers:
            layers = [layer for layer in self.layers(key, versions) if not layer.is_lent]
            yield from [layer for layer in layers if layer.winner.variant in versions][:1]


@dataclass(frozen=True)
class LookupStep:
    """One step of a look-up.

    Args:
        looked_for: the goal of the step.
        found: whether it was reached.
        why: what was found, or why nothing was.
    """

    looked_for: str
    found: bool
    why: str


@dataclass(frozen=True)
class LookUp:
    """The answer to a look-up.

    Args:
        kind: `exact`, `another version` (the problem's own record, of another version of its
            winner), `neighbour` and `lent` may be used; `refused` (its own record, of an unknown
            variant or a config that does not run) may only be shown; `miss` means that nothing was
            found. `look_up` itself does not answer `lent`.
        record: the record of that kind, or None for a miss.
        soft_mismatches: fields of the software fingerprint that differ from the record's.
        lookup_trace: the steps taken, in order.
        nearest: for a miss, the record of the same operation that differs least, not for use.
        library: mode -> variant and config of the library's fastest path, where nothing measured
            serves; empty if results do not tell.
    """

    kind: Kind
    record: Record | None
    soft_mismatches: tuple[str, ...]
    lookup_trace: tuple[LookupStep, ...]
    nearest: Record | None = None
    library: Mapping[str, tuple[str, dict[str, Scalar]]] = field(default_factory=dict)

    @property
    def is_recorded(self) -> bool:
        """Whether a record serves, its own or a neighbour's."""
        return self.kind in ("exact", "another version", "neighbour")

    @property
    def miss_reason(self) -> str:
        """Why nothing serves: what is wrong with a record, else how the nearest one differs."""
        steps = [step for step in self.lookup_trace if step.looked_for in (_KNOWN, _RUNS)]
        wrong = [step.why for step in steps if not step.found]
        return (wrong or [self.lookup_trace[-1].why])[0]

    @property
    def why_library(self) -> str:
        """Why the library's path is that; empty if nothing was looked for."""
        steps = [step.why for step in self.lookup_trace if step.looked_for == LIBRARY_STEP]
        return "".join(steps[:1])


@dataclass(frozen=True)
class Query:
    """The problem of a look-up, and the rules for a record to serve it.

    Args:
        op, problem, hardware: what is looked up.
        software: the current versions; differences are flagged, never refused.
        versions: the current version of every variant of the operation.
        interpolated_fields: positive sizes in which a neighbour may differ, such as `("m",)`.
        ignored_fields: fields in which it may differ as well; of two equally near neighbours, the
            one that agrees in more of them is taken.
        max_log2_distance: largest distance of a neighbour, the sum of |log2| ratios over all
            interpolated fields: 1 is a factor of two.
        illegal_reason: says why a record's config cannot run this problem, or None if it can.

    Raises:
        ValueError: a neighbour may not differ in the world size.
    """

    op: str
    problem: Mapping[str, Scalar]
    hardware: HardwareFingerprint
    software: SoftwareFingerprint
    versions: Mapping[str, int]
    interpolated_fields: Sequence[str]
    ignored_fields: Sequence[str] = ()
    max_log2_distance: float = math.inf
    illegal_reason: Callable[[Record], str | None] = lambda _: None

    def __post_init__(self) -> None:
        if _FIXED in self.fields:
            raise ValueError(f"a neighbour may not differ in {_FIXED}")

    @property
    def fields(self) -> tuple[str, ...]:
        """Those in which a neighbour may differ."""
        return (*self.interpolated_fields, *self.ignored_fields)

    def distance(self, record: Record) -> float:
        """The distance of a neighbour."""
        return _distance(record.problem, self.problem, self.interpolated_fields)

    def is_larger(self, record: Record) -> bool:
        """Whether the problem is larger than a neighbour's in some field."""
        recorded, asked = record.problem, self.problem
        return any(recorded[name] < asked[name] for name in self.interpolated_fields)  # type: ignore[operator]


def look_up(table: Table, query: Query, nearest: bool = True) -> LookUp:
    """Find the record for a problem: its own, else that of its nearest neighbour that serves.

    Neighbours of larger sizes come first: their tiles fit all rows, and smaller ones need more
    tiles. The problem's own record, if it cannot run, is returned where no neighbour serves.

    Args:
        nearest: whether a miss names the record that differs least.

    Raises:
        InvalidRecord: a field of the problem is not a finite scalar.
    """
    trace = _Trace(query)
    records = table.layers(record_key(query.op, query.problem, query.hardware), query.versions)
    record = _own_record(records, trace)
    if record is not None:
        is_current = stale_reason(record, query.versions) is None
        return trace.answer("exact" if is_current else "another version", record)
    others = [record for record in table.serving(query.versions) if record.op == query.op]
    record = _neighbour([other for other in others if other not in records], trace)
    if record is not None:
        return trace.answer("neighbour", record)
    if records:
        return trace.answer("refused", records[0])
    if not nearest:
        return LookUp("miss", None, (), tuple(trace.steps))
    record, why = _nearest(table, query)
    trace.step(f"the nearest record of {query.op}, not for use", record is not None, why)
    return LookUp("miss", None, (), tuple(trace.steps), record)


class _Trace:
    """A look-up on its way: the query, and the steps so far."""

    def __init__(self, query: Query) -> None:
        self.query, self.steps = query, list[LookupStep]()

    def step(self, looked_for: str, found: bool, why: str) -> bool:
        self.steps.append(LookupStep(looked_for, found, why))
        return found

    def runs(self, record: Record) -> bool:
        """Whether a record's config can run the problem; a step if not."""
        reason = self.query.illegal_reason(record)
        return reason is None or self.step(_RUNS, False, reason)

    def answer(self, kind: Kind, record: Record) -> LookUp:
        mismatches = _soft_mismatches(record, self.query.software)
        return LookUp(kind, record, mismatches, tuple(self.steps))


def _own_record(records: Sequence[Record], trace: _Trace) -> Record | None:
    """Return the first of a problem's own records that serves it."""
    query = trace.query
    sources = " and ".join(record.provenance.get("source", "unnamed") for record in records)
    asked = f"{query.op} with {_shown(query.problem)} on {query.hardware.gpu}"
    trace.step(
        asked, bool(records), f"record: {sources}" if records else "not measured on this hardware"
    )
    for record in records:
        reason = stale_reason(record, query.versions) or "measured with today's version"
        is_known = trace.step(_KNOWN, record.winner.variant in query.versions, reason)
        if is_known and trace.runs(record):
            return record
    return None


def _neighbour(others: Iterable[Record], trace: _Trace) -> Record | None:
    """Return the first neighbour that serves the problem, those of larger sizes first."""
    query = trace.query
    looked_for = f"a neighbour that differs in {', '.join(query.fields) or 'nothing'}"
    nearby = neighbours(
        others, query.problem, query.hardware, query.interpolated_fields, query.ignored_fields
    )

    def described(record: Record) -> str:
        which = "nearest" if record is nearby[0] else "next"
        stale = stale_reason(record, query.versions)
        fields = _shown({name: record.problem[name] for name in query.fields})
        return f"{which} is {fields}" + (f", {stale}" if stale else "")

    near = [record for record in nearby if query.distance(record) <= query.max_log2_distance]
    for record in sorted(near, key=query.is_larger):
        if trace.step(looked_for, True, described(record)) and trace.runs(record):
            return record
    for record in nearby[len(near) :][:1]:
        factor = f"a factor of {2 ** query.distance(record):.3g} away"
        trace.step(looked_for, False, f"{described(record)}, {factor}")
    if not nearby:
        trace.step(looked_for, False, "no record agrees in all other fields")
    return None


def neighbours(
    records: Iterable[Record],
    problem: Mapping[str, Scalar],
    hardware: HardwareFingerprint,
    interpolated_fields: Sequence[str],
    ignored_fields: Sequence[str],
) -> list[Record]:
    """Return the records whose configs may be transferred to a problem, the nearest first.

    Args:
        records: of one operation.
        interpolated_fields, ignored_fields: as of :class:`Query`.
    """
    near = set(interpolated_fields)
    apart = near.union(ignored_fields)
    if not near <= _sizes(problem).keys():
        return []
    alike = [
        record
        for record in records
        if record.hardware == hardware
        and record.problem.keys() == problem.keys()
        and _without(apart, record.problem) == _without(apart, problem)
        and near <= _sizes(record.problem).keys()
    ]

    def rank(record: Record) -> tuple[float, int, list[Scalar]]:
        # of two equally near records, the more alike, then the smaller
        unlike = sum(record.problem.get(name) != problem.get(name) for name in ignored_fields)
        sizes = [record.problem[name] for name in interpolated_fields]
        return _distance(record.problem, problem, near), unlike, sizes

    return sorted(alike, key=rank)


def _has_former_name(record: Record, hardware: HardwareFingerprint) -> bool:
    return record.hardware != hardware and record.hardware.is_same(hardware)


def differing_fields(
    record: Record, problem: Mapping[str, Scalar], hardware: HardwareFingerprint | None = None
) -> dict[str, tuple[Scalar | None, Scalar | None]]:
    """Return the fields in which a record differs, as (the record's, the problem's).

    None stands for a missing field. Fields of the hardware, if it is given, have names such as
    `hardware.gpu`.
    """
    ours, asked = dict(record.problem), dict(problem)
    if hardware is not None:
        for fields, machine in ((ours, record.hardware), (asked, hardware)):
            fields |= {f"hardware.{name}": value for name, value in asdict(machine).items()}
    pairs = {name: (ours.get(name), asked.get(name)) for name in ours | asked}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _soft_mismatches(record: Record, software: SoftwareFingerprint) -> tuple[str, ...]:
    recorded, current = asdict(record.software), asdict(software)
    # the version of taxfree does not count: that of the variant tells whether it has changed
    return tuple(name for name in recorded if name != "taxfree" and recorded[name] != current[name])


def _nearest(table: Table, query: Query) -> tuple[Record | None, str]:
    """Return the record of an operation that differs least, and how it differs."""

    def rank(record: Record) -> tuple[int, float, str]:
        differing = differing_fields(record, query.problem, query.hardware)
        return len(differing), _distance(record.problem, query.problem, differing), record.key

    candidates = (record for record in table.records() if record.op == query.op)
    nearest = min(candidates, key=rank, default=None)
    if nearest is None:
        return None, f"{query.op} was never tuned"
    pairs = differing_fields(nearest, query.problem).items()
    reasons = [f"{name} is {had}, not {wanted}" for name, (had, wanted) in pairs]
    if not nearest.hardware.is_same(query.hardware):
        machine = query.hardware.gpu
        whose = nearest.hardware.gpu
        # of two alike, the rest tells them apart
        if whose == machine:
            apart = differing_fields(nearest, query.problem, query.hardware)
            names = sorted(name for name in apart if name.startswith("hardware."))
            machine = f"{machine} of other {', '.join(name.partition('.')[2] for name in names)}"
        reasons.insert(0, f"no record of {machine}; the nearest is of {whose}")
    return nearest, "; ".join(reasons)


def _without(names: set[str], problem: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in problem.items() if name not in names}


def _sizes(problem: Mapping[str, Scalar]) -> dict[str, int | float]:
    return {
        name: value
        for name, value in problem.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }


def _distance(
    one: Mapping[str, Scalar], other: Mapping[str, Scalar], names: Iterable[str]
) -> float:
    """Return the sum of |log2| ratios of the named sizes that both have."""
    ours, theirs = _sizes(one), _sizes(other)
    shared = (ours.keys() & names) & theirs.keys()
    steps = [abs(math.log2(ours[name]) - math.log2(theirs[name])) for name in shared]
    return round(math.fsum(steps), 9)  # so that 12 and 48 are equally far from 24


def _shown(problem: Mapping[str, Scalar]) -> str:
    return " ".join(f"{name}={value}" for name, value in problem.items())
