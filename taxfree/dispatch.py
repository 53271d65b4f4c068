"""The choice between fused and library for a problem, from the tuning table alone.

It depends only on what is the same on all ranks: problem, table, kernel sources and settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from taxfree import identity
from taxfree.errors import NoRecord
from taxfree.settings import Settings
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Variant, variants
from taxfree_tuning_db import (
    HardwareFingerprint,
    LookUp,
    Measurement,
    Record,
    Table,
    differing_fields,
)
from taxfree_tuning_db import look_up as find_record

_WORTH_A_PLAN = 0.97  # of the winner's eager time: a slower variant gets no eager plan of its own

Kind = Literal["exact", "neighbour", "baseline", "disabled", "unprepared"]


@dataclass(frozen=True)
class Choice:
    """What runs for a problem, and why.

    Args:
        kind: "exact": its own record; "neighbour": a similar problem's config; "baseline": no
            record serves; "disabled": the environment, or ranks that disagree, forbid fused
            variants; "unprepared": first called under graph capture.
        variant, config: what runs.
        why: one line.
        eager: what runs instead outside graph capture, if something else was faster there: plans
            with many launches win in graphs and lose in eager calls.
    """

    kind: Kind
    variant: str
    config: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    eager: Choice | None = None

    @property
    def in_eager_calls(self) -> str:
        """What runs in eager calls and why, as text; empty if they run the same."""
        return (
            "" if self.eager is None else f"in eager calls {self.eager.variant}: {self.eager.why}"
        )

    def of(self, mode: str) -> Choice:
        """What runs in a mode, "eager" or "graph"."""
        return self.eager if mode == "eager" and self.eager is not None else self


class Dispatcher:
    """Chooses from a table.

    Args:
        table: the records.
        hardware: of the ranks.
        settings: what the environment says.
    """

    def __init__(self, table: Table, hardware: Hardware, settings: Settings | None = None) -> None:
        self._table, self._hardware = table, hardware
        self._settings = settings or Settings.from_environment()
        self._fingerprint = identity.hardware_fingerprint(hardware)

    def look_up(self, op: str, problem: Any) -> LookUp:
        """The record that serves a problem, with the steps that led to it."""
        return look_up(op, problem, self._table, self._fingerprint, self._hardware)

    def choose(self, op: str, problem: Any) -> Choice:
        """What to run.

        Raises:
            NoRecord: with ``TAXFREE_STRICT``, when the problem has no record of its own.
        """
        if self._settings.disable:
            return Choice("disabled", "baseline", why="TAXFREE_DISABLE is set, or ranks differ")
        found = self.look_up(op, problem)
        if self._settings.strict and found.kind != "exact":
            raise NoRecord(*_explain_miss(problem, self._fingerprint, found))
        if found.record is None or found.kind not in ("exact", "neighbour"):
            return Choice("baseline", "baseline", why=found.why_not)
        winner = found.record.winner
        if found.kind == "exact":
            flags = ", ".join(found.soft_mismatches)
            why = "its own record" + (f", measured with another {flags}" if flags else "")
            eager = self._eager("exact", op, problem, found.record)
            return Choice("exact", winner.variant, dict(winner.config), why, eager)
        near = {name: found.record.problem[name] for name in identity.near_fields(op)}
        unlike = {
            name: found.record.problem[name]
            for name in identity.free_fields(op)
            if found.record.problem[name] != getattr(problem, name)
        }
        said = " ".join(f"{name}={value}" for name, value in (near | unlike).items())
        lender = f"the record of {said}"
        eager = self._eager("neighbour", op, problem, found.record)
        return Choice("neighbour", winner.variant, dict(winner.config), lender, eager)

    def _eager(self, kind: Kind, op: str, problem: Any, record: Record) -> Choice | None:
        """The measurement of a record that beats its winner in eager calls and is still valid."""
        winner, hashes = record.winner, identity.kernel_hashes(op)
        if "eager" not in winner.median_us:
            return None
        ours = winner.median_us["eager"]
        faster = [
            each
            for each in (record.baseline, *record.runners_up)
            if each.median_us.get("eager", math.inf) <= _WORTH_A_PLAN * ours
            and each.kernel_hash == hashes.get(each.variant)
            and _illegal(op, problem, each, self._hardware) is None
        ]
        if not faster:
            return None
        fastest = min(faster, key=lambda each: each.median_us["eager"])
        theirs = fastest.median_us["eager"]
        why = f"outside of graphs {theirs:.3g} us, {winner.variant} {ours:.3g}"
        return Choice(kind, fastest.variant, dict(fastest.config), why)


def look_up(
    op: str,
    problem: Any,
    table: Table,
    fingerprint: HardwareFingerprint,
    hardware: Hardware | None,
) -> LookUp:
    """The record that serves a problem, a neighbour's as it is lent, and the steps that led to it.

    Args:
        table: the records.
        fingerprint: of the ranks' hardware, as records name it.
        hardware: the same with its limits; None if they are not known, and nothing is refused.
    """
    asked = dataclasses.asdict(problem)

    def refused(record: Record) -> str | None:
        if hardware is None:
            return None
        if record.problem == asked:  # its space may have lost this config, which was measured
            return _refused(op, problem, record.winner, hardware)
        return _illegal(op, problem, identity.lent(record, problem).winner, hardware)

    found = find_record(
        table,
        op,
        asked,
        fingerprint,
        identity.software_fingerprint(),
        identity.kernel_hashes(op),
        identity.near_fields(op),
        identity.free_fields(op),
        identity.NEIGHBOUR_OCTAVES,
        refused,
    )
    if found.record is None or found.kind != "neighbour":
        return found
    return dataclasses.replace(found, record=identity.lent(found.record, problem))


def _illegal(op: str, problem: Any, measured: Measurement, hardware: Hardware) -> str | None:
    """Why a config that was measured on another problem does not serve this one, or None."""
    variant = variants(op)[measured.variant]
    if variant.refuses_problem(problem, hardware) is None:
        space = variant.space(problem, hardware)
        for knob, value in measured.config.items():
            if value not in space.get(knob, ()):
                return f"{measured.variant}: {knob}={value} is not in the space of this problem"
    return _refused(op, problem, measured, hardware)


def _refused(op: str, problem: Any, measured: Measurement, hardware: Hardware) -> str | None:
    """Why a measured config does not run today, or None."""
    reason = refusal(variants(op)[measured.variant], problem, hardware, measured.config)
    return None if reason is None else f"{measured.variant}: {reason}"


def refusal(
    variant: Variant, problem: Any, hardware: Hardware, config: Mapping[str, Any]
) -> str | None:
    """Why a variant refuses a problem or a config today, or None."""
    reason = variant.refuses_problem(problem, hardware)
    try:
        return reason or variant.refuses_config(problem, hardware, config)
    except KeyError as knob:  # an imported record may hold anything
        return f"the config has no {knob}"


def _explain_miss(problem: Any, hardware: HardwareFingerprint, found: LookUp) -> tuple[str, str]:
    message = f"no record of its own for {problem}"
    nearest = found.record or found.nearest
    if nearest is None:
        return message, "the table is empty: run `taxfree tune`"
    differing = differing_fields(nearest, dataclasses.asdict(problem), hardware).items()
    fields = ", ".join(f"{name}: {ours} there, {asked} asked" for name, (ours, asked) in differing)
    return message, f"the nearest differs in {fields or 'its kernel hash (stale)'}"
