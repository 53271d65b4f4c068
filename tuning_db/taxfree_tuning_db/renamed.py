"""Names that stored documents use and the code no longer does, and what they are called today.

Whoever renames a variant, a key of configs or a field of problems adds the old name here. Every
reader of records, trials, exports, result files and digests of instructions maps what it reads, so
that measurements outlive their names. Old names are never used again for something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PICKED = "variant"  # in configs of rows of the dispatcher: the variant that it picked


@dataclass(frozen=True)
class Renamed:
    """Names of one operation, each old -> new.

    Args:
        variants: of variants.
        config: of the keys of their configs.
        problem: of the fields of its problem.
    """

    variants: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    problem: Mapping[str, str] = field(default_factory=dict)


#: operation -> its old names
RENAMED: dict[str, Renamed] = {
    "flash_decode": Renamed(config={"IN_DATA": "LL"}),
    "matmul_all_reduce": Renamed(config={"IN_DATA": "LL"}),
}

_NONE = Renamed()


def with_new_names(op: object, document: Any) -> Any:
    """A copy of a measurement, trial, row, or record with today's names.

    Args:
        op: the operation it is of; None if that is not known, which renames nothing.
        document: a JSON object, perhaps an invalid one; what is no object is returned as it is.
    """
    names = RENAMED.get(op, _NONE) if isinstance(op, str) else _NONE
    if names is _NONE or not isinstance(document, Mapping):
        return document
    new = dict(document)
    if "variant" in new:
        new["variant"] = _new(new["variant"], names.variants)
    if "config" in new:
        new["config"] = _new_keys(new["config"], names.config)
        if isinstance(new["config"], dict) and _PICKED in new["config"]:
            new["config"][_PICKED] = _new(new["config"][_PICKED], names.variants)
    if "problem" in new:
        new["problem"] = _new_keys(new["problem"], names.problem)
    for part in ("winner", "baseline"):
        if part in new:
            new[part] = with_new_names(op, new[part])
    if isinstance(new.get("runners_up"), list):
        new["runners_up"] = [with_new_names(op, each) for each in new["runners_up"]]
    return new


def former_key(key: str) -> str | None:
    """The key of a record under the old names of its problem's fields, or None if it has none."""
    op = op_of_key(key)
    old = {new: old for old, new in RENAMED.get(op or "", _NONE).problem.items()}
    if not old:
        return None
    document = json.loads(key)
    document["problem"] = _new_keys(document["problem"], old)
    former = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return former if former != key else None


def op_of_key(key: str) -> str | None:
    """The operation of a record's key, or None if it is no such key."""
    try:
        op = json.loads(key)["op"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return op if isinstance(op, str) else None


def _new(name: Any, names: Mapping[str, str]) -> Any:
    return names.get(name, name) if isinstance(name, str) else name


def _new_keys(values: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {names.get(name, name): value for name, value in values.items()}
