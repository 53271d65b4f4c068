"""Predictions for sizes without records, where committed results show that they hold.

A method names candidates and the time that the cost model expects of each in a graph:

- "nearest": what the nearest record measured. A candidate's time there is multiplied by the ratio
  of its modelled times, here over there.
- "model": the first configs of all variants, as modelled.

Variants that are not searched, or must not be predicted, are no candidates. The fastest candidate
is predicted to win.

``prediction.json`` says which method serves which settings, and why none does elsewhere:
``benchmarks/unseen.py`` computes it, from predictions for sizes whose results and records were left
out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from taxfree import fingerprints
from taxfree._runtime.legality import illegal, refusal
from taxfree.cost_model import Machine, machine_like, modelled_variants, times
from taxfree.shapes import format_problem, recorded_problem
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, Variant, operation, variants
from taxfree_tuning_db import HardwareFingerprint, Record, neighbours


@dataclass(frozen=True)
class Evidence:
    """The worth of predictions in one setting, as results show it.

    Args:
        op, gpu, fixed: the setting: an operation, a GPU, and the fields in which no record of
            another problem may differ, world_size among them.
        method: the validated method; None if none is.
        reach: field of the family -> log2 of the largest ratio between a record and a problem in
            judged predictions. Nothing is predicted further away from a record.
        sizes: interpolated field -> its least and largest value in judged predictions. Nothing is
            predicted outside.
        why: what the validation showed, in one line.
    """

    op: str
    gpu: str
    fixed: dict[str, Any]
    method: str | None
    reach: dict[str, float]
    sizes: dict[str, list[int]]
    why: str


@dataclass(frozen=True)
class Prediction:
    """The candidate that is expected to be the fastest in a graph.

    Args:
        variant, config: to run.
        us, baseline_us: expected times of it and of the baseline, in microseconds.
        nearest: the record of the nearest family.
    """

    variant: str
    config: dict[str, Any]
    us: float
    baseline_us: float
    nearest: Record

    @property
    def why(self) -> str:
        """One line."""
        source = format_problem(self.nearest.op, self.nearest.problem)
        return f"expected {self.us:.3g} us, baseline {self.baseline_us:.3g}; nearest is {source}"


@cache
def evidence() -> tuple[Evidence, ...]:
    """All that is committed."""
    text = files("taxfree._runtime").joinpath("prediction.json").read_text(encoding="utf-8")
    return tuple(Evidence(**entry) for entry in json.loads(text))


def fixed_fields(op: str, problem: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem that a prediction never crosses."""
    crossed = {
        *fingerprints.interpolated_fields(op),
        *fingerprints.ignored_fields(op),
        *operation(op).family_fields,
    }
    return {name: value for name, value in sorted(problem.items()) if name not in crossed}


def predicted(
    op: str,
    problem: Problem,
    records: Iterable[Record],
    fingerprint: HardwareFingerprint,
    hardware: Hardware,
) -> tuple[Prediction | None, str]:
    """The prediction for a problem without a record, and why; None where the library runs.

    Args:
        records: those whose winner is a known variant.
        fingerprint, hardware: of the ranks.
    """
    fixed = fixed_fields(op, dataclasses.asdict(problem))
    setting = " ".join(f"{name}={value}" for name, value in fixed.items())
    asked = op, fingerprint.gpu, fixed
    shown = next((each for each in evidence() if (each.op, each.gpu, each.fixed) == asked), None)
    if shown is None:
        return None, f"no results judge predictions for {setting}"
    if shown.method is None:
        return None, f"not shown for {setting}: {shown.why}"
    for name, (least, most) in shown.sizes.items():
        if not least <= getattr(problem, name) <= most:
            return None, f"shown for {setting} only with {name} from {least} to {most}"
    found = predict(shown.method, op, problem, records, fingerprint, hardware, shown.reach)
    if found is None:
        within = [
            f"{name} within {2**log2:.3g}x" if log2 else f"the same {name}"
            for name, log2 in shown.reach.items()
        ]
        return None, f"no record is near enough: shown for {setting} with {', '.join(within)}"
    if found.variant == "baseline":
        return None, f"the baseline is expected to be the fastest, {found.us:.3g} us"
    return found, found.why


