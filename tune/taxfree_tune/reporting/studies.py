"""Studies of past tuning: how fast they found the best, and which meta-parameters mattered."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from taxfree import fingerprints
from taxfree.problems import format_problem
from taxfree_tune.reporting.sources import (
    Recorded,
    Sources,
    machine_of_record,
)
from taxfree_tuning_db import TrialRecord

_LEAST_TRIALS = 4  # of a variant, before importances of its meta-parameters mean anything

#: a config, and its time in microseconds
_Tried = tuple[Mapping[str, Any], float]

_FASTEST = 0.25  # of trials: their distribution is compared with that of all; a tenth is too few

optuna.logging.set_verbosity(optuna.logging.ERROR)


def convergence(sources: Sources) -> list[dict[str, Any]]:
    """A row per measured trial of each study: its time, and the best so far, in microseconds."""
    rows = []
    for recorded in sources.records:
        best = float("inf")
        baseline = recorded.record.baseline
        for number, trial in enumerate(_measured(recorded), start=1):
            us = trial.median_us[_mode(trial.median_us)]
            best = min(best, us)
            rows.append(
                _common(recorded)
                | {
                    "trial": number,
                    "variant": trial.variant,
                    "config": " ".join(f"{name}={value}" for name, value in trial.config.items()),
                    "us": round(us, 3),
                    "best_us": round(best, 3),
                    "library_us": round(baseline.median_us[_mode(baseline.median_us)], 3),
                }
            )
    return rows


def importances(sources: Sources) -> list[dict[str, Any]]:
    """A row per meta-parameter: its share of what decided the time, by Optuna's PED-ANOVA.

    Each variant is judged alone, as no meta-parameter is of them all.
    """
    studied: list[tuple[dict[str, Any], str, list[_Tried]]] = []
    for recorded in sources.records:
        trials = _measured(recorded)
        for variant in dict.fromkeys(trial.variant for trial in trials):
            tried: list[_Tried] = [
                (trial.config, trial.median_us[_mode(trial.median_us)])
                for trial in trials
                if trial.variant == variant
            ]
            studied.append((_common(recorded), variant, tried))
    return [
        common
        | {
            "variant": variant,
            "parameter": parameter,
            "importance": round(importance, 4),
            "trials": len(tried),
        }
        for common, variant, tried in studied
        for parameter, importance in _importances(tried).items()
    ]


def _common(recorded: Recorded) -> dict[str, Any]:
    record = recorded.record
    return {
        "op": record.op,
        "gpus": record.problem["world_size"],
        "machine": machine_of_record(record),
        "panel": f"{record.op} {format_problem(record.op, record.problem)}",
        "measured": record.provenance.get("created", "")[:10],
        "source": recorded.source,
    }


def _mode(times: Mapping[str, float]) -> str:
    return "graph" if "graph" in times else "eager"


def _measured(recorded: Recorded) -> list[TrialRecord]:
    """The measured trials of today's kernels, in the order in which they were tried."""
    versions = fingerprints.versions(recorded.record.op)
    return [
        trial
        for trial in recorded.trials
        if trial.state == "measured"
        and not trial.reason  # not disturbed
        and trial.version == versions.get(trial.variant)
    ]


def _importances(trials: Sequence[_Tried]) -> dict[str, float]:
    """Meta-parameter -> importance; nothing where too few trials differ in any."""
    names = list(dict.fromkeys(name for config, _ in trials for name in config))
    values = {
        name: sorted({str(config.get(name)) for config, _ in trials})
        for name in names
        if len({str(config.get(name)) for config, _ in trials}) > 1
    }
    if len(trials) < _LEAST_TRIALS or not values:
        return {}
    choices = {
        name: optuna.distributions.CategoricalDistribution(tuple(choices))
        for name, choices in values.items()
    }
    study = optuna.create_study(direction="minimize")
    for config, us in trials:
        study.add_trial(
            optuna.trial.create_trial(
                params={name: str(config.get(name)) for name in choices},
                distributions=dict(choices),
                value=us,
            )
        )
    with warnings.catch_warnings():  # of few trials, which the page says how many they are
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_FASTEST)
        return optuna.importance.get_param_importances(study, evaluator=evaluator)
