"""A hash of the sources that decide how a variant computes, and how fast.

A measurement is valid only for the code that it was made with. The hash covers a variant's module
and the modules of this package that it imports, directly or not, without comments, docstrings and
empty lines. Interfaces, search spaces and the methods of variants that define what is searched are
left out, because they do not change the measurement of any config. The hash is
computed from the source text, because syntax trees differ between versions of Python. It is the
same for interpreted and compiled kernels.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = "taxfree_kernels"
_LEFT_OUT = ("errors", "hardware", "variant", "base", "operation", "problem", "spaces")
_SEARCHING = ("space", "seed_configs", "unsupported_reason", "prune_reason", "signals")


def kernel_hash(op: str, variant: str) -> str:
    """16 hex digits for a variant of an operation, from its sources as installed."""
    digest = hashlib.sha256()
    for module in sorted(_closure(f"{_PACKAGE}.{op}.{variant}")):
        digest.update(module.encode())
        digest.update(_code(module).encode())
    return digest.hexdigest()[:16]


def _closure(module: str) -> set[str]:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(_imports(module) - seen)
    return seen


@cache
def _imports(module: str) -> set[str]:
    """Modules of this package that a module imports, in any form of import."""
    found = set()
    for node in ast.walk(_syntax_tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(source, module.rpartition(".")[0])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= {name for name in names if _path(name)} or {source}
    return {name for name in found if _counts(name)}


def _counts(module: str) -> bool:
    return module.startswith(f"{_PACKAGE}.") and module.rpartition(".")[2] not in _LEFT_OUT


@cache
def _path(module: str) -> Path | None:
    """File of a module of this package; found without importing anything."""
    below = Path(*module.split(".")[1:])
    for root in importlib.import_module(_PACKAGE).__path__:
        for file in (Path(root, below).with_suffix(".py"), Path(root, below, "__init__.py")):
            if file.is_file():
                return file
    return None


@cache
def _source(module: str) -> str:
    path = _path(module)
    assert path is not None, module
    return path.read_text(encoding="utf-8")


@cache
def _syntax_tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


@cache
def _code(module: str) -> str:
    """The hashed lines of a module."""
    lines = _source(module).splitlines()
    for token in tokenize.generate_tokens(io.StringIO(_source(module)).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(_syntax_tree(module)):
        for first, last in _uncounted(node):
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _uncounted(node: ast.AST) -> Iterator[tuple[int, int]]:
    """First and last lines of a node's parts that are not hashed."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and _is_docstring(body[0]):
        yield body[0].lineno, body[0].end_lineno
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in _SEARCHING:
                yield method.lineno, method.end_lineno or method.lineno


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