def predict(
    method: str,
    op: str,
    problem: Problem,
    records: Iterable[Record],
    fingerprint: HardwareFingerprint,
    hardware: Hardware,
    reach: Mapping[str, float] | None = None,
    machine: Machine | None = None,
) -> Prediction | None:
    """The prediction of a method, shown or not; None if no record is near or nothing is modelled.

    Args:
        method: "nearest" or "model".
        reach: as of :class:`Evidence`; any distance by default.
        machine: with the rates of the cost model; by default the hardware's.
    """
    machine = machine or machine_like(hardware)
    if machine is None:
        return None
    transfers, candidates = METHODS[method]
    nearest = next(_near(op, problem, records, fingerprint, reach, transfers=transfers), None)
    if nearest is None:
        return None
    found = list(candidates(machine, op, problem, nearest, hardware))
    baseline_us = min((us for us, name, _ in found if name == "baseline"), default=None)
    if baseline_us is None:
        return None
    us, variant, config = min(found, key=lambda each: each[0])
    return Prediction(variant, config, us, baseline_us, nearest)


def _near(
    op: str,
    problem: Problem,
    records: Iterable[Record],
    fingerprint: HardwareFingerprint,
    reach: Mapping[str, float] | None,
    *,
    transfers: bool,
) -> Iterator[Record]:
    """Records that differ only in sizes and in ignored fields, the nearest first.

    Args:
        transfers: their configs are transferred: they must be near in interpolated fields too.
    """
    asked, family = dataclasses.asdict(problem), operation(op).family_fields
    counted, ignored = fingerprints.interpolated_fields(op), fingerprints.ignored_fields(op)
    if not transfers:
        counted, ignored = (), (*counted, *ignored)
    own = [record for record in records if record.op == op]
    for record in neighbours(own, asked, fingerprint, (*counted, *family), ignored):
        apart = {name: distance(record.problem, asked, name) for name in (*counted, *family)}
        is_within = reach is None or all(apart[name] <= reach[name] for name in family)
        is_near = sum(apart[name] for name in counted) <= fingerprints.NEIGHBOUR_OCTAVES
        if is_within and is_near and recorded_problem(op, record.problem) is not None:
            yield record


def distance(one: Mapping[str, Any], other: Mapping[str, Any], field: str) -> float:
    """How far two problems are apart in a field, as log2 of their ratio."""
    return round(abs(math.log2(one[field] / other[field])), 9)


# -- methods --

_Candidate = tuple[float, str, dict[str, Any]]  # expected time in us, variant, config


def _of_the_nearest(
    machine: Machine, op: str, problem: Problem, nearest: Record, hardware: Hardware
) -> Iterator[_Candidate]:
    there = recorded_problem(op, nearest.problem)
    assert there is not None
    record = fingerprints.transferred(nearest, problem)
    for each in (record.winner, record.baseline, *record.runners_up):
        if "graph" not in each.median_us or each.variant not in modelled_variants(op):
            continue
        if not _may_choose(variants(op)[each.variant]):
            continue
        if illegal(op, problem, each, hardware):
            continue
        modelled = [
            _modelled_us(machine, op, where, each.variant, each.config, hardware)
            for where in (problem, there)
        ]
        us = each.median_us["graph"] * modelled[0] / modelled[1]
        yield us, each.variant, dict(each.config)


def _of_the_model(
    machine: Machine, op: str, problem: Problem, nearest: Record, hardware: Hardware
) -> Iterator[_Candidate]:
    for name in modelled_variants(op):
        variant = variants(op)[name]
        if not _may_choose(variant) or variant.unsupported_reason(problem, hardware) is not None:
            continue
        for config in variant.seed_configs(problem, hardware):
            if refusal(variant, problem, hardware, config) is None:
                us = _modelled_us(machine, op, problem, name, config, hardware)
                yield us, name, config


def _may_choose(variant: Variant) -> bool:
    return variant.searched and variant.predicted


def _modelled_us(
    machine: Machine,
    op: str,
    problem: Problem,
    name: str,
    config: Mapping[str, Any],
    hardware: Hardware,
) -> float:
    # a record may be older than a meta-parameter
    space = variants(op)[name].space(problem, hardware)
    defaults = {parameter: values[0] for parameter, values in space.items()}
    return times(machine, problem, name, defaults | dict(config)).t_graph_us


_Candidates = Callable[[Machine, str, Any, Record, Hardware], Iterator[_Candidate]]
#: method -> whether it transfers configs of records, and its candidates; the best known comes first
METHODS: Mapping[str, tuple[bool, _Candidates]] = {
    "nearest": (True, _of_the_nearest),
    "model": (False, _of_the_model),
}
