"""Mutants of device functions: one synchronising construct deleted or weakened in each.

They test the checker: a mutant that it misses is a mistake that it would miss in a new kernel too.
A mutant is made from the function's syntax tree and replaces what the interpreter runs, so every
kernel that calls the function gets it; files and modules are not changed.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from triton.runtime.interpreter import FunctionRewriter

from taxfree_check.checker.coverage import call_synchronises, calls_in, definition_in, parsed
from taxfree_check.checker.sites import SYNC_FILES, Line

_WEAKER = {
    "acquire": ("relaxed",),
    "release": ("relaxed",),
    "acq_rel": ("acquire", "release"),
    "sys": ("gpu",),
    "gpu": ("cta",),
}
# Arguments that mutants change, by the function's name after the last dot: position -> meaning.
_CHANNEL, _PEER, _AREA = 1, 2, 1
_PROGRAMS = 1  # of `arrive`
_SIGNALS = {"signal", "signal_by_chiplet"}
_PLACES = {
    "signal": {_CHANNEL: "channel", _PEER: "peer"},
    "wait": {_CHANNEL: "channel", _PEER: "source"},
    "translate": {_PEER: "peer"},
    "_area_of": {_AREA: "area"},
}
_PEERS = {"signal": 0, "wait": 0, "translate": 1}  # the position of `peers`

# These run only after a wait has timed out, which the tests of lost peers cover.
_AFTER_TIMEOUT = ("abort", "_abort_on_signals", "_abort_on_words")

Change = tuple[str, ast.AST | None]  # description, and replacement of the node


@dataclass(frozen=True)
class Mutant:
    """A device function with one change.

    Args:
        function: the interpreted function.
        line: the changed line.
        change: in words.
        node: index of the node in the function's tree, in walking order.
        replacement: of the node; None deletes a statement.
    """

    function: Any
    line: Line
    change: str
    node: int
    replacement: ast.AST | None

    def __str__(self) -> str:
        return f"{self.line.where} {self.line.function}: {self.change}"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context, the interpreter runs the mutant."""
        rewriter = FunctionRewriter(self.function.fn, **self.function.kwargs)
        rewriter.ast_transformer = _Mutating(self, rewriter.ast_transformer)
        known, original = type(self.function).rewritten_fn, self.function.rewrite()
        known[self.function.fn] = rewriter.rewrite_ast()
        try:
            yield
        finally:
            known[self.function.fn] = original


def mutants(functions: Sequence[Any]) -> Iterator[Mutant]:
    """All mutants of interpreted functions."""
    for function in functions:
        definition, offset = parsed(function)
        noting = set(_noting(definition))
        for index, node in enumerate(ast.walk(definition)):
            for change, replacement in () if node in noting else _changes(node, function):
                number = offset + getattr(node, "lineno", definition.lineno)
                line = Line(inspect.getfile(function.fn), number, function.fn.__name__)
                yield Mutant(function, line, change, index, replacement)


def _noting(definition: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes that record timelines: the build that is checked has none."""
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and "TIMELINE" in ast.unparse(node.test):
            yield from ast.walk(node)


class _Mutating(ast.NodeTransformer):
    """Mutates the tree before the interpreter's own transformation."""

    def __init__(self, mutant: Mutant, original: Any) -> None:
        self._mutant, self._original = mutant, original

    def visit_Module(self, tree: ast.Module) -> Any:
        self._target = list(ast.walk(definition_in(tree)))[self._mutant.node]
        return self._original.visit(ast.fix_missing_locations(self.generic_visit(tree)))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Module) or node is not self._target:
            return super().generic_visit(node)
        replacement = copy.deepcopy(self._mutant.replacement) or ast.Pass()
        return ast.copy_location(replacement, node)


# -- changes -------------------------------------------------------------------------------------


def _changes(node: ast.AST, function: Any) -> Iterator[Change]:
    match node:
        case ast.Call():
            yield from _changes_of_call(node, function)
        case ast.Expr(value=ast.Call() as call) if _is_synchronising(call, function):
            yield f"{_name(call)}(...) deleted", None
            if _name(call) == "store":
                yield "part of each word stored", _partly_stored(call)
        case ast.While():
            yield "no polling loop", _with(node, test=ast.Constant(False))
            if "lead < 0" in ast.unparse(node.test):
                yield "polls for the previous generation", _with(node, test=_one_earlier(node.test))
        case ast.Compare() if _makes_mask(function):
            yield from _narrower(node)
        case ast.BinOp():
            yield from _changes_of_arithmetic(node, function)
        case ast.Expr(value=ast.Call(args=[_, ast.Constant(value=0)]) as call):
            if _name(call) == "store":
                yield f"{_short(call)} deleted", None
        case ast.For():
            yield from _changes_of_loop(node)
        case ast.FunctionDef() | ast.If():
            yield from _signals_first(node)


