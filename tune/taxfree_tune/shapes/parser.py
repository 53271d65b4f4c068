"""From the text of a shape, or a YAML file of them, to problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from taxfree.errors import UsageError
from taxfree.problems import DTYPE_ALIASES, LARGEST, field_specs, quoted
from taxfree_kernels.errors import PlanError
from taxfree_kernels.variant import Problem, operation_names, operation_shapes, problem_class
from taxfree_tune.shapes.text import integer, read_text

Value: TypeAlias = int | str
Axes: TypeAlias = Mapping[str, Sequence[Value]]

_OF_MATMULS = "m=1,16 n=3584 k=8192"
MODEL_SET = "model"
_TWICE = "has a key twice"

_FLAGS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


@dataclass(frozen=True)
class ShapeEntry:
    """A shape that is not parsed yet.

    Args:
        text: the shape.
        op: the operation that it is of; None where it names none.
    """

    text: str
    op: str | None = None


@dataclass(frozen=True)
class Shape:
    """A parsed shape and the text it came from, for messages."""

    text: str
    axes: Axes


def example(op: str | None) -> str:
    """A hint at shapes of an operation; None: of any matmul."""
    shape, name = _example(op)
    short = " --shapes 1,16x3584x8192," if shape == _OF_MATMULS else ""
    return f'for example --shapes "{shape}",{short} --shapes {name}'


def _example(op: str | None) -> tuple[str, str]:
    """A shape of an operation, and one of its sets."""
    shapes = None if op is None else operation_shapes(op)
    if shapes is None or shapes.shorthand == ("m", "n", "k"):
        return _OF_MATMULS, "paper"
    name, (first, *_) = next(iter(shapes.sets.items()))
    return first, name


def _file_example(op: str | None) -> str:
    """A hint at files of shapes of an operation."""
    shape, _ = _example(op)
    fields = (word.split("=") for word in shape.split())
    listed = ((name, f"[{v.replace(',', ', ')}]" if "," in v else v) for name, v in fields)
    mapping = ", ".join(f"{name}: {values}" for name, values in listed)
    return f'a list of shapes: - "{shape}", or - {{{mapping}}}'


class Parser:
    """Reads the shapes of one operation.

    Args:
        op: the operation.
        sets: the named sets it may refer to.
    """

    def __init__(self, op: str, sets: Mapping[str, Sequence[str]]) -> None:
        self._sets, self._example = sets, example(op)
        self._shorthand = operation_shapes(op).shorthand
        self._problem = problem_class(op)
        self._fields = field_specs(self._problem)

    def shapes(self, text: str) -> list[Shape]:
        """Parse the text of a shape; a named set gives several."""
        first, *others = text.split()
        if "=" in first:
            return [Shape(text, self._assignments(text, [first, *others]))]
        assigned = self._assignments(text, others)
        if first in self._sets:
            return [
                Shape(text, self._assignments(shape, shape.split()) | assigned)
                for shape in self._sets[first]
            ]
        return [Shape(text, self._short(text, first) | assigned)]

    def problems(self, shape: Shape, unsaid: Axes) -> list[Problem]:
        """Combine the lists of a shape.

        Args:
            shape: the shape.
            unsaid: values of fields that it may leave out.
        """
        axes = {**unsaid, **shape.axes}
        required = [name for name, spec in self._fields.items() if spec.required]
        if missing := [name for name in required if name not in axes]:
            raise _bad(shape.text, f"lacks {', '.join(missing)}", self._example)
        try:
            return [self._problem(**combined) for combined in _combinations(axes)]
        except PlanError as error:
            raise _bad(shape.text, error.message, error.hint or self._example) from error

    def _assignments(self, text: str, words: Iterable[str]) -> dict[str, Sequence[Value]]:
        axes: dict[str, Sequence[Value]] = {}
        for word in words:
            name, equals, values = word.partition("=")
            name = name.lower()
            if not equals:
                raise _bad(text, f"{quoted(word)} is not field=value", self._example)
            if name not in self._fields:
                raise _bad(text, f"no field {quoted(name)}", f"fields: {', '.join(self._fields)}")
            if name in axes:
                raise _bad(text, f"{name} is given twice", f"write lists as {name}=1,2")
            axes[name] = self._values(text, name, values)
        return axes

    def _short(self, text: str, word: str) -> dict[str, Sequence[Value]]:
        parts = word.split("x")
        if len(parts) != len(self._shorthand) or not re.fullmatch(r"[0-9,x]+", word):
            raise self._unknown(text, word)
        return {
            name: self._values(text, name, part)
            for name, part in zip(self._shorthand, parts, strict=True)
        }

    def _values(self, text: str, name: str, values: str) -> list[Value]:
        return [self._value(text, name, value) for value in values.split(",")]

    def _value(self, text: str, name: str, value: str) -> Value:
        read, wanted = _READERS[self._fields[name].kind]
        parsed = read(value)
        if parsed is None:
            raise _bad(text, f"{name}={quoted(value)} is not {wanted}", self._example)
        return parsed

    def _unknown(self, text: str, word: str) -> UsageError:
        if word == MODEL_SET:
            return _bad(text, "there is no model", "name its config: --model path/to/config.json")
        if of := [op for op in operation_names() if word in operation_shapes(op).sets]:
            return _bad(text, f"{word} is a set of another operation", f"add --op {of[0]}")
        if "," in word and set(word.split(",")) <= self._sets.keys():
            named = " ".join(f"--shapes {name}" for name in word.split(","))
            return _bad(text, "sets are not a list", f"name each: {named}")
        if close := get_close_matches(word.lower(), self._sets, n=1):
            return _bad(text, f"no set or shape {quoted(word)}", f"did you mean {close[0]!r}?")
        short = "x".join(name.upper() for name in self._shorthand)
        known = f"sets: {', '.join(self._sets)}; " if self._sets else ""
        return _bad(text, f"no set or shape {quoted(word)}", f"{known}shorthand: {short or 'none'}")


def _combinations(axes: Axes) -> list[dict[str, Value]]:
    """All combinations, the first field varying slowest."""
    combined: list[dict[str, Value]] = [{}]
    for name, values in axes.items():
        combined = [{**fields, name: value} for fields in combined for value in values]
    return combined


def _flag(text: str) -> bool | None:
    return _FLAGS.get(text.lower())


def _word(text: str) -> str | None:
    return DTYPE_ALIASES.get(text, text) or None


_READERS: Mapping[type, tuple[Callable[[str], Value | None], str]] = {
    int: (integer, f"an integer from 0 to {LARGEST}"),
    bool: (_flag, "0 or 1"),
    str: (_word, "a word"),
}


def _bad(text: str, why: str, hint: str) -> UsageError:
    return UsageError(f"shape {quoted(text)}: {why}", hint)


# -- files --


def entries(argument: str, op: str | None) -> list[ShapeEntry]:
    """The shapes of one argument: those of a YAML file, in its order, or the argument itself.

    Args:
        op: that was asked for, if any.

    Raises:
        UsageError: it is empty, or the file is not a list of shapes.
    """
    if not argument.strip():
        raise UsageError("a shape is empty", example(op))
    if not argument.endswith((".yaml", ".yml")):
        return [ShapeEntry(argument)]
    return _yaml_entries(Path(argument), op)


def _yaml_entries(path: Path, op: str | None) -> list[ShapeEntry]:
    """The entries of a YAML list of shapes; mappings are written out."""
    name, hint = quoted(str(path)), _file_example(op)
    try:
        # The base loader leaves scalars as text: the parser decides what they are.
        document = yaml.load(read_text(path, "shape file"), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        is_ambiguous = getattr(error, "problem", "") == _TWICE
        why = _TWICE if is_ambiguous else "is not YAML"
        raise UsageError(f"shape file {name} {why}", hint) from error
    if not isinstance(document, list) or not document:
        raise UsageError(f"shape file {name} is not a list of shapes", hint)
    return [_entry(name, entry, op) for entry in document]


class _Loader(yaml.BaseLoader):
    """A loader that refuses a key that a mapping has twice: the last would win, unsaid."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(problem=_TWICE)
        return mapping


