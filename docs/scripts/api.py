"""Writes docs/api.md from the docstrings of ``taxfree.__all__``: `python -m docs.scripts.api`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import taxfree
from taxfree_kernels.variant import Problem

PATH = Path(__file__).parents[1] / "api.md"
_HEAD = """\
# API

<!-- Written by `make docs`: change the docstrings, not this page. -->

All names are in the module `taxfree`, whose version is `taxfree.__version__`. The modules behind it
are no part of the interface.
"""
_GROUPS = {
    "Start": lambda each: not inspect.isclass(each),
    "Runtime": lambda each: each is taxfree.Runtime,
    "A step of a model": lambda each: each is taxfree.ModelStep,
    "Problems": lambda each: issubclass(each, Problem | taxfree.SizeRange),
    "What a runtime tells": dataclasses.is_dataclass,
    "Errors": lambda each: issubclass(each, Exception),
}
_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^([\w, ]+): ", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
_LINE = 90


def document() -> str:
    """The page, as it should be."""
    names = [name for name in taxfree.__all__ if name != "__version__"]
    parts, left = [_HEAD], {name: getattr(taxfree, name) for name in names}
    for title, belongs in _GROUPS.items():
        chosen = {name: each for name, each in left.items() if belongs(each)}
        left = {name: each for name, each in left.items() if name not in chosen}
        parts.append(f"## {title}\n")
        for name, each in chosen.items():
            parts.extend(_class(name, each) if inspect.isclass(each) else _function(name, each))
        if title == "Problems":
            parts.extend(_function("problem.for_rows", Problem.for_rows, level=3))
    assert not left, f"in no group: {sorted(left)}"
    return "\n".join(parts)


def _class(name: str, each: type[Any]) -> Iterator[str]:
    yield f"### `{name}`\n"
    if dataclasses.is_dataclass(each):
        yield _code(_signature(f"taxfree.{name}", each))
    elif issubclass(each, Exception):
        yield f"Derived from `{each.__bases__[0].__name__}`.\n"
    yield _markdown(each)
    for member, found in _members(each):
        if isinstance(found, property | cached_property):
            yield f"#### `{name}.{member}`\n\n{_markdown(found)}"
        else:
            yield from _function(f"{name}.{member}", found, level=4)


def _members(each: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with docstrings, in the order of the source.

    Those of problems, but for ``for_rows``, serve the kernels.
    """
    if issubclass(each, Problem):
        return
    for base in each.__mro__:
        if not base.__module__.startswith("taxfree"):
            continue
        for name, found in vars(base).items():
            if (name.startswith("_") and name != "__call__") or not inspect.getdoc(found):
                continue
            if inspect.isfunction(found) or isinstance(found, property | cached_property):
                yield name, found
            elif isinstance(found, classmethod):
                yield name, found.__func__


def _function(name: str, each: Any, level: int = 3) -> Iterator[str]:
    called = name.split(".")[-1] if "." in name else f"taxfree.{name}"
    yield f"{'#' * level} `{name}`\n"
    yield _code(_signature(called, each))
    yield _markdown(each)


def _signature(name: str, each: Any) -> str:
    """The call, on a line for each argument if it is long."""
    signature = inspect.signature(each)
    given = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    arguments = [str(argument).replace("'", "") for argument in given]
    # Types are strings, which a parameter quotes; defaults that are strings keep their quotes.
    for at, argument in enumerate(given):
        if isinstance(argument.default, str):
            arguments[at] = f"{argument.name}: {argument.annotation} = {argument.default!r}"
        elif repr(argument.default) == "<factory>":
            arguments[at] = f"{argument.name}: {argument.annotation} = {{}}"
    returned = ""
    if signature.return_annotation is not signature.empty and not inspect.isclass(each):
        returned = f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(arguments)}){returned}"
    if len(line) <= _LINE:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returned}"


def _code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def _markdown(each: Any) -> str:
    """A docstring, with its sections as lists."""
    text = _ROLE.sub(r"`\1`", inspect.getdoc(each) or "").replace("``", "`")
    pieces = _SECTION.split(text)
    parts = [pieces[0].strip()]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        block = textwrap.dedent(body).strip("\n")
        heading = {"Args": "Arguments", "Raises": "Errors"}.get(title, title)
        if title == "Returns":
            parts.append(f"**{heading}** {' '.join(block.split())}")
            continue
        entries = re.split(r"\n(?=\S)", block)
        lines = [_ENTRY.sub(r"- `\1`: ", " ".join(entry.split()), count=1) for entry in entries]
        parts.append(f"**{heading}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
