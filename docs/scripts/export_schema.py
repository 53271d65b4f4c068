"""The JSON Schema of an export, made from the classes of its values.

`export.schema.json` in the package of the tuning database holds it, for editors and other programs.
Imports do not use it: the constructors of the values check more than it can say, such as that times
are finite.

    python -m docs.scripts.export_schema      writes the file
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import taxfree_tuning_db
from taxfree_tuning_db.exchange import EXPORT_MARK, EXPORT_VERSION
from taxfree_tuning_db.records import (
    MODES,
    SCHEMA_VERSION,
    HardwareFingerprint,
    Measurement,
    Record,
    Scalar,
    SoftwareFingerprint,
)

PATH = Path(taxfree_tuning_db.__file__).with_name("export.schema.json")

_COUNT = {"type": "integer", "minimum": 0}
_LEAST_1 = {"type": "integer", "minimum": 1}
_NAME = {"type": "string", "minLength": 1}
_NUMBER = {"type": "number", "minimum": 0}
_NAMED = {"type": "object", "propertyNames": _NAME}
_SCALARS = _NAMED | {"additionalProperties": {"type": ["string", "number", "boolean"]}}
_TIMES = {"type": "object", "propertyNames": {"enum": list(MODES)}, "additionalProperties": _NUMBER}
_OF_TYPE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: _COUNT,
    float: _NUMBER,
    float | None: {"type": ["number", "null"], "minimum": 0},
    dict[str, Scalar]: _SCALARS,
    dict[str, float]: _TIMES,
    dict[str, str]: _NAMED | {"additionalProperties": {"type": "string"}},
    tuple[Measurement, ...]: {"type": "array", "items": {"$ref": "#/$defs/Measurement"}},
}
#: what a field's type does not say
_OF_FIELD: dict[tuple[type, str], dict[str, Any]] = {
    (Measurement, "variant"): _NAME,
    (Measurement, "median_us"): _TIMES | {"minProperties": 1},
    (Measurement, "samples"): _LEAST_1,
    (Record, "op"): _NAME,
    (Record, "problem"): _SCALARS
    | {
        "properties": {"world_size": _LEAST_1, "dtype": _NAME},
        "required": ["world_size", "dtype"],
    },
    (Record, "provenance"): _OF_TYPE[dict[str, str]]
    | {"properties": {"created": {"type": "string", "format": "date-time"}}},
    (Record, "schema"): {"const": SCHEMA_VERSION},
}


def export_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an export."""
    values = (Record, Measurement, HardwareFingerprint, SoftwareFingerprint)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An export of taxfree's tuning database",
        "type": "object",
        "properties": {
            EXPORT_MARK: {"const": EXPORT_VERSION},
            "records": {"type": "array", "items": {"$ref": "#/$defs/Record"}},
        },
        "required": [EXPORT_MARK, "records"],
        "$defs": {cls.__name__: _object(cls) for cls in values},
    }


def _object(cls: type) -> dict[str, Any]:
    types = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    return {
        "description": (cls.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": {name: _OF_FIELD.get((cls, name)) or _of_type(types[name]) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _of_type(kind: Any) -> dict[str, Any]:
    return _OF_TYPE.get(kind) or {"$ref": f"#/$defs/{kind.__name__}"}


def text() -> str:
    """Return the content of the file."""
    return json.dumps(export_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
