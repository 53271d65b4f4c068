"""Counts, by layer, of what ran taxfree's operations and what ran the library, and why."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from taxfree._runtime.runtime import Runtime

_COMPILED = "taxfree\t"  # of counters of Inductor, which its cache stores with a graph
_layers: dict[str, Counter[str]] = {}
_runtimes: dict[str, Runtime] = {}


@dataclass(frozen=True)
class Report:
    """The calls of a model on this rank.

    Args:
        layers: by layer, or by pattern of compiled graphs: what ran, and how often. That is an
            operation, or "library: " and the reason. A compiled layer counts once per compilation,
            also where a cache has the code.
        problems: the runtimes' calls, by problem and kind of choice; see
            :meth:`taxfree.Runtime.stats`.
    """

    layers: Mapping[str, Mapping[str, int]]
    problems: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        lines = []
        for title, entries in (("layer", self.layers), ("problem", self.problems)):
            if not entries and self.layers:
                continue
            width = max(map(len, (title, *entries)))
            lines.append(f"{title:{width}}     calls  ran")
            for name, ran in sorted(entries.items()):
                lines += [f"{name:{width}}  {ran[what]:8}  {what}" for what in sorted(ran)]
        return "\n".join(lines)


def report() -> Report:
    """The calls of all enabled models so far."""
    problems: dict[str, Counter[str]] = {}
    for runtime in _runtimes.values():
        for problem, kinds in runtime.stats().items():
            problems.setdefault(problem, Counter()).update(kinds)
    layers = {layer: dict(ran) for layer, ran in _layers.items()}
    for name, calls in _compiler_counters().items():
        if name.startswith(_COMPILED):
            _, pattern, ran = name.split("\t")
            layers.setdefault(pattern, {})[ran] = calls
    return Report(layers, {problem: dict(kinds) for problem, kinds in problems.items()})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count(layer: str, ran: str, calls: int = 1) -> None:
    """Count calls of a layer. Within compiled code this happens once, while it is compiled."""
    _layers.setdefault(layer, Counter())[ran] += calls


def count_compiled(pattern: str, ran: str) -> None:
    """Count a pattern of a graph that Inductor compiles now."""
    _compiler_counters()[f"{_COMPILED}{pattern}\t{ran}"] += 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def count_calls(layer: str, ran: str, calls: int = 1, runtime: Runtime | None = None) -> None:
    """Let :func:`taxfree.report` count calls of a layer, for plugins of engines.

    Args:
        layer: its name.
        ran: the operation; or "library: " and the reason.
        calls: to add; 0 lists the layer before it is called.
        runtime: whose problems are reported from now on; None for no other than before.
    """
    count(layer, ran, calls)
    if runtime is not None:
        include(runtime)


def include(runtime: Runtime) -> None:
    """Report the problems of a runtime, from its start on."""
    _runtimes[runtime.group_name] = runtime


def clear() -> None:
    """Forget all counts of layers."""
    _layers.clear()
    counters = _compiler_counters()
    for name in [each for each in counters if each.startswith(_COMPILED)]:
        del counters[name]


def _compiler_counters() -> Counter[str]:
    """Inductor's; empty as long as nothing was compiled, because they load slowly."""
    utils = sys.modules.get("torch._dynamo.utils")
    found: Counter[str] = Counter() if utils is None else utils.counters["inductor"]
    return found
