"""Candidates for a problem, in the order in which to try them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from taxfree._runtime.legality import refusal
from taxfree.cost_model import Times, machine_like, modelled_variants, times
from taxfree.errors import UsageError
from taxfree.measuring.trial import Candidate
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, Problem, Variant, op_of, variants

_MOST = 100_000  # configs that can be measured within days
_PROMISING = 1.4  # times the shortest modelled time: no winner so far was modelled slower than that


def variants_for(
    problem: Problem, hardware: Hardware, only: Sequence[str] | None = None
) -> dict[str, Variant]:
    """Variants, beside the baseline, that can serve a problem.

    Args:
        only: names to choose from; those that are searched by default.
    """
    return {
        name: variant
        for name, variant in _asked_for(problem, only).items()
        if variant.unsupported_reason(problem, hardware) is None
    }


def refusals(
    problem: Problem, hardware: Hardware, only: Sequence[str] | None = None
) -> dict[str, str]:
    """Why each of the other variants, beside the baseline, cannot; arguments as above."""
    reasons = {
        name: variant.unsupported_reason(problem, hardware)
        for name, variant in _asked_for(problem, only).items()
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _asked_for(problem: Problem, only: Sequence[str] | None) -> dict[str, Variant]:
    return {
        name: variant
        for name, variant in variants(op_of(problem)).items()
        if name != "baseline" and (variant.searched if only is None else name in only)
    }


def serves(variant: Variant, problem: Problem, hardware: Hardware, config: Config) -> bool:
    """Whether a variant still has a config's meta-parameters and does not refuse it today."""
    parameters = variant.space(problem, hardware).keys()
    # A record may be older than a meta-parameter, whose default is then what was measured.
    return config.keys() <= parameters and refusal(variant, problem, hardware, config) is None


def valid_candidates(
    found: Mapping[str, Variant], problem: Problem, hardware: Hardware
) -> Iterator[Candidate]:
    """Every candidate that its variant does not refuse."""
    for name, variant in found.items():
        space = variant.space(problem, hardware)
        for values in itertools.product(*space.values()):
            config = dict(zip(space, values, strict=True))
            if variant.prune_reason(problem, hardware, config) is None:
                yield Candidate(name, config)


def every_candidate(
    found: Mapping[str, Variant], problem: Problem, hardware: Hardware, seed: int
) -> list[Candidate]:
    """All valid candidates, in an order that is drawn.

    Raises:
        UsageError: they are too many to measure.
    """
    most = itertools.islice(valid_candidates(found, problem, hardware), _MOST + 1)
    candidates = list(most)
    if len(candidates) > _MOST:
        raise UsageError(
            f"{', '.join(found)} have more than {_MOST:,} configs together",
            "name one of the variants with fewer, or leave --exhaustive out",
        )
    random.Random(seed).shuffle(candidates)
    return candidates


def first_candidates(
    found: Mapping[str, Variant],
    problem: Problem,
    hardware: Hardware,
    nearby: Sequence[Candidate] = (),
) -> list[Candidate]:
    """The first candidates to try, most promising first, so that few trials find what many would.

    First the defaults of variants that the cost model expects to be among the fastest, in graphs or
    in eager calls; then configs that won nearby; then the other first configs of those variants;
    then the first configs of all other variants. Nearby winners and other configs that the model
    expects to be slow here come last.

    Args:
        found: the variants.
        nearby: configs that won on similar problems.
    """
    expected = _expected(found, problem, hardware)
    names = sorted(found, key=lambda name: expected[name].t_graph_us if name in expected else 0.0)
    promising = [found[name] for name in names if _is_promising(name, expected)]
    others = [found[name] for name in names if not _is_promising(name, expected)]
    defaults, *more = _rows_of_first_configs(promising, problem, hardware) or [[]]
    rest = _rows_of_first_configs(others, problem, hardware)
    further = [*nearby, *itertools.chain(*more, *rest)]
    return [*defaults, *_promising_first(further, defaults, found, problem, hardware)]


def _promising_first(
    candidates: Sequence[Candidate],
    before: Sequence[Candidate],
    found: Mapping[str, Variant],
    problem: Problem,
    hardware: Hardware,
) -> list[Candidate]:
    """The candidates in their order, except that those the model expects to be slow come last.

    Args:
        before: candidates that come before them.
        found: their variants; a candidate with other meta-parameters than its variant's is not
            modelled.
    """
    expected_us = model_of(problem, hardware, found)
    expected = [(candidate, expected_us(candidate)) for candidate in (*before, *candidates)]
    most = _PROMISING * min((us for _, us in expected if us is not None), default=0.0)
    in_order = sorted(expected[len(before) :], key=lambda each: (each[1] or 0.0) > most)
    return [candidate for candidate, _ in in_order]


def model_of(
    problem: Problem, hardware: Hardware, found: Mapping[str, Variant]
) -> Callable[[Candidate], float | None]:
    """Modelled microseconds of a candidate in a graph; None where there is no model of it."""
    machine = machine_like(hardware)
    modelled = () if machine is None else modelled_variants(op_of(problem))
    parameters = {
        name: variant.space(problem, hardware).keys()
        for name, variant in found.items()
        if name in modelled
    }

    def expected_us(candidate: Candidate) -> float | None:
        if machine is None or parameters.get(candidate.variant) != candidate.config.keys():
            return None
        return times(machine, problem, candidate.variant, candidate.config).t_graph_us

    return expected_us


def _expected(
    found: Mapping[str, Variant], problem: Problem, hardware: Hardware
) -> dict[str, Times]:
    """Modelled times of each variant's default, if machine and variant are modelled."""
    machine, modelled = machine_like(hardware), modelled_variants(op_of(problem))
    if machine is None:
        return {}
    return {
        name: times(machine, problem, name, variant.seed_configs(problem, hardware)[0])
        for name, variant in found.items()
        if name in modelled
    }


def _is_promising(name: str, expected: Mapping[str, Times]) -> bool:
    """Whether a variant may be the fastest in a graph or in eager calls, or is not modelled."""
    if name not in expected:
        return True
    own, others = expected[name], expected.values()
    return own.t_graph_us <= _PROMISING * min(
        other.t_graph_us for other in others
    ) or own.t_eager_us <= _PROMISING * min(other.t_eager_us for other in others)


def _rows_of_first_configs(
    variants: Sequence[Variant], problem: Problem, hardware: Hardware
) -> list[list[Candidate]]:
    """The first config of each variant, then the second of each, and so on."""
    columns = [
        [Candidate(variant.name, config) for config in variant.seed_configs(problem, hardware)]
        for variant in variants
    ]
    rows = itertools.zip_longest(*columns)
    return [[candidate for candidate in row if candidate is not None] for row in rows]
