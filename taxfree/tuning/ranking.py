"""Ranks configs for hardware that is not here, by models and compiled resources.

A time is the cost model's. Where the operation has a trace for the L2 model, programs also wait for
what they read: the L2 model's time beyond that of the flops at the data sheet's rate. The L2 model
needs the number of programs that a compute unit holds, which the compiled kernel tells. So all
candidates are modelled with an assumed one, then the fastest are compiled, and modelled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from taxfree import fingerprints
from taxfree.cost_model import l2_traffic, machine, modelled_variants, times
from taxfree.tuning.session import proposals
from taxfree.tuning.winner import record_of
from taxfree_kernels.cross_compile.resources import Resources
from taxfree_kernels.cross_compile.screen import Screen, Verdict
from taxfree_kernels.variant import Problem, op_of
from taxfree_tuning_db import OF_A_MODEL, Measurement, Record

if TYPE_CHECKING:
    from taxfree_kernels.cost.l2 import Traffic

_ASSUMED_PROGRAMS = 2  # on a compute unit, before a kernel is compiled


@dataclass(frozen=True)
class Ranked:
    """A candidate, modelled.

    Args:
        variant, config: the candidate; first the baseline, which has no config.
        us: modelled time of a call in a graph; None where the variant has no formulas.
        waits_us: the part of it that is waiting for reads; 0 where the L2 model has no trace.
        traffic: of the L2 model, or None.
        resources: of its largest kernel; None where it was not compiled, or has no kernel of ours.
        refused: why it cannot run or be right, or None.
    """

    variant: str
    config: dict[str, object]
    us: float | None
    waits_us: float = 0.0
    traffic: Traffic | None = None
    resources: Resources | None = None
    refused: str | None = None


def ranking(
    problem: Problem,
    screen: Screen,
    name: str,
    trials: int,
    seed: int = 0,
    only: Sequence[str] | None = None,
    compiled: int = 4,
) -> list[Ranked]:
    """The baseline, then compiled candidates, fastest first, then those refused once compiled.

    Where no variant serves the problem, the reasons follow the baseline.

    Args:
        screen: of the hardware.
        name: the hardware's name, as :func:`taxfree.cost_model.machine` knows it.
        trials: candidates to model: the first ones of a search, then drawn ones.
        seed: of the draw.
        only: names of variants to try; those that are searched by default.
        compiled: candidates to rank; of equally fast ones, those that were proposed first.

    Raises:
        UsageError: there is no cost model of the hardware.
    """
    candidates, refused = proposals(problem, machine(name).hardware, trials, seed, only)
    waiting = sorted(
        (_modelled(problem, name, Verdict(each.variant, each.config, {})) for each in candidates),
        key=_order,
    )
    found: list[Ranked] = []
    left_out = [] if candidates else [_modelled(problem, name, verdict) for verdict in refused]
    while waiting and len(found) < compiled:
        count = compiled - len(found)
        taken, waiting = waiting[:count], waiting[count:]
        pairs = [(each.variant, each.config) for each in taken]
        for verdict in screen.verdicts(op_of(problem), problem, pairs):
            into = left_out if verdict.refused else found
            into.append(_modelled(problem, name, verdict))
    baseline = _modelled(problem, name, Verdict("baseline", {}, {}))
    return [baseline, *sorted(found, key=_order), *left_out]


def modelled_record(
    problem: Problem, name: str, ranked: Sequence[Ranked], trials: int, seconds: float
) -> Record | None:
    """The record of what :func:`ranking` found, marked as modelled; None if it modelled no library.

    Args:
        name: the hardware's name.
        trials, seconds: candidates that were modelled, and the time that it took.
    """
    op = op_of(problem)
    versions = fingerprints.versions(op)
    times = [
        Measurement(
            each.variant,
            dict(each.config),  # type: ignore[arg-type]
            versions[each.variant],
            median_us={"graph": each.us},
            iqr_us={"graph": 0.0},
            samples=0,
            relative_error=None,
        )
        for each in ranked
        if each.us is not None and each.refused is None
    ]
    if not times or times[0].variant != "baseline":
        return None
    return record_of(
        op,
        asdict(problem),
        fingerprints.hardware_fingerprint(machine(name).hardware),
        fingerprints.software_fingerprint(),
        times,
        trials,
        seconds,
        datetime.now(UTC).isoformat(timespec="seconds"),
        method=OF_A_MODEL,
    )


def _order(each: Ranked) -> tuple[float, int]:
    """Unmodelled ones come last; of equally fast ones, those that have more programs at once."""
    programs = 0 if each.resources is None else each.resources.programs_per_unit
    return (float("inf") if each.us is None else each.us, -programs)


def _modelled(problem: Problem, name: str, verdict: Verdict) -> Ranked:
    known = Ranked(verdict.variant, dict(verdict.config), None, refused=verdict.refused)
    if verdict.refused or verdict.variant not in modelled_variants(op_of(problem)):
        return known
    largest = max(verdict.kernels.values(), key=lambda each: each.registers, default=None)
    programs = _ASSUMED_PROGRAMS if largest is None else largest.programs_per_unit
    us = times(machine(name), problem, verdict.variant, verdict.config).t_graph_us
    traffic, waits_us = l2_traffic(name, problem, verdict.variant, verdict.config, programs)
    return Ranked(
        verdict.variant, known.config, us + waits_us, waits_us, traffic, resources=largest
    )
