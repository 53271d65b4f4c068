"""Former names in stored documents, and the current name of each; fields that problems lacked.

A change that renames a variant, a key of configs or a field of problems adds the old name here, one
that makes a key of configs a constant adds the constant, and one that adds a field to problems adds
it with the value that all earlier problems have. Every reader of records, trials, exports and
result files maps old names to new ones, so measurements outlive their names. An old name never gets
another meaning. A config with another value than today's constant is of version 0. The same readers
replace the hashes of kernels' sources that older files have by versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .hashes import VERSIONS

_PICKED = "variant"  # in a config of a dispatcher's row: the variant that it chose


@dataclass(frozen=True)
class Renamed:
    """Old -> new names of one operation: of variants, keys of configs, fields of problems.

    Args:
        constants: variant -> keys that its configs had -> their values now.
        added: fields of problems that older documents lack -> their value there.
    """

    variants: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    problem: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    added: Mapping[str, str | int | bool] = field(default_factory=dict)


#: of kernels that overlap with the next one, and with the one before if weights are static
_OVERLAPPING = {"LAUNCH_NEXT": True, "PREFETCH_WEIGHT": True}
_NOT_FP8_CACHE = {"kv_scales": "none"}
_NOT_FP8: Mapping[str, str | int | bool] = {
    "x_dtype": "same",
    "scales": "none",
    "fast_accumulation": False,
}

#: operation -> its old names
RENAMED: dict[str, Renamed] = {
    "all_gather_matmul": Renamed(
        config={"CHUNKS_PER_WAIT": "SHARDS_PER_WAIT"},
        constants={
            "one_shot": {"SEND_BLOCK": 8192},
            "overlap": {"CHUNKS": 1},
            "push_specialized": _OVERLAPPING,
        },
        added=_NOT_FP8,
    ),
    "attention": Renamed(added=_NOT_FP8_CACHE),
    "flash_decode": Renamed(
        variants={"library": "splits"}, config={"IN_DATA": "LL"}, added=_NOT_FP8_CACHE
    ),
    "decode_step": Renamed(
        constants={"kernel": {"GROUPS": 2, "WORDS": 0}},
        added={"x_dtype": "same", "scales": "none"},
    ),
    "matmul_all_reduce": Renamed(
        config={"IN_DATA": "LL"},
        constants={"push_two_shot_lamport_specialized": _OVERLAPPING},
        added={**_NOT_FP8, "out_scales": "none", "fp8_wire": False},
    ),
    "matmul_reduce_scatter": Renamed(
        constants={
            "overlap": {"CHUNKS": 1, "CHUNKS_PER_WAIT": 1},
            "push_lamport_specialized": _OVERLAPPING,
        },
        added={**_NOT_FP8, "fp8_wire": False},
    ),
}

_NONE = Renamed()


def with_new_names(op: object, document: Any) -> Any:
    """Return a copy of a measurement, trial, row or record with current names, and a version.

    Args:
        op: the operation; if it is unknown, no variant, parameter or field is renamed.
        document: a JSON object, perhaps an invalid one; anything else is returned as it is.
    """
    names = RENAMED.get(op, _NONE) if isinstance(op, str) else _NONE
    if not isinstance(document, Mapping):
        return document
    new = dict(map(_with_version, document.items()))
    if "variant" in new:
        new["variant"] = _new(new["variant"], names.variants)
    if "config" in new:
        new["config"] = _new_keys(new["config"], names.config)
        if isinstance(new["config"], dict):
            _take_constants(new, names)
    if "problem" in new:
        new["problem"] = _new_keys(new["problem"], names.problem)
        if isinstance(new["problem"], dict):
            new["problem"] |= {k: v for k, v in names.added.items() if k not in new["problem"]}
    for part in ("winner", "baseline"):
        if part in new:
            new[part] = with_new_names(op, new[part])
    if isinstance(new.get("runners_up"), list):
        new["runners_up"] = [with_new_names(op, runner_up) for runner_up in new["runners_up"]]
    return new


def former_key(key: str) -> str | None:
    """Return a record's key with its problem's fields as they were; None if they were the same."""
    names = RENAMED.get(op_of_key(key) or "", _NONE)
    old = {new: old for old, new in names.problem.items()}
    if not (old or names.added):
        return None
    document = json.loads(key)
    problem = document["problem"]
    if any(problem.get(name) != value for name, value in names.added.items()):
        return None  # there was no such problem
    document["problem"] = {
        old.get(name, name): value for name, value in problem.items() if name not in names.added
    }
    former = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return former if former != key else None


def op_of_key(key: str) -> str | None:
    """Return the operation of a record's key; None if it is not such a key."""
    try:
        op = json.loads(key)["op"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return op if isinstance(op, str) else None


def _with_version(item: tuple[Any, Any]) -> tuple[Any, Any]:
    name, value = item
    if name != "kernel_hash" or not isinstance(value, str):
        return item
    return "version", VERSIONS.get(value, 0) if value else None  # a row without a kernel of ours


def _take_constants(new: dict[str, Any], names: Renamed) -> None:
    """Replace the variant that a dispatcher's row picked, and take constants out of a config."""
    config = new["config"]
    if _PICKED in config:
        config[_PICKED] = _new(config[_PICKED], names.variants)
    name = config.get(_PICKED, new.get("variant"))
    constants = names.constants.get(name, {}) if isinstance(name, str) else {}
    others = [key for key, value in constants.items() if config.pop(key, value) != value]
    if others and "version" in new:
        new["version"] = 0


def _new(name: Any, names: Mapping[str, str]) -> Any:
    return names.get(name, name) if isinstance(name, str) else name


def _new_keys(values: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {names.get(name, name): value for name, value in values.items()}
