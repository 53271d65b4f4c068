"""Reads what `explain --json` printed and `explain --trace` wrote, to show it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taxfree._runtime.dispatch import Choice
from taxfree.errors import UsageError
from taxfree.files import read_json
from taxfree_tune.measuring.bounds import Bounds
from taxfree_tune.measuring.results import Skipped
from taxfree_tune.profiling.explain import Explanation, Pipeline
from taxfree_tune.profiling.timeline import Timeline
from taxfree_tune.taxes import Account, Part
from taxfree_tuning_db.renamed import with_new_names

_HINT = "give a file of `taxfree explain --json` or `taxfree explain --trace`"
_BOUNDS = ("t_floor_us", "t_link_us", "t_gemm_us")


@dataclass(frozen=True)
class SavedTimelines:
    """One call of each pipeline of a problem.

    Args:
        op, problem: what was called.
        hardware: the device's name.
        timelines: by pipeline, the baseline first.
    """

    op: str
    problem: dict[str, Any]
    hardware: str
    timelines: tuple[Timeline, ...]


@dataclass(frozen=True)
class Saved:
    """The content of a file.

    Args:
        created: when it was measured, in ISO 8601; empty for models.
        explanations: by problem, without the measurements behind their accounts.
        timelines: by problem.
    """

    created: str
    explanations: tuple[Explanation, ...]
    timelines: tuple[SavedTimelines, ...]


def load(path: Path) -> Saved:
    """Read a file of `explain --json` or `explain --trace`.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    document = read_json(path, _HINT)
    try:
        saved = Saved(
            str(document["environment"].get("created", "")),
            () if "pictures" in document else _explanations(document),
            tuple(map(_timelines, document.get("pictures", ()))),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        saved = Saved("", (), ())
    if not (saved.explanations or saved.timelines):
        raise UsageError(f"{path} is no saved explanation", _HINT)
    return saved


def _timelines(call: Mapping[str, Any]) -> SavedTimelines:
    timelines, call = tuple(map(Timeline.from_json, call["timelines"])), _of_today(call)
    return SavedTimelines(call["op"], call["problem"], call["hardware"], timelines)


def _explanations(document: Mapping[str, Any]) -> tuple[Explanation, ...]:
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in map(_of_today, document["rows"]):
        problems.setdefault(_key(row), []).append(row)
    choices = {_key(choice): choice for choice in map(_of_today, document.get("dispatch", ()))}
    skipped = [Skipped(**fields) for fields in map(_of_today, document.get("skipped", ()))]
    return tuple(
        Explanation(
            rows[0]["op"],
            rows[0]["problem"],
            rows[0]["hardware"],
            Bounds(*(rows[0][name] for name in _BOUNDS)),
            tuple(map(_pipeline, rows)),
            tuple(
                pipeline
                for pipeline in skipped
                if (pipeline.op, pipeline.problem) == _named(rows[0])
            ),
            _choice(choices.get(key)),
            (),
        )
        for key, rows in problems.items()
    )


def _of_today(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the names and the fields of problems that it would have today."""
    new: dict[str, Any] = with_new_names(entry["op"], entry)
    return new


def _named(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return row["op"], row["problem"]


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps(_named(row), sort_keys=True)


def _choice(fields: Mapping[str, Any] | None) -> Choice | None:
    if fields is None:
        return None
    return Choice(
        fields["kind"],
        fields["variant"],
        fields["config"],
        fields["why"],
        _choice(fields.get("eager")),
        fields.get("lender", ""),
    )


def _pipeline(row: Mapping[str, Any]) -> Pipeline:
    parts = [Part(**fields) for fields in row["parts"]]
    others = [rank for rank in row.get("ranks", ()) if rank["rank"] != row["rank"]]
    accounts = [_account(row, parts, row.get("unsplit", ""))]
    for rank in others:
        own_parts = [
            Part(part.name, part.tax, rank["parts"][part.name], None, "") for part in parts
        ]
        accounts.append(_account(rank, own_parts))
    return Pipeline(
        row["variant"],
        row["config"],
        row["is_dispatched"],
        row["kernels"],
        tuple(sorted(accounts, key=lambda account: account.rank)),
        None,
        row.get("signals"),
    )


def _account(row: Mapping[str, Any], parts: list[Part], unsplit: str = "") -> Account:
    return Account(
        row["rank"],
        row["t_eager_us"],
        row["t_graph_us"],
        row["t_bound_us"],
        tuple(parts),
        row["residual_iqr_us"],
        unsplit,
        row.get("kernel_us"),
        row.get("t_eager_iqr_us"),
        row.get("no_account") or "",
    )
