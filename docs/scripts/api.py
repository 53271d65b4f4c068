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
    "Start": lambda named: not inspect.isclass(named),
    "Runtime": lambda named: named is taxfree.Runtime,
    "A step of a model": lambda named: named is taxfree.ModelStep,
    "Problems": lambda named: issubclass(named, Problem | taxfree.SizeRange),
    "What a runtime tells": dataclasses.is_dataclass,
    "Errors": lambda named: issubclass(named, Exception),
}
_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^([\w, ]+): ", re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
_LINE, _HEADING = 100, 64
_OF_EACH = "**Errors** `PlanError`: on impossible dimensions.\n"  # problem; said once


def document() -> str:
    """The page, as it should be."""
    names = sorted(name for name in taxfree.__all__ if name != "__version__")
    parts, left = [_HEAD], {name: getattr(taxfree, name) for name in names}
    for title, belongs in _GROUPS.items():
        chosen = {name: named for name, named in left.items() if belongs(named)}
        left = {name: named for name, named in left.items() if name not in chosen}
        parts.append(f"## {title}\n")
        if title == "Problems":
            parts.append(f"{_OF_EACH}")
        for name, named in chosen.items():
            parts.extend(_class(name, named) if inspect.isclass(named) else _function(name, named))
        if title == "Problems":
            parts.extend(_function("problem.for_rows", Problem.for_rows, level=3))
    assert not left, f"in no group: {sorted(left)}"
    return "\n".join(parts)


def _class(name: str, cls: type[Any]) -> Iterator[str]:
    yield f"### `{name}`\n"
    if dataclasses.is_dataclass(cls):
        yield _code(_signature(f"taxfree.{name}", cls))
    derived = f"Of `{cls.__bases__[0].__name__}`. " if issubclass(cls, Exception) else ""
    yield derived + _markdown(cls).replace(f"\n{_OF_EACH}", "")
    for member, named in _members(cls):
        if isinstance(named, property | cached_property):
            yield f"#### `{name}.{member}`\n\n{_markdown(named)}"
        else:
            yield from _function(f"{name}.{member}", named, level=4)


def _members(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with docstrings, in the order of the source.

    Those of problems, but for ``for_rows``, serve the kernels.
    """
    if issubclass(cls, Problem):
        return
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("taxfree"):
            continue
        for name, member in vars(base).items():
            if (name.startswith("_") and name != "__call__") or not inspect.getdoc(member):
                continue
            if inspect.isfunction(member) or isinstance(member, property | cached_property):
                yield name, member
            elif isinstance(member, classmethod):
                yield name, member.__func__


def _function(name: str, function: Any, level: int = 3) -> Iterator[str]:
    whole, called = (name, name.split(".")[-1]) if "." in name else (f"taxfree.{name}",) * 2
    heading = _signature(whole, function)
    is_short = len(heading) <= _HEADING
    yield f"{'#' * level} `{heading if is_short else name}`\n"
    if not is_short:
        yield _code(_signature(called, function))
    yield _markdown(function)


def _signature(name: str, called: Any) -> str:
    """The call; its arguments are on lines of their own if it is long."""
    signature = inspect.signature(called)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    arguments = ", ".join(map(_argument, parameters))
    returned = ""
    if signature.return_annotation is not signature.empty and not inspect.isclass(called):
        returned = f" -> {signature.return_annotation}"
    line = f"{name}({arguments}){returned}"
    if len(line) <= _LINE:
        return line
    kept = re.sub(r"(?<=[^,]) (?!\w+: )", "\0", arguments)  # a line ends behind an argument
    wrapped = textwrap.fill(
        kept, _LINE, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
    return f"{name}(\n{wrapped},\n){returned}".replace("\0", " ")


def _argument(parameter: inspect.Parameter) -> str:
    """Types are strings, which a parameter quotes; defaults that are strings keep their quotes."""
    if isinstance(parameter.default, str):
        return f"{parameter.name}: {parameter.annotation} = {parameter.default!r}"
    if repr(parameter.default) == "<factory>":
        return f"{parameter.name}: {parameter.annotation} = {{}}"
    return str(parameter).replace("'", "")


def _code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def _markdown(documented: Any) -> str:
    """A docstring: its arguments as a list, what it returns and raises as paragraphs."""
    text = _ROLE.sub(r"`\1`", inspect.getdoc(documented) or "").replace("``", "`")
    pieces = _SECTION.split(text)
    parts = [pieces[0].strip()]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        block = textwrap.dedent(body).strip("\n")
        entries = [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", block)]
        if title == "Args":
            parts.append("\n".join(_ENTRY.sub(r"- `\1`: ", entry, count=1) for entry in entries))
        elif title == "Raises":
            named = (_ENTRY.sub(r"`\1`: ", entry, count=1).rstrip(".") for entry in entries)
            parts.append(f"**Errors** {'. '.join(named)}.")
        else:
            parts.append(f"**Returns** {' '.join(entries)}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
