"""Candidates for a problem, in the order in which to try them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from taxfree._runtime.legality import illegal_reason
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import (
    Config,
    Problem,
    Variant,
    op_of,
    operation,
    unsupported_reason,
    variants,
)
from taxfree_tune.measuring.trial import Candidate


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
        if unsupported_reason(variant, problem, hardware) is None
    }


def unsupported_reasons(
    problem: Problem, hardware: Hardware, only: Sequence[str] | None = None
) -> dict[str, str]:
    """Why each of the other variants, beside the baseline, cannot; arguments as above."""
    reasons = {
        name: unsupported_reason(variant, problem, hardware)
        for name, variant in _asked_for(problem, only).items()
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _asked_for(problem: Problem, only: Sequence[str] | None) -> dict[str, Variant]:
    return {
        name: variant
        for name, variant in variants(op_of(problem)).items()
        if name != "baseline" and (variant.searched if only is None else name in only)
    }


def is_legal(variant: Variant, problem: Problem, hardware: Hardware, config: Config) -> bool:
    """Whether a variant has a config's meta-parameters, and the config is legal today."""
    parameters = variant.space(problem, hardware).keys()
    # A record may be older than a meta-parameter, whose default is then what was measured.
    return (
        config.keys() <= parameters and illegal_reason(variant, problem, hardware, config) is None
    )


def first_candidates(
    variants_by_name: Mapping[str, Variant],
    problem: Problem,
    hardware: Hardware,
    nearby: Sequence[Candidate] = (),
) -> list[Candidate]:
    """The first candidates to try, most promising first, so that few trials find what many would.

    First the default of each variant, those that win on such problems before the others; then
    configs that won nearby; then the other first configs, in the same order of variants.

    Args:
        variants_by_name: the variants.
        nearby: configs that won on similar problems.
    """
    names = operation(op_of(problem)).first_variants(problem)
    likely = [variants_by_name[name] for name in names if name in variants_by_name]
    others = [variant for name, variant in variants_by_name.items() if name not in names]
    defaults, *more = _rows_of_first_configs(likely, problem, hardware)
    other_defaults, *rest = _rows_of_first_configs(others, problem, hardware)
    return [*defaults, *other_defaults, *nearby, *itertools.chain(*more, *rest)]


def _rows_of_first_configs(
    variants: Sequence[Variant], problem: Problem, hardware: Hardware
) -> list[list[Candidate]]:
    """The first config of each variant, then the second of each, and so on; at least one row."""
    columns = [
        [Candidate(variant.name, config) for config in variant.seed_configs(problem, hardware)]
        for variant in variants
    ]
    rows = itertools.zip_longest(*columns)
    return [[candidate for candidate in row if candidate is not None] for row in rows] or [[]]