def _changes_of_call(call: ast.Call, function: Any) -> Iterator[Change]:
    name = _name(call)
    yield from _weaker_constants(call)
    if ast.unparse(call.func) == "tl.sum" and inspect.getsourcefile(function.fn) in SYNC_FILES:
        first = ast.Attribute(ast.Name("tl", ast.Load()), "min", ast.Load())
        yield "content with one of the words", _with(call, func=first)
    if name in ("wait", "wait_for_rows", "wait_for_channels", "gdc_wait"):
        yield f"{name}(...) deleted", ast.Constant(True)
    if name == "arrive":
        fewer = ast.BinOp(call.args[_PROGRAMS], ast.Sub(), ast.Constant(1))
        yield "arrive: one program fewer", _with_argument(call, _PROGRAMS, fewer)
        yield "arrive: not only the last", ast.BinOp(call, ast.BitOr(), ast.Constant(True))
    if _is_synchronising(call, function):
        yield from _other_generations(call)
    for position, what in _PLACES.get(name, {}).items():
        nothing = _product(call.args[position], 0)
        if what in ("channel", "area"):
            yield f"{name}: {what} 0", _with_argument(call, position, nothing)
        else:
            own_rank = ast.Attribute(call.args[_PEERS[name]], "rank", ast.Load())
            own_rank_only = ast.BinOp(nothing, ast.Add(), own_rank)
            yield f"{name}: own rank as {what}", _with_argument(call, position, own_rank_only)
    match call.func:
        case ast.Attribute(value=whose, attr="to") if _last_name(whose) in ("rank", "source"):
            yield f"the block of {_last_name(whose)} 0", _product(call, 0)


def _weaker_constants(call: ast.Call) -> Iterator[Change]:
    for position, argument in enumerate(call.args):
        for weaker in _weaker(argument):
            change = f"{_name(call)}: {ast.unparse(argument)} -> {weaker.value!r}"
            yield change, _with_argument(call, position, weaker)
    for position, keyword in enumerate(call.keywords):
        for weaker in _weaker(keyword.value):
            keywords = list(call.keywords)
            keywords[position] = ast.keyword(keyword.arg, weaker)
            change = f"{_name(call)}: {ast.unparse(keyword)} -> {weaker.value!r}"
            yield change, _with(call, keywords=keywords)


def _weaker(value: ast.expr) -> list[ast.Constant]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [ast.Constant(weaker) for weaker in _WEAKER.get(value.value, ())]
    return []


def _other_generations(call: ast.Call) -> Iterator[Change]:
    for position, argument in enumerate(call.args):
        for sign in "-+":
            match ast.unparse(argument):
                case "generation" | "peers.generation" as generation:
                    text = f"{generation} {sign} 1"
                case "peers":
                    text = f"peers._replace(generation=peers.generation {sign} 1)"
                case _:
                    continue
            other = ast.parse(text, mode="eval").body
            yield f"{_name(call)}: generation {sign} 1", _with_argument(call, position, other)


def _changes_of_arithmetic(node: ast.BinOp, function: Any) -> Iterator[Change]:
    match node:
        case ast.BinOp(op=ast.Mod()) if _last_name(node.left) == "generation":
            yield "one payload slot", _with(node, right=ast.Constant(1))
        case ast.BinOp(op=ast.Mod(), right=ast.Constant(value=3)):
            yield "two slots of Lamport words", _with(node, right=ast.Constant(2))
        case ast.BinOp(op=ast.LShift()) if _last_name(node.left) == "generation":
            one = ast.BinOp(_product(node.left, 0), ast.Add(), ast.Constant(1))
            yield "a flag of constant value", _with(node, left=one)
        case ast.BinOp(op=ast.BitOr()) if _makes_mask(function):
            yield f"{_short(node)}: only the left side", node.left
            yield f"{_short(node)}: only the right side", node.right
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            if inspect.getsourcefile(function.fn) in SYNC_FILES:
                yield f"{_short(node)}: without the 1", node.left


