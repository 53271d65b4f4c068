"""Coverage of synchronising lines: without it, a pass says nothing.

A line synchronises when it calls a raw atomic, accesses LL packets or Lamport words, or calls a
device function that does so, at any depth. The lines of ``device/sync.py`` are left out: the calls
of its functions count.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from taxfree_check.checker.clocks import Actor
from taxfree_check.checker.launches import interpreted, is_device_function
from taxfree_check.checker.sites import Line, Site, is_primitive
from taxfree_kernels.device import sync

_PROGRAM = "program"  # the name that kernels give to tl.program_id(0)
_GLOBALS = {"sync": sync}  # modules with constants


@dataclass
class Executed:
    """The ranks, programs and calls that have executed a line.

    Args:
        most_programs: number of programs of one launch that can reach it.
    """

    ranks: set[int] = field(default_factory=set)
    programs: set[int] = field(default_factory=set)
    calls: set[int] = field(default_factory=set)
    most_programs: int = 0

    def add(self, other: Executed) -> None:
        self.ranks |= other.ranks
        self.programs |= other.programs
        self.calls |= other.calls
        self.most_programs = max(self.most_programs, other.most_programs)


@dataclass(frozen=True)
class Wanted:
    """How many ranks, programs and calls make a line covered.

    If fewer programs can reach it, these suffice: a protocol may have a single program that sends.
    """

    ranks: int = 2
    programs: int = 2
    calls: int = 3


@dataclass
class Coverage:
    """Synchronising lines that can run, and who has executed them."""

    lines: dict[Line, Executed] = field(default_factory=dict)
    has_launches: bool = False

    def expect(self, function: Any, constants: Mapping[str, Any], programs: int) -> None:
        """Count the lines that a launch can reach; of kernels without peers there are none."""
        self.has_launches = True
        fixed = tuple(
            sorted((name, value) for name, value in constants.items() if _is_fixed(value))
        )
        for line, reaching in _reachable(function, fixed, range(programs)).items():
            executed = self.lines.setdefault(line, Executed())
            executed.most_programs = max(executed.most_programs, reaching)

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
        self.has_launches |= other.has_launches
        for line, executed in other.lines.items():
            self.lines.setdefault(line, Executed()).add(executed)

    def by_place(self) -> list[tuple[Line, Executed]]:
        return sorted(self.lines.items(), key=lambda item: item[0].where)

    def missing(self, wanted: Wanted) -> list[tuple[Line, Executed]]:
        """Lines that too few have executed."""
        return [
            (line, executed)
            for line, executed in self.by_place()
            if len(executed.ranks) < wanted.ranks
            or len(executed.programs) < min(wanted.programs, executed.most_programs)
            or len(executed.calls) < wanted.calls
        ]


def _callee(call: ast.Call, caller: Any) -> Any | None:
    """The device function that a device function calls, or None."""
    first, *rest = ast.unparse(call.func).split(".")
    value = caller.fn.__globals__.get(first)
    for attribute in rest:
        value = getattr(value, attribute, None)
    return interpreted(value) if is_device_function(value) else None


def parsed(function: Any) -> tuple[ast.FunctionDef, int]:
    """The definition of a device function, and the offset of its line numbers."""
    return _parsed(function.fn)  # compiled device functions have no cheap hash


@cache
def _parsed(function: Any) -> tuple[ast.FunctionDef, int]:
    lines, first = inspect.getsourcelines(function)
    return definition_in(ast.parse(textwrap.dedent("".join(lines)))), first - 1


def definition_in(tree: ast.Module) -> ast.FunctionDef:
    """The function that a module consists of, without decorators, as the interpreter sees it."""
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    return definition


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    """All calls below a node."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@cache
def _synchronises(function: Any) -> bool:
    definition, _ = parsed(function)
    return any(call_synchronises(call, function) for call in calls_in(definition))


def call_synchronises(call: ast.Call, caller: Any) -> bool:
    """Whether a call accesses a synchronisation word, itself or in a device function it calls."""
    name = ast.unparse(call.func)
    if name.startswith("tl.atomic_"):
        return True
    if name == "tl.inline_asm_elementwise":
        return re.search(r"\b(atom|red|ld|st)\b[.]", ast.unparse(call)) is not None
    how = [
        keyword.value for keyword in call.keywords if keyword.arg in ("volatile", "cache_modifier")
    ]
    if name in ("tl.load", "tl.store") and any(isinstance(value, ast.Constant) for value in how):
        return True
    callee = _callee(call, caller)
    return callee is not None and callee is not caller and _synchronises(callee)


