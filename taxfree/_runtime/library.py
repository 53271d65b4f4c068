"""The library's fastest path, where committed results show which one that is.

Which of NCCL, its registered buffers, and PyTorch's ops is the fastest depends on the size of the
message, the number of ranks and the device, and less on the rest. ``library.json`` has their times
of committed results: ``benchmarks/library.py`` writes it, and a test judges the rule on problems
that are left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from taxfree import fingerprints
from taxfree._runtime.legality import transferred_illegal_reason
from taxfree.problems import recorded_problem
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Problem, op_of, operation, variants
from taxfree_tuning_db import HardwareFingerprint
from taxfree_tuning_db.renamed import with_new_names

_OCTAVES = {"link_bytes": 2.0, "flops": 3.0}  # within which a result is near
_WORTH_IT = 0.97  # of the baseline's time


@dataclass(frozen=True)
class Path:
    """A variant of the library with its config, and its times in microseconds by mode."""

    variant: str
    config: dict[str, Any]
    median_us: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.variant, *(f"{key}={value}" for key, value in self.config.items())])


BASELINE = Path("baseline", {})


@dataclass(frozen=True)
class Measured:
    """The library's paths on one problem, measured together.

    Args:
        op, problem: the problem.
        hardware: the device.
        paths: of each variant that serves the fastest config, the baseline's among them.
    """

    op: str
    problem: Problem
    hardware: HardwareFingerprint
    paths: tuple[Path, ...]

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """What other problems must have in common with it."""
        return fixed_fields(self.op, dataclasses.asdict(self.problem))

    def us(self, variant: str, mode: str) -> float:
        """The time of a variant; infinite if there is none."""
        same = (path for path in self.paths if path.variant == variant)
        return min((path.median_us.get(mode, math.inf) for path in same), default=math.inf)


def fixed_fields(op: str, problem: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem that other results must have in common with it."""
    crossed = {
        *fingerprints.interpolated_fields(op),
        *fingerprints.ignored_fields(op),
        *operation(op).family_fields,
    }
    return {name: value for name, value in sorted(problem.items()) if name not in crossed}


@cache
def evidence() -> tuple[Measured, ...]:
    """All that is committed."""
    text = files("taxfree._runtime").joinpath("library.json").read_text(encoding="utf-8")
    return tuple(
        Measured(group["op"], problem, HardwareFingerprint(**group["hardware"]), paths)
        for group in json.loads(text)
        for fields, *timed in group["measured"]
        if (problem := _problem(group["op"], fields)) is not None
        and (paths := tuple(Path(*fields) for fields in timed))
    )


def _problem(op: str, fields: Mapping[str, Any]) -> Problem | None:
    """The problem, also of results that lack fields which problems have since."""
    return recorded_problem(op, with_new_names(op, {"problem": fields})["problem"])


def fastest(
    problem: Problem,
    fingerprint: HardwareFingerprint,
    hardware: Hardware,
    known: Iterable[Measured] | None = None,
) -> tuple[dict[str, Path], str]:
    """The library's fastest path in graphs and in eager calls, and why; empty if it is not known.

    Times over the baseline's are interpolated between the nearest results of smaller and of larger
    messages.

    Args:
        fingerprint, hardware: of the ranks.
        known: results; by default all that are committed.
    """
    results = evidence() if known is None else known
    results_here = [result for result in results if result.hardware.is_same(fingerprint)]
    alike = [result for result in results if result.hardware.computes_like(fingerprint)]
    around = _around(problem, results_here) or _around(problem, alike)
    if around is None:
        return {}, "no results of devices alike are near enough"
    fastest_paths, said = {}, []
    legal = _legal(problem, around, hardware)
    for mode, where in (("graph", "in graphs"), ("eager", "in eager calls")):
        ratios = [_ratio(problem, path.variant, mode, around) for path in legal]
        ratio, best = min(zip(ratios, legal, strict=True), key=lambda pair: pair[0])
        fastest_paths[mode] = best if ratio <= _WORTH_IT else BASELINE
        said.append(f"{best} {where} {ratio:.2f}")
    where = f"{' and '.join(map(_sizes, around))} on {around[0].hardware.gpu}"
    return fastest_paths, f"{', '.join(said)} of the baseline's time, by {where}"


def _around(problem: Problem, known: Iterable[Measured]) -> tuple[Measured, Measured] | None:
    """The nearest results of smaller and of larger messages.

    A message that is smaller than all takes about the time of the smallest.
    """
    op, fixed = op_of(problem), fixed_fields(op_of(problem), dataclasses.asdict(problem))
    near: list[tuple[float, str, float, Measured]] = []
    for measured in known:
        if measured.op != op or measured.fixed != fixed:
            continue
        apart = {work: _octaves(measured.problem, problem, work) for work in _OCTAVES}
        if all(abs(apart[work]) <= most for work, most in _OCTAVES.items()):
            message, flops = apart["link_bytes"], apart["flops"]
            near.append((abs(message) + abs(flops) / 2, repr(measured.problem), message, measured))
    near.sort(key=lambda entry: entry[:2])
    smaller = next((measured for *_, message, measured in near if message <= 0), None)
    larger = next(
        (measured for *_, message, measured in near if message >= 0 and measured != smaller), None
    )
    return None if larger is None else (smaller or larger, larger)


def _sizes(measured: Measured) -> str:
    op = operation(measured.op)
    names = (*op.interpolated_fields, *op.family_fields)
    return " ".join(f"{name}={getattr(measured.problem, name)}" for name in names)


def _octaves(one: Problem, other: Problem, work: str) -> float:
    """log2 of the ratio of two problems' bytes or operations."""
    ours, theirs = (getattr(problem.cost, work) for problem in (one, other))
    return math.log2(ours / theirs) if ours and theirs else math.inf


def _share(problem: Problem, around: tuple[Measured, Measured]) -> float:
    """Where a problem is between two others: 0 with the first, 1 with the second."""
    smaller, larger = (measured.problem for measured in around)
    whole = _octaves(larger, smaller, "link_bytes")
    return _octaves(problem, smaller, "link_bytes") / whole if whole else 0.5


def _ratio(problem: Problem, variant: str, mode: str, around: tuple[Measured, Measured]) -> float:
    """The time of a variant over the baseline's, interpolated over the bytes of messages."""
    smaller, larger = (
        measured.us(variant, mode) / measured.us("baseline", mode) for measured in around
    )
    share = _share(problem, around)
    return float(smaller ** (1 - share) * larger**share)


def _legal(problem: Problem, around: tuple[Measured, Measured], hardware: Hardware) -> list[Path]:
    """The paths that can run a problem, with the configs of the nearer result."""
    op, nearer = op_of(problem), around[_share(problem, around) > 0.5]
    return [
        path
        for path in nearer.paths
        if path.variant in variants(op)
        and transferred_illegal_reason(op, problem, path, hardware) is None
    ]
