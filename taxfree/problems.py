"""The fields of problems: how they are written, and read from records."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from taxfree.errors import UsageError
from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import Problem, operation_names, problem_class

LARGEST = 2**31 - 1  # of sizes
DTYPE_ALIASES = {"fp16": "float16", "bf16": "bfloat16"}

_ALWAYS_SAID = ("dtype", "world_size")
_DIRECTIONS = ("gather_dim", "scatter_dim")


@dataclass(frozen=True)
class FieldSpec:
    """How one field of a problem is written.

    Args:
        kind: `int`, `bool` or `str`.
        default: the value of a field that is left out; `MISSING` where it must be given.
    """

    kind: type
    default: object

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING


@functools.cache
def field_specs(problem: type[Problem]) -> Mapping[str, FieldSpec]:
    """Return how the fields of a problem dataclass are written."""
    types = get_type_hints(problem)
    return {field.name: FieldSpec(types[field.name], field.default) for field in fields(problem)}


def require_operation(op: str, *others: str) -> None:
    """Check the name of an operation.

    Args:
        others: names that may stand for one.

    Raises:
        UsageError: there is no such operation; the hint names those that there are.
    """
    known = [*operation_names(), *others]
    if op not in known:
        raise UsageError(f"there is no operation {quoted(op)}", f"one of: {', '.join(known)}")


def recorded_problem(op: str, problem: Mapping[str, Any]) -> Problem | None:
    """Return the problem that a record was made for; None if it no longer exists as such.

    Args:
        op: the operation of the record, perhaps one of another version of taxfree.
        problem: the record's fields.
    """
    return with_fields(problem_class(op), problem) if op in operation_names() else None


def with_fields(problem_class: type[Problem], problem: Mapping[str, Any]) -> Problem | None:
    """Return the problem that has exactly these fields; None if they or their types are others."""
    specs = field_specs(problem_class)
    if problem.keys() != specs.keys():
        return None
    if any(type(problem[name]) is not spec.kind for name, spec in specs.items()):
        return None
    try:
        return problem_class(**problem)
    except PlanError:
        return None


def format_problem(op: str, problem: Mapping[str, Any]) -> str:
    """Return a problem as one would type it: without fields that hold the default of their class.

    The dtype and the world size are always said. So is a flash_decode's `v_head_dim`, since it
    never holds its default, which stands for `head_dim`.

    Args:
        op: the operation.
        problem: its fields; a recorded one may have others than today's.
    """
    specs = field_specs(problem_class(op)) if op in operation_names() else {}
    names = [*(name for name in specs if name in problem), *sorted(problem.keys() - specs.keys())]
    said = [
        name
        for name in names
        if name in _ALWAYS_SAID or name not in specs or problem[name] != specs[name].default
    ]
    return " ".join(f"{name}={problem[name]}" for name in said)


def heading(op: str, problem: Mapping[str, Any]) -> str:
    """As `format_problem`, for a table or picture, and always with the direction."""
    directions = {name: problem[name] for name in _DIRECTIONS if name in problem}
    others = {name: value for name, value in problem.items() if name not in directions}
    said = [f"{name}={value}" for name, value in directions.items()]
    return " ".join([*said, format_problem(op, others)])


def quoted(text: str) -> str:
    """A text as messages show it: in quotes, cut where it is long."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
