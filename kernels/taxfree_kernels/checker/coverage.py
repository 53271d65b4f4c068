"""Which synchronising lines a check has executed, and by whom: without that, a pass says nothing.

A line synchronises when it calls a raw atomic, or a device function that does so, however deep.
The synchronisation functions themselves are left out: what counts is where kernels call them.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from taxfree_kernels.checker.clocks import Actor
from taxfree_kernels.checker.sites import SYNC_FILE, Line, Site
from taxfree_kernels.launch import Kernel

_PROGRAM = "program"  # the name that kernels give to tl.program_id(0)


@dataclass
class Executed:
    """Who has executed a line."""

    ranks: set[int] = field(default_factory=set)
    programs: set[int] = field(default_factory=set)
    calls: set[int] = field(default_factory=set)

    def add(self, other: Executed) -> None:
        self.ranks |= other.ranks
        self.programs |= other.programs
        self.calls |= other.calls


@dataclass(frozen=True)
class Wanted:
    """How much makes a line covered."""

    ranks: int = 2
    programs: int = 2
    calls: int = 3


@dataclass
class Coverage:
    """Synchronising lines, those that can run and those that did."""

    lines: dict[Line, Executed] = field(default_factory=dict)

    def expect(self, kernel: Kernel) -> None:
        """Count the lines that a launch can reach."""
        constants = tuple(sorted(kernel.constants.items()))
        for line in _reachable(kernel.function, constants, kernel.grid):
            self.lines.setdefault(line, Executed())

    def note(self, site: Site, actor: Actor) -> None:
        """Record an atomic access."""
        if actor.program is None:
            return
        for line in site.lines:
            executed = self.lines.get(line)
            if executed is not None:
                executed.ranks.add(actor.rank)
                executed.programs.add(actor.program)
                executed.calls.add(actor.call)

    def add(self, other: Coverage) -> None:
        for line, executed in other.lines.items():
            self.lines.setdefault(line, Executed()).add(executed)

    def missing(self, wanted: Wanted) -> list[tuple[Line, Executed]]:
        """Lines that were executed by too few."""
        return [
            (line, executed)
            for line, executed in sorted(self.lines.items(), key=lambda item: item[0].where)
            if len(executed.ranks) < wanted.ranks
            or len(executed.programs) < wanted.programs
            or len(executed.calls) < wanted.calls
        ]


def jitted(name: str, scope: Mapping[str, Any]) -> Any | None:
    """The device function that a dotted name stands for, or None."""
    first, *rest = name.split(".")
    found = scope.get(first)
    for attribute in rest:
        found = getattr(found, attribute, None)
    return found if hasattr(found, "rewrite") and hasattr(found, "fn") else None


@cache
def _parsed(function: Any) -> tuple[ast.FunctionDef, int]:
    """The definition of a device function, and what to add to its line numbers."""
    lines, first = inspect.getsourcelines(function.fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition, first - 1


def _calls(statements: list[ast.stmt]) -> Iterator[ast.Call]:
    for statement in statements:
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Call))


@cache
def synchronises(function: Any) -> bool:
    """Whether a device function executes atomics, itself or in what it calls."""
    definition, _ = _parsed(function)
    return any(_call_synchronises(call, function) for call in _calls(definition.body))


def _call_synchronises(call: ast.Call, caller: Any) -> bool:
    name = ast.unparse(call.func)
    if name.startswith("tl.atomic_"):
        return True
    callee = jitted(name, caller.fn.__globals__)
    return callee is not None and callee is not caller and synchronises(callee)


@cache
def _reachable(function: Any, constants: tuple[tuple[str, Any], ...], grid: int) -> frozenset[Line]:
    if inspect.getsourcefile(function.fn) == SYNC_FILE:
        return frozenset()
    definition, offset = _parsed(function)
    found: set[Line] = set()
    for call in _calls(_live(definition.body, dict(constants), grid)):
        if not _call_synchronises(call, function):
            continue
        found.add(Line(inspect.getfile(function.fn), call.lineno + offset, function.fn.__name__))
        callee = jitted(ast.unparse(call.func), function.fn.__globals__)
        if callee is not None:
            found |= _reachable(callee, constants, grid)
    return frozenset(found)


def _live(statements: list[ast.stmt], constants: dict[str, Any], grid: int) -> list[ast.stmt]:
    """Statements without the branches that these constants rule out."""
    live: list[ast.stmt] = []
    for statement in statements:
        if not isinstance(statement, ast.If):
            live.append(statement)
            continue
        outcomes = _outcomes(statement.test, constants, grid)
        live.append(ast.Expr(statement.test))
        if True in outcomes:
            live += _live(statement.body, constants, grid)
        if False in outcomes:
            live += _live(statement.orelse, constants, grid)
    return live


def _outcomes(test: ast.expr, constants: dict[str, Any], grid: int) -> set[bool]:
    """What a condition can be, for any program of the launch; both when that is not known."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    if not names <= constants.keys() | {_PROGRAM}:
        return {True, False}
    code = compile(ast.fix_missing_locations(ast.Expression(test)), "<condition>", "eval")
    programs = range(grid) if _PROGRAM in names else range(1)
    return {bool(eval(code, {}, constants | {_PROGRAM: each})) for each in programs}


def table(coverage: Coverage) -> list[tuple[str, str, int, int, int]]:
    """Rows: where, text, ranks, programs, calls."""
    return [
        (line.where, line.text, len(each.ranks), len(each.programs), len(each.calls))
        for line, each in sorted(coverage.lines.items(), key=lambda item: item[0].where)
    ]
