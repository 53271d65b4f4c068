"""The choice between fused and library for a problem, from the tuning table alone.

It depends only on what is the same on all ranks: problem, table, versions of variants
and settings.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from taxfree import fingerprints
from taxfree._runtime.legality import candidate_illegal_reason, transferred_illegal_reason
from taxfree._runtime.library import BASELINE, fastest
from taxfree.errors import NoRecord
from taxfree.settings import Settings
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, variants
from taxfree_tuning_db import (
    HardwareFingerprint,
    LookUp,
    LookupStep,
    Measurement,
    Query,
    Record,
    Table,
    differing_fields,
    look_up,
    stale_reason,
)
from taxfree_tuning_db.lookup import LIBRARY_STEP

_MODES = ("graph", "eager")
_BASELINE: tuple[str, dict[str, Any]] = (BASELINE.variant, {})
#: host time of a call with copies, which calls in a row hide: on H100s one that takes 386 us there
#: took 605 in a compiled training step, where the library took 414
_COPIES_US = 220.0
_WORTH_A_PLAN = 0.97  # of the winner's eager time: a slower variant gets no eager plan of its own

Kind = Literal[
    "exact", "another version", "neighbour", "lent", "baseline", "disabled", "unprepared"
]


@dataclass(frozen=True)
class Choice:
    """The variant and config for a problem, and the reason.

    Args:
        kind: "exact": its own record; "another version": its own record, measured with an earlier
            or a later version of the variant; "neighbour": a similar problem's config; "lent": a
            record, or a similar problem's, of another device that computes alike; "baseline": no
            record serves; "disabled": the environment, or ranks that disagree, forbid fused
            variants; "unprepared": first called under graph capture.
        variant, config: what runs.
        why: one line.
        eager: what runs instead outside graph capture, if something else was faster there: plans
            with many launches win in graphs and lose in eager calls.
        lender: the GPU that lent the record, also if it was tried here since; empty if none did.
    """

    kind: Kind
    variant: str
    config: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    eager: Choice | None = None
    lender: str = ""

    @property
    def source(self) -> str:
        """The kind, and the GPU that lends."""
        return f"lent: {self.lender}" if self.kind == "lent" else self.kind

    @property
    def in_eager_calls(self) -> str:
        """The choice in eager calls and its reason, as text; empty if it is the same."""
        eager = self.eager
        return "" if eager is None else f"in eager calls {eager.variant}: {eager.why}"

    def of(self, mode: str) -> Choice:
        """The choice in a mode, "eager" or "graph"."""
        return self.eager if mode == "eager" and self.eager is not None else self


class Dispatcher:
    """Chooses from a table.

    Args:
        table: the records.
        hardware: of the ranks.
        settings: what the environment says.
        only: the variants that it may choose beside the baseline; None for all.
    """

    def __init__(
        self,
        table: Table,
        hardware: Hardware,
        settings: Settings | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._fingerprint = fingerprints.hardware_fingerprint(hardware)
        self._table, self._hardware, self._only = table.own(self._fingerprint), hardware, only
        self.settings = settings or Settings.from_environment()

    def limited_to(self, names: Collection[str]) -> Dispatcher:
        """The same, for calls that only these variants and the baseline can run."""
        return Dispatcher(self._table, self._hardware, self.settings, names)

    @property
    def table(self) -> Table:
        """The records that it chooses from."""
        return self._table

    @property
    def is_disabled(self) -> bool:
        """Whether only the baseline may run."""
        return self.settings.disable

    def add(self, records: Iterable[Record]) -> None:
        """Choose by these records of the user's, too, from now on; on all ranks the same."""
        self._table = self._table.with_records(records)
        Dispatcher._ends.cache_clear()

    @property
    def digest(self) -> str:
        """16 hex digits for all that decides a choice, but the code."""
        records = sorted(
            (record.key, *map(repr, (record.winner, record.baseline, *record.runners_up)))
            for record in self._table.records()
        )
        said = repr((records, self.settings.disable, self.settings.strict, self._fingerprint))
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def answer(self, op: str, problem: Problem) -> LookUp:
        """The record that serves a problem, with the steps that led to it."""
        return resolve(op, problem, self._table, self._fingerprint, self._hardware)

    def choose(self, op: str, problem: Problem) -> Choice:
        """Choose what runs for a problem.

        Raises:
            NoRecord: with ``TAXFREE_STRICT``, when the problem has no record of its own.
        """
        if self.settings.disable:
            return Choice("disabled", "baseline", why="TAXFREE_DISABLE is set, or ranks differ")
        answer = self.answer(op, problem)
        if self.settings.strict and answer.kind != "exact":
            raise NoRecord(*_explain_miss(problem, self._fingerprint, answer))
        if answer.record is None or answer.kind == "refused":
            return self._library(answer)
        kind: Kind = answer.kind if answer.kind in ("neighbour", "lent") else "exact"
        record = self._limited(op, problem, answer.record)
        return self.of_record(kind, problem, record, _source(op, problem, answer, record))

    def _library(self, answer: LookUp) -> Choice:
        """The library's path where no record serves, in graphs and in eager calls."""
        baseline = Choice("baseline", "baseline", why=answer.miss_reason)
        graph, eager = (
            Choice("baseline", variant, dict(config), answer.why_library)
            if variant != "baseline" and self._may_run(variant)
            else baseline
            for variant, config in (answer.library.get(mode, _BASELINE) for mode in _MODES)
        )
        alike = (graph.variant, graph.config) == (eager.variant, eager.config)
        return graph if alike else dataclasses.replace(graph, eager=eager)

    def of_record(self, kind: Kind, problem: Problem, record: Record, why: str) -> Choice:
        """The choice of a record's winner for a problem, in all calls or in graphs."""
        winner, eager = record.winner, self._eager(kind, record.op, problem, record)
        kind = _of_version(kind, record.op, winner)
        return Choice(kind, winner.variant, dict(winner.config), why, eager, record.lender)

    def after_trial(self, choice: Choice, problem: Problem, record: Record) -> Choice:
        """What a lent choice becomes by the record of its trial on these ranks."""
        mode = "graph" if "graph" in record.baseline.median_us else "eager"
        times = [
            f"{measurement.median_us[mode]:.3g} us"
            for measurement in (record.winner, record.baseline)
        ]
        why = f"{choice.why}; here {record.winner.variant} {times[0]}, the library {times[1]}"
        return self.of_record("lent", problem, record, why)

    def bounds(self, op: str, problem: Problem, name: str) -> tuple[int, int]:
        """The smallest and the largest size that are served together with a problem's.

        A record serves the sizes within a factor of two of its own, but for those that a larger
        record serves. The other sizes are cut at the powers of two, those of attention at the
        powers of eight, because its library path has kernels to compile. With ``TAXFREE_STRICT``
        each size is served alone.

        Args:
            name: the field that holds the size.
        """
        size: int = getattr(problem, name)
        if self.settings.strict:
            return size, size
        apart = {*fingerprints.interpolated_fields(op), *fingerprints.ignored_fields(op)}
        family = tuple((k, v) for k, v in dataclasses.asdict(problem).items() if k not in apart)
        ends = self._ends(op, name, family)
        index = bisect.bisect_left(ends, size)
        return ends[index - 1] + 1, ends[index]

    @functools.cache  # noqa: B019  as long as the dispatcher
    def _ends(self, op: str, name: str, family: tuple[tuple[str, Any], ...]) -> list[int]:
        """The largest sizes that are served together, in order, with 0 before them."""
        alike: set[int] = set()
        step = 1 if fingerprints.capacity_field(op) is None else 3
        others = {1 << bits for bits in range(0, 61, step)}
        for record in self._table.records():
            if record.op == op and all(record.problem.get(k) == value for k, value in family):
                alike.add(int(record.problem[name]))
        ends_of_alike = [0, *sorted(alike), 1 << 62]
        ends = set(ends_of_alike)
        for last, size, following in zip(
            ends_of_alike, ends_of_alike[1:], ends_of_alike[2:], strict=False
        ):
            ends |= {max(last, -(-size // 2) - 1), min(2 * size, max(size, -(-following // 2) - 1))}
        served = [range(-(-size // 2), 2 * size + 1) for size in alike]
        ends |= {other for other in others if not any(other in sizes for sizes in served)}
        return sorted(ends)

    def _may_run(self, variant: str) -> bool:
        return self._only is None or variant in self._only

    def _limited(self, op: str, problem: Problem, record: Record) -> Record:
        """The record, without the measurements of variants that may not run."""
        if self._only is None:
            return record
        measured = [
            measurement
            for measurement in (record.winner, *record.runners_up)
            if self._may_run(measurement.variant) and self._is_valid(op, problem, measurement)
        ]
        mode = "graph" if "graph" in record.baseline.median_us else "eager"
        limit = _WORTH_A_PLAN * record.baseline.median_us[mode]
        winner = min(
            (
                measurement
                for measurement in measured
                if measurement.median_us.get(mode, math.inf) <= limit
            ),
            key=lambda measurement: measurement.median_us[mode],
            default=record.baseline,
        )
        return dataclasses.replace(record, winner=winner, runners_up=tuple(measured))

    def _eager(self, kind: Kind, op: str, problem: Problem, record: Record) -> Choice | None:
        """The measurement of a record that beats its winner in eager calls and is still valid."""
        winner = record.winner
        if "eager" not in winner.median_us:
            return None
        ours = _eager_us(op, winner)
        faster = [
            measurement
            for measurement in (record.baseline, *record.runners_up)
            if _eager_us(op, measurement) <= _WORTH_A_PLAN * ours
            and self._is_valid(op, problem, measurement)
        ]
        if not faster:
            return None
        fastest = min(faster, key=functools.partial(_eager_us, op))
        theirs = _eager_us(op, fastest)
        why = f"outside of graphs {theirs:.3g} us, {winner.variant} {ours:.3g}"
        kind = _of_version(kind, op, fastest)
        return Choice(kind, fastest.variant, dict(fastest.config), why)

    def _is_valid(self, op: str, problem: Problem, measured: Measurement) -> bool:
        """Whether a measurement is of a known variant, and its config serves a problem."""
        return (
            measured.variant in fingerprints.versions(op)
            and transferred_illegal_reason(op, problem, measured, self._hardware) is None
        )


def _eager_us(op: str, measured: Measurement) -> float:
    """The time of an eager call; of copies also what the host needs where it is not ahead."""
    variant = variants(op).get(measured.variant)
    launches_us = _COPIES_US if variant is not None and variant.copies else 0.0
    return measured.median_us.get("eager", math.inf) + launches_us


def resolve(
    op: str,
    problem: Problem,
    table: Table,
    fingerprint: HardwareFingerprint,
    hardware: Hardware | None,
) -> LookUp:
    """The record or transferred config for a problem, with the steps that led to it.

    Args:
        table: the records.
        fingerprint: of the ranks' hardware, as records name it.
        hardware: the same with its limits; None if they are not known, and nothing is refused.
    """
    asked, table = _Asked(op, problem, fingerprint, hardware), table.own(fingerprint)
    answer = asked.found(table)
    if not answer.is_recorded:
        answer = asked.lent(answer, table.lent_to(fingerprint))
    return answer if answer.is_recorded or answer.kind == "lent" else asked.with_library(answer)


@dataclass(frozen=True)
class _Asked:
    """A problem that is looked up; fields as the arguments of :func:`resolve`."""

    op: str
    problem: Problem
    fingerprint: HardwareFingerprint
    hardware: Hardware | None

    def found(self, table: Table, nearest: bool = True) -> LookUp:
        """The record for the problem, or a neighbour's that is transferred to it."""
        op, problem = self.op, self.problem
        query = Query(
            op,
            dataclasses.asdict(problem),
            self.fingerprint,
            fingerprints.software_fingerprint(),
            fingerprints.versions(op),
            fingerprints.interpolated_fields(op),
            fingerprints.ignored_fields(op),
            fingerprints.NEIGHBOUR_OCTAVES,
            self._illegal_reason,
        )
        answer = look_up(table, query, nearest)
        if answer.record is None or answer.kind != "neighbour":
            return answer
        return dataclasses.replace(answer, record=fingerprints.transferred(answer.record, problem))

    def _illegal_reason(self, record: Record) -> str | None:
        op, problem = self.op, self.problem
        if self.hardware is None:
            return None
        is_current = stale_reason(record, fingerprints.versions(op)) is None
        if is_current and record.problem == dataclasses.asdict(problem):
            # its space may have lost this config, which was measured
            return candidate_illegal_reason(op, problem, record.winner, self.hardware)
        winner = fingerprints.transferred(record, problem).winner
        return transferred_illegal_reason(op, problem, winner, self.hardware)

    def lent(self, answer: LookUp, lent: Table) -> LookUp:
        """The record that another device lends, else what was found, with the reason."""
        if not any(record.op == self.op for record in lent.records()):
            return answer
        other = self.found(lent, nearest=False)
        looked_for = "a record of a device that computes alike"
        if other.record is None or not other.is_recorded:
            return _with_step(answer, LookupStep(looked_for, False, other.miss_reason))
        step = LookupStep(looked_for, True, f"lent: {other.record.lender}")
        more = (step for step in other.lookup_trace if step not in answer.lookup_trace)
        return dataclasses.replace(other, kind="lent", lookup_trace=(*_tried(answer), step, *more))

    def with_library(self, answer: LookUp) -> LookUp:
        """A look-up with the library's fastest path, and its step."""
        if self.hardware is None:
            return answer
        paths, why = fastest(self.problem, self.fingerprint, self.hardware)
        runs = {mode: (path.variant, path.config) for mode, path in paths.items()}
        answer = dataclasses.replace(answer, library=runs)
        is_other = any(path != BASELINE for path in paths.values())
        return _with_step(answer, LookupStep(LIBRARY_STEP, is_other, why))


def _tried(answer: LookUp) -> tuple[LookupStep, ...]:
    """The steps of a look-up, without the nearest record, with which a miss ends."""
    return answer.lookup_trace[: len(answer.lookup_trace) - (answer.kind == "miss")]


def _with_step(answer: LookUp, step: LookupStep) -> LookUp:
    """A look-up with one more step."""
    tried = _tried(answer)
    steps = (*tried, step, *answer.lookup_trace[len(tried) :])
    return dataclasses.replace(answer, lookup_trace=steps)


def _of_version(kind: Kind, op: str, measured: Measurement) -> Kind:
    """The kind of a choice of a measurement: "exact" only if it is of today's version."""
    is_current = stale_reason(measured, fingerprints.versions(op)) is None
    return kind if is_current or kind != "exact" else "another version"


def _source(op: str, problem: Problem, answer: LookUp, record: Record) -> str:
    """The record that serves a problem, in one line."""
    stale = stale_reason(record, fingerprints.versions(op))
    suffix = f", {stale}" if stale else ""
    if answer.kind not in ("neighbour", "lent"):
        flags = ", ".join(answer.soft_mismatches)
        standing = "its own record" + (
            f", of a winner that {record.lender} lent" if record.is_lent else ""
        )
        return f"{standing}{suffix}" + (f", measured with another {flags}" if flags else "")
    fields = record.problem
    ignored = fingerprints.ignored_fields(op)
    differing = [name for name in ignored if fields[name] != getattr(problem, name)]
    named = (*fingerprints.interpolated_fields(op), *differing)
    whose = f"{record.lender}'s" if answer.kind == "lent" else "the"
    return f"{whose} record of " + " ".join(f"{name}={fields[name]}" for name in named) + suffix


def _explain_miss(
    problem: Problem, hardware: HardwareFingerprint, answer: LookUp
) -> tuple[str, str]:
    message = f"no record of its own for {problem}"
    nearest = answer.record or answer.nearest
    if nearest is None:
        return message, "the table is empty: run `taxfree tune`"
    differing = differing_fields(nearest, dataclasses.asdict(problem), hardware).items()
    fields = ", ".join(f"{name}: {ours} there, {asked} asked" for name, (ours, asked) in differing)
    return message, f"the nearest differs in {fields or 'the version of its variant'}"
