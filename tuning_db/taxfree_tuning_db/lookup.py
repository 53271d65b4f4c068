"""Which record serves a problem, and the lookup trace of steps that led to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from .records import (
    HardwareFingerprint,
    Record,
    Scalar,
    SoftwareFingerprint,
    record_key,
)
from .staleness import stale_reason

_TODAYS = "today's kernel"
_RUNS = "a config that runs this problem"
_FIXED = "world_size"  # no other field decides as much over what is fastest

Kind: TypeAlias = Literal["exact", "neighbour", "predicted", "stale", "miss"]


class Table:
    """Records in memory; the user's take precedence over the shipped ones, record by record.

    A shipped record is still used if the user's own is stale.

    Args:
        user: the records of the user's database.
        shipped: those that come with taxfree.
    """

    def __init__(self, user: Iterable[Record] = (), shipped: Iterable[Record] = ()) -> None:
        self._layers: dict[str, list[Record]] = {}
        for record in [*user, *shipped]:
            self._layers.setdefault(record.key, []).append(record)

    def records(self) -> Iterator[Record]:
        """Yield the record that takes precedence for each key."""
        return (layers[0] for layers in self._layers.values())

    def layers(self, key: str) -> tuple[Record, ...]:
        """Return the records of a key, the user's first."""
        return tuple(self._layers.get(key, ()))

    def fresh(self, kernel_hashes: Mapping[str, str]) -> Iterator[Record]:
        """Yield the first record of each key that is not stale."""
        for layers in self._layers.values():
            yield from [each for each in layers if stale_reason(each, kernel_hashes) is None][:1]


@dataclass(frozen=True)
class LookupStep:
    """One step of a look-up.

    Args:
        looked_for: what this step wanted.
        found: whether it was there.
        why: what was found, or why nothing was.
    """

    looked_for: str
    found: bool
    why: str


@dataclass(frozen=True)
class LookUp:
    """The answer to a look-up.

    Args:
        kind: `exact` and `neighbour` may be used, and so may what is `predicted`; `stale` may only
            be shown; `miss` has nothing.
        record: the record of that kind, or None for a prediction or a miss.
        soft_mismatches: fields of the software fingerprint that differ from the record's.
        lookup_trace: the steps taken, in order.
        nearest: for a prediction, the record it starts from; for a miss, the record of the same
            operation that differs least, not for use.
        predicted: for a prediction, the variant and its config. `look_up` makes none.
    """

    kind: Kind
    record: Record | None
    soft_mismatches: tuple[str, ...]
    lookup_trace: tuple[LookupStep, ...]
    nearest: Record | None = None
    predicted: tuple[str, dict[str, Scalar]] | None = None

    @property
    def why_not(self) -> str:
        """Why nothing serves: what is wrong with a record, else how the nearest one differs."""
        steps = [step for step in self.lookup_trace if step.looked_for in (_TODAYS, _RUNS)]
        wrong = [step.why for step in steps if not step.found]
        return (wrong or [self.lookup_trace[-1].why])[0]