Programs = Sequence[int]  # ids


def _is_fixed(value: Any) -> bool:
    """Whether a constant can be a key."""
    return isinstance(value, bool | int | float | str | tuple | None)


@cache
def _reachable(
    function: Any, constants: tuple[tuple[str, Any], ...], programs: Programs
) -> Mapping[Line, int]:
    """Lines that some of these programs can reach -> how many can."""
    if is_primitive(inspect.getfile(function.fn)):
        return {}
    definition, offset = parsed(function)
    bindings = dict(constants)
    counts: dict[Line, int] = {}
    for statement, reaching in _live(definition.body, bindings, programs):
        for call in calls_in(statement):
            if not call_synchronises(call, function):
                continue
            line = Line(inspect.getfile(function.fn), call.lineno + offset, function.fn.__name__)
            callee = _callee(call, function)
            reached: Mapping[Line, int] = {}
            if callee is not None and not is_primitive(inspect.getfile(callee.fn)):
                reached = _reachable(callee, _handed_on(call, callee, bindings), reaching)
                if not reached:  # what it is given rules out all that synchronises in it
                    continue
            reached = {**reached, line: len(reaching)}
            for line, count in reached.items():
                counts[line] = max(counts.get(line, 0), count)
    return counts


def _handed_on(
    call: ast.Call, callee: Any, bindings: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """The constants that a call gives to a device function."""
    parameters = inspect.signature(callee.fn).parameters
    bound = {name: parameter.default for name, parameter in parameters.items()}
    bound |= {
        name: _value(argument, bindings)
        for name, argument in zip(parameters, call.args, strict=False)
    }
    bound |= {str(keyword.arg): _value(keyword.value, bindings) for keyword in call.keywords}
    return tuple(sorted((name, value) for name, value in bound.items() if value is not _UNKNOWN))


def _live(
    statements: list[ast.stmt], bindings: dict[str, Any], programs: Programs
) -> Iterator[tuple[ast.stmt, Programs]]:
    """Statements that known constants do not rule out, with the programs that can reach them."""
    for statement in statements:
        if isinstance(statement, ast.For | ast.While):
            head = statement.iter if isinstance(statement, ast.For) else statement.test
            yield ast.Expr(head), programs
            yield from _live([*statement.body, *statement.orelse], bindings, programs)
            continue
        if not isinstance(statement, ast.If):
            if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                bindings[ast.unparse(statement.target)] = _value(statement.value, bindings)
            yield statement, programs
            continue
        yield ast.Expr(statement.test), programs
        holding = _holding(statement.test, bindings, programs)
        for outcome, branch in ((True, statement.body), (False, statement.orelse)):
            reaching = tuple(program for program, can_be in holding if outcome in can_be)
            if reaching:
                yield from _live(branch, bindings, reaching)


def _holding(
    test: ast.expr, bindings: dict[str, Any], programs: Programs
) -> list[tuple[int, set[bool]]]:
    """The outcomes that a condition may have, for each program."""
    values = ((program, _value(test, bindings | {_PROGRAM: program})) for program in programs)
    return [
        (program, {True, False} if value is _UNKNOWN else {bool(value)})
        for program, value in values
    ]


_UNKNOWN = inspect.Parameter.empty


def _value(expression: ast.expr, bindings: Mapping[str, Any]) -> Any:
    """The value of an expression of constants, or _UNKNOWN; a part may decide `or` and `and`."""
    if isinstance(expression, ast.BoolOp):
        decisive = isinstance(expression.op, ast.Or)
        parts = (_value(value, bindings) for value in expression.values)
        if any(part is not _UNKNOWN and bool(part) is decisive for part in parts):
            return decisive
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    scope = {name: value for name, value in bindings.items() if value is not _UNKNOWN} | _GLOBALS
    if not names <= scope.keys():
        return _UNKNOWN
    code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<constant>", "eval")
    return eval(code, {}, scope)