def _entry(name: str, entry: object, asked: str | None) -> ShapeEntry:
    if isinstance(entry, str) and entry.strip():
        return ShapeEntry(entry)
    if not isinstance(entry, dict) or not entry.keys() - {"op", "calls"}:
        raise UsageError(f"shape file {name}: an entry is not a shape", _file_example(asked))
    op, calls = entry.get("op"), entry.get("calls", "0")
    ops = operation_names()
    if op is not None and op not in ops:
        raise UsageError(
            f"shape file {name}: there is no operation {_shown(op)}", f"one of: {', '.join(ops)}"
        )
    if not isinstance(calls, str) or not re.fullmatch("[0-9]+", calls):
        raise UsageError(
            f"shape file {name}: calls: {_shown(calls)} is not a number of calls",
            "leave calls out: it only says why an entry comes first",
        )
    fields = {key: value for key, value in entry.items() if key not in ("op", "calls")}
    hint = _file_example(op or asked)
    words = (f"{key}={_values_text(name, value, hint)}" for key, value in fields.items())
    return ShapeEntry(" ".join(words), op)


def _shown(value: object) -> str:
    return quoted(value) if isinstance(value, str) else "a list or mapping"


def _values_text(name: str, value: object, hint: str) -> str:
    values = value if isinstance(value, list) else [value]
    texts = [value for value in values if isinstance(value, str)]
    # What is nested is not shown either: a few aliases can stand for gigabytes of text.
    if len(texts) < len(values):
        raise UsageError(f"shape file {name}: an entry is nested too deeply", hint)
    return ",".join(texts)