def look_up(
    table: Table,
    op: str,
    problem: Mapping[str, Scalar],
    hardware: HardwareFingerprint,
    software: SoftwareFingerprint,
    kernel_hashes: Mapping[str, str],
    interpolated_fields: Sequence[str],
    ignored_fields: Sequence[str] = (),
    max_log2_distance: float = math.inf,
    refused: Callable[[Record], str | None] = lambda _: None,
) -> LookUp:
    """Find the record for a problem: its own, else that of its nearest neighbour that serves.

    A stale record of its own is returned as such only where no neighbour serves.

    Args:
        table: where to look.
        op: name of the operation.
        problem: fields of the problem.
        hardware: the machine's.
        software: today's; differences are flagged, never refused.
        kernel_hashes: today's kernel hash of every variant of the operation.
        interpolated_fields: positive dimensions in which a neighbour may differ, such as `("m",)`.
        ignored_fields: fields in which it may differ as well; of two equally near, the one that
            agrees in more of them is taken.
        max_log2_distance: how far a neighbour may be, in all near fields together: 1 is a factor of
            two.
        refused: says why a record's config cannot run this problem today, or None if it can.

    Raises:
        ValueError: one of these names the world size.
        InvalidRecord: a field of the problem is not a finite scalar.
    """
    if _FIXED in {*interpolated_fields, *ignored_fields}:
        raise ValueError(f"a neighbour may not differ in {_FIXED}")
    lookup_trace: list[LookupStep] = []

    def answer(kind: Kind, record: Record) -> LookUp:
        return LookUp(kind, record, _soft_mismatches(record, software), tuple(lookup_trace))

    own = table.layers(record_key(op, problem, hardware))
    lookup_trace.append(_own_step(op, problem, hardware, own))
    for record in own:
        reason = stale_reason(record, kernel_hashes)
        lookup_trace.append(LookupStep(_TODAYS, reason is None, reason or "the hash is the same"))
        if reason is None and not _is_refused(record, refused, lookup_trace):
            return answer("exact", record)

    others = [
        record for record in table.fresh(kernel_hashes) if record.op == op and record not in own
    ]
    found = neighbours(others, problem, hardware, interpolated_fields, ignored_fields)
    fields = ", ".join((*interpolated_fields, *ignored_fields))
    looked_for = f"a neighbour that differs in {fields or 'nothing'}"
    if not found:
        why = "no record of today's kernels agrees in all other fields"
        lookup_trace.append(LookupStep(looked_for, False, why))
    for neighbour in sorted(
        found, key=lambda each: _comes_after(each, problem, interpolated_fields, max_log2_distance)
    ):
        distance = _distance(neighbour.problem, problem, set(interpolated_fields))
        is_near = distance <= max_log2_distance
        sizes = {name: neighbour.problem[name] for name in (*interpolated_fields, *ignored_fields)}
        far = "" if is_near else f", which is {2**distance:.3g} times off"
        which = "nearest" if neighbour is found[0] else "next"
        lookup_trace.append(LookupStep(looked_for, is_near, f"{which} is {_shown(sizes)}{far}"))
        if not is_near:
            break
        if not _is_refused(neighbour, refused, lookup_trace):
            return answer("neighbour", neighbour)
    if own:
        return answer("stale", own[0])

    same_op = [record for record in table.records() if record.op == op]
    nearest = _nearest(same_op, problem, hardware)
    lookup_trace.append(_nearest_step(op, nearest, problem, hardware))
    return LookUp("miss", None, (), tuple(lookup_trace), nearest)


def _comes_after(
    record: Record,
    problem: Mapping[str, Scalar],
    interpolated_fields: Sequence[str],
    max_log2_distance: float,
) -> int:
    """0, 1 or 2, by which neighbours are tried in turn; those alike keep their order.

    Larger ones within reach come first: a config for more rows has tiles for all of these, and one
    for fewer rows needs more of its tiles.
    """
    if _distance(record.problem, problem, set(interpolated_fields)) > max_log2_distance:
        return 2
    return int(any(record.problem[name] < problem[name] for name in interpolated_fields))  # type: ignore[operator]


def _is_refused(
    record: Record, refused: Callable[[Record], str | None], lookup_trace: list[LookupStep]
) -> bool:
    reason = refused(record)
    if reason is not None:
        lookup_trace.append(LookupStep(_RUNS, False, reason))
    return reason is not None


