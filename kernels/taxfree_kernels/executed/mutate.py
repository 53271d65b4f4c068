"""Mutants of machine code: what of it is deleted or weakened, and whether executing it shows that.

Each mutant changes one instruction. One that survives every seed is either equivalent (the code is
right without it, as far as the memory model goes) or missed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from taxfree_kernels.executed.decode import decode
from taxfree_kernels.executed.errors import UnknownInstruction
from taxfree_kernels.executed.program import Program
from taxfree_kernels.executed.run import Change, run
from taxfree_kernels.variant import Problem

#: kind -> pattern of the instructions it changes, and what they become; None deletes them
KINDS: Mapping[str, tuple[str, tuple[str, str] | None]] = {
    "sc0 of a cache instruction": (r"\tbuffer_(wbl2|inv) .*sc0", (r" sc0\b", "")),
    "sc1": (r"\t(global|buffer)_.* sc1", (r" sc1\b", "")),
    "buffer_wbl2": (r"\tbuffer_wbl2", None),
    "buffer_inv": (r"\tbuffer_inv", None),
    "s_waitcnt": (r"\ts_waitcnt", None),
    "s_barrier": (r"\ts_barrier", None),
    "mfma": (r"\tv_mfma", None),
    "ds": (r"\tds_", None),
    # not of branches around instructions for which no lane is on: they only save time
    "branch condition": (r"\ts_cbranch_(scc|vcc)", (r"s_cbranch_\w+", "s_nop 0 ;")),
}


@dataclass(frozen=True)
class Mutant:
    """One changed instruction.

    Args:
        kernel: whose.
        kind: of the change.
        line: of the text, from 0.
        before: the instruction.
    """

    kernel: str
    kind: str
    line: int
    before: str

    def change(self, text: str) -> str:
        """The text with this change, if it is this kernel's."""
        if decode(text).name != self.kernel:
            return text
        lines = text.split("\n")
        replaced = KINDS[self.kind][1]
        lines[self.line] = "" if replaced is None else re.sub(*replaced, lines[self.line], count=1)
        return "\n".join(lines)


@dataclass(frozen=True)
class Tried:
    """A mutant, and the verdict that shows it: "wrong", "hang", "error", or "survives"."""

    mutant: Mutant
    verdict: str


def mutants(program: Program, text: str) -> Iterator[Mutant]:
    """The mutants of a kernel, of instructions that were executed.

    Args:
        program: made of `text`, and executed.
    """
    lines = text.split("\n")
    for given, was_hit in zip(program.listing.instructions, program.hits, strict=True):
        line = lines[given.line].split(";")[0].rstrip()
        for kind, (pattern, _) in KINDS.items():
            if was_hit and re.match(pattern, line):
                yield Mutant(program.listing.name, kind, given.line, line.strip())


def try_mutants(
    op: str,
    variant: str,
    problem: Problem,
    seeds: Sequence[int] = (0, 1, 2, 3),
    architecture: str = "gfx942",
    most_of_a_kind: int | None = None,
    kinds: Collection[str] = tuple(KINDS),
) -> list[Tried]:
    """Try the mutants of a variant's kernels, each under some seeds until one shows it.

    Args:
        most_of_a_kind: of a kind of change, a sample of so many.
        kinds: of changes.

    Raises:
        AssertionError: the code is not right as it is.
    """
    texts: dict[str, str] = {}
    programs: dict[str, Program] = {}

    def keep(text: str) -> str:
        texts[decode(text).name] = text
        return text

    instructions = 0
    for seed in seeds:
        shown = run(op, variant, problem, None, seed, architecture, change=keep, programs=programs)
        assert shown.verdict == "right", shown
        instructions = max(instructions, shown.instructions)
    every = [
        mutant
        for program in programs.values()
        for mutant in mutants(program, texts[program.listing.name])
        if mutant.kind in kinds
    ]
    if most_of_a_kind is not None:
        every = _sample(every, most_of_a_kind)

    def verdict(change: Change) -> str:
        for seed in seeds:
            try:
                shown = run(
                    op, variant, problem, None, seed, architecture,
                    most_instructions=4 * instructions, change=change,
                )  # fmt: skip
            except UnknownInstruction:
                return "error"
            if shown.verdict != "right":
                return shown.verdict
        return "survives"

    return [Tried(mutant, verdict(mutant.change)) for mutant in every]


def _sample(every: list[Mutant], most: int) -> list[Mutant]:
    rng, kept = Random(0), []
    for kind in KINDS:
        of_kind = [each for each in every if each.kind == kind]
        kept += rng.sample(of_kind, min(most, len(of_kind)))
    return kept


def table(tried: Sequence[Tried]) -> list[tuple[str, int, int]]:
    """Rows for each kind: how many mutants, and how many of them were caught."""
    rows = []
    for kind in KINDS:
        of_kind = [each for each in tried if each.mutant.kind == kind]
        if of_kind:
            rows.append((kind, len(of_kind), sum(one.verdict != "survives" for one in of_kind)))
    return rows
