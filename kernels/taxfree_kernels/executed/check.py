"""All variants of operations executed, and rows that sum up what they showed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from taxfree_kernels.executed.program import Program
from taxfree_kernels.executed.run import DEVICES, Executed, run
from taxfree_kernels.hardware import KNOWN
from taxfree_kernels.variant import Problem, variants


def executed(
    problems: Mapping[str, Iterable[Problem]],
    names: Collection[str] | None = None,
    seeds: Iterable[int] = range(2),
    architecture: str = "gfx942",
) -> Iterator[Executed]:
    """Run the default config of variants that have kernels of their own, each under some seeds.

    Args:
        problems: operation -> its problems.
        names: of variants; None for all.
    """
    hardware = KNOWN[DEVICES[architecture]]
    for op, each in problems.items():
        for problem in each:
            for name, variant in variants(op).items():
                is_asked = not names or name in names
                if not is_asked or variant.unsupported_reason(problem, hardware):
                    continue
                programs: dict[str, Program] = {}
                for seed in seeds:
                    shown = run(op, name, problem, None, seed, architecture, programs=programs)
                    if shown.verdict == "nothing to run":
                        break
                    yield shown


def rows(found: Sequence[Executed]) -> list[tuple[Any, ...]]:
    """A row for each variant: verdict, runs, instructions, share of the code, seconds.

    The share is that of a kernel's instructions that were executed, of the kernel with the least.
    """
    by_variant: dict[tuple[str, str], list[Executed]] = {}
    for shown in found:
        by_variant.setdefault((shown.op, shown.variant), []).append(shown)
    result = []
    for (op, variant), runs in by_variant.items():
        wrong = [shown.verdict for shown in runs if shown.verdict != "right"]
        least = min((hit / all_ for one in runs for hit, all_ in one.kernels.values()), default=0.0)
        instructions = sum(shown.instructions for shown in runs)
        seconds = round(sum(shown.seconds for shown in runs), 1)
        verdict = wrong[0] if wrong else "right"
        result.append((op, variant, verdict, len(runs), instructions, f"{least:.0%}", seconds))
    return result