def neighbours(
    records: Iterable[Record],
    problem: Mapping[str, Scalar],
    hardware: HardwareFingerprint,
    interpolated_fields: Sequence[str],
    ignored_fields: Sequence[str],
) -> list[Record]:
    """Return the records that may lend a problem their configs, the nearest first.

    Args:
        records: of one operation.
        problem, hardware: fields of the problem that is asked for, and the machine's.
        interpolated_fields, ignored_fields: as of :func:`look_up`.
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
        and _without(record.problem, apart) == _without(problem, apart)
        and near <= _sizes(record.problem).keys()
    ]

    def rank(record: Record) -> tuple[float, int, list[Scalar]]:
        # of two that are equally near, the more alike, then the smaller
        unlike = sum(record.problem.get(name) != problem.get(name) for name in ignored_fields)
        sizes = [record.problem[name] for name in interpolated_fields]
        return _distance(record.problem, problem, near), unlike, sizes

    return sorted(alike, key=rank)


def differing_fields(
    record: Record, problem: Mapping[str, Scalar], hardware: HardwareFingerprint | None = None
) -> dict[str, tuple[Scalar | None, Scalar | None]]:
    """Return the fields in which a record differs, as (the record's, the asked one's).

    Args:
        record: the record.
        problem: fields of the problem that was asked for; None stands for one that is missing.
        hardware: the machine's, to compare it too, under names such as `hardware.gpu`.
    """
    ours, asked = dict(record.problem), dict(problem)
    if hardware is not None:
        ours |= _hardware_fields(record.hardware)
        asked |= _hardware_fields(hardware)
    names = [*ours, *(name for name in asked if name not in ours)]
    pairs = {name: (ours.get(name), asked.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _hardware_fields(hardware: HardwareFingerprint) -> dict[str, Scalar]:
    return {f"hardware.{name}": value for name, value in asdict(hardware).items()}


def _soft_mismatches(record: Record, software: SoftwareFingerprint) -> tuple[str, ...]:
    ours, todays = asdict(record.software), asdict(software)
    # another taxfree is no mismatch by itself: the kernel hash tells whether it matters
    return tuple(name for name in ours if name != "taxfree" and ours[name] != todays[name])


# -- distances --


def _nearest(
    records: Iterable[Record], problem: Mapping[str, Scalar], hardware: HardwareFingerprint
) -> Record | None:
    def rank(record: Record) -> tuple[int, float, str]:
        differing = differing_fields(record, problem, hardware)
        return len(differing), _distance(record.problem, problem, set(differing)), record.key

    return min(records, key=rank, default=None)


def _without(problem: Mapping[str, Scalar], names: set[str]) -> dict[str, Scalar]:
    return {name: value for name, value in problem.items() if name not in names}


def _sizes(problem: Mapping[str, Scalar]) -> dict[str, int | float]:
    return {
        name: value
        for name, value in problem.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }


def _distance(one: Mapping[str, Scalar], other: Mapping[str, Scalar], names: set[str]) -> float:
    """Return the sum of |log2| ratios of the named sizes that both have."""
    ours, theirs = _sizes(one), _sizes(other)
    shared = names & ours.keys() & theirs.keys()
    steps = [abs(math.log2(ours[name]) - math.log2(theirs[name])) for name in shared]
    return round(math.fsum(steps), 9)  # so that 12 and 48 are equally far from 24


# -- words --


def _own_step(
    op: str, problem: Mapping[str, Scalar], hardware: HardwareFingerprint, own: Sequence[Record]
) -> LookupStep:
    sources = " and ".join(record.provenance.get("source", "unnamed") for record in own)
    why = f"record: {sources}" if own else "not measured on this hardware"
    return LookupStep(f"{op} with {_shown(problem)} on {hardware.gpu}", bool(own), why)


def _nearest_step(
    op: str,
    nearest: Record | None,
    problem: Mapping[str, Scalar],
    hardware: HardwareFingerprint,
) -> LookupStep:
    looked_for = f"any record of {op}, to show"
    if nearest is None:
        return LookupStep(looked_for, False, f"{op} was never tuned")
    differing = differing_fields(nearest, problem, hardware)
    differences = (f"{name} is {had}, not {asked}" for name, (had, asked) in differing.items())
    return LookupStep(looked_for, True, f"in the nearest, {'; '.join(differences)}")


def _shown(problem: Mapping[str, Scalar]) -> str:
    return " ".join(f"{name}={value}" for name, value in problem.items())