def _makes_mask(function: Any) -> bool:
    """Whether a function computes a mask of peers; masks of other functions are of tiles."""
    definition, _ = parsed(function)
    return any(
        _name(call) in ("signal", "wait") and "mask" in [keyword.arg for keyword in call.keywords]
        for call in calls_in(definition)
    )


def _narrower(node: ast.Compare) -> Iterator[Change]:
    """A wait for fewer peers: the comparison leaves out one more value."""
    right = node.comparators[0]
    match node.ops[0]:
        case ast.Lt():
            narrow = ast.BinOp(right, ast.Sub(), ast.Constant(1))
        case ast.Gt() | ast.GtE():
            narrow = ast.BinOp(right, ast.Add(), ast.Constant(1))
        case _:
            return
    changed = _with(node, comparators=[narrow])
    yield f"{_short(node)}: {ast.unparse(changed)}", changed


def _one_earlier(test: ast.expr) -> ast.expr:
    """A test of `lead < 0` that accepts the generation before."""
    changed = copy.deepcopy(test)
    for node in ast.walk(changed):
        if isinstance(node, ast.Compare) and ast.unparse(node) == "lead < 0":
            node.comparators = [ast.Constant(-1)]
    return changed


def _partly_stored(call: ast.Call) -> ast.stmt:
    """A store of two bytes of each word."""
    words, word = (ast.unparse(arg) for arg in call.args)
    parts = f"tl.cast({words}, tl.pointer_type(tl.int16))"
    return ast.parse(f"tl.store({parts}, ({word}).to(tl.int16))").body[0]


def _signals_first(node: ast.FunctionDef | ast.If) -> Iterator[Change]:
    """The signal before the data that it announces."""
    called = [{_name(call) for call in calls_in(statement)} for statement in node.body]
    stores = [
        index for index, names in enumerate(called) if "copy" in names and not names & _SIGNALS
    ]
    signals = [
        index
        for index, statement in enumerate(node.body)
        if isinstance(statement, ast.Expr | ast.If) and called[index] & _SIGNALS
    ]
    if stores and signals:
        body = [statement for statement in node.body if statement is not node.body[stores[0]]]
        body.insert(signals[0], node.body[stores[0]])
        yield "signal before the data", _with(node, body=body)


def _changes_of_loop(node: ast.For) -> Iterator[Change]:
    """Units that are counted too early, or without their program; sums in an order of one's own."""
    for index, (units, counted) in enumerate(pairwise(node.body)):
        if isinstance(units, ast.While) and "count_units(" in ast.unparse(counted):
            one = ast.parse(ast.unparse(counted).replace("units + 1", "1")).body
            early = [*one, _with(units, body=[*one, *units.body])]
            body = [*node.body[:index], *early, *node.body[index + 2 :]]
            yield "units are counted before they are done", _with(node, body=body)
    if any(_name(call) == "count_units" for call in calls_in(node)):
        text = ast.unparse(node)
        without = text.replace("units + 1, GROUP", "units, GROUP")
        without = without.replace("first + programs", "first")
        if without != text:
            yield "programs do not count themselves", ast.parse(without).body[0]
    match node:
        case ast.For(target=ast.Name("source"), iter=ast.Call(args=[count])):
            if "receive(" in (text := ast.unparse(node)) and "+=" in text:
                own_first = f"source = (source + peers.rank) % ({ast.unparse(count)})"
                body = [*ast.parse(own_first).body, *node.body]
                yield "the sum begins with the own rank", _with(node, body=body)


def _is_synchronising(call: ast.Call, function: Any) -> bool:
    return ast.unparse(call.func) not in _AFTER_TIMEOUT and call_synchronises(call, function)


def _name(call: ast.Call) -> str:
    return _last_name(call.func)


def _last_name(node: ast.AST) -> str:
    """`rank` of `peers.rank`."""
    return ast.unparse(node).rpartition(".")[2]


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 50 else f"{text[:47]}..."


def _product(value: ast.expr, factor: int) -> ast.expr:
    return ast.BinOp(value, ast.Mult(), ast.Constant(factor))


def _with_argument(call: ast.Call, position: int, value: ast.expr) -> ast.Call:
    arguments = list(call.args)
    arguments[position] = value
    return _with(call, args=arguments)


def _with(node: Any, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
