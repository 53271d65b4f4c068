"""Mutants of machine code: what of it is deleted or weakened, and whether executing it shows that.

Each mutant changes one instruction that was executed. Where the runs give a mechanical reason why
the change cannot matter (:mod:`tests.check.executed.witness`), the mutant is equivalent. The
others are executed, under adverse tactics, until one run is not right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.program import Program, build_step
from taxfree_check.executed.run import run
from taxfree_check.executed.tactics import NEGATIVE_POISON, Tactics
from taxfree_check.executed.wave import Step
from taxfree_kernels.variant import Problem
from tests.check.executed.witness import Witness

#: what is tried in turn, with the seed of the rest
TACTICS = (
    (0, Tactics(by_priority=True)),
    (1, Tactics(promptness=1.0, by_priority=True, poison=NEGATIVE_POISON)),
    (2, Tactics(stalls=1.0, by_priority=True, poison=NEGATIVE_POISON)),
    (3, Tactics(promptness=0.3, stalls=0.7, churn=0.02)),
    (4, Tactics(promptness=0.3, stalls=0.5, by_priority=True, resident=2)),
    (5, Tactics(resident=1, poison=NEGATIVE_POISON)),
)

_SHORTEST = 20_000  # instructions after which a mutant may hang


@dataclass(frozen=True)
class Mutant:
    """One changed instruction.

    Args:
        key: of the program, Triton's.
        kernel: its name.
        kind: of the change.
        at: index of the instruction.
        before: the instruction.
        after: what it becomes; None if it is deleted.
    """

    key: str
    kernel: str
    kind: str
    at: int
    before: Instruction
    after: Instruction | None

    def step(self, labels: Mapping[str, int]) -> Step:
        """What is executed in place of the instruction."""
        if self.after is None:
            return lambda wave: None
        return build_step(self.after, labels)

    def __str__(self) -> str:
        return f"{self.kernel}: {self.before.text}"


@dataclass(frozen=True)
class Tried:
    """A mutant, and what shows it.

    Args:
        verdict: "wrong", "hang", "error", "equivalent" or "survives".
        reason: why it is equivalent.
    """

    mutant: Mutant
    verdict: str
    reason: str = ""


def changes(instruction: Instruction) -> Iterator[tuple[str, Instruction | None]]:
    """Kinds of changes to an instruction, and what it becomes."""
    name = instruction.opcode
    if name in ("buffer_wbl2", "buffer_inv"):
        yield name, None
        if "sc0" in instruction.modifiers:
            yield f"{name} sc0", _without(instruction, "sc0")
    elif name.startswith(("global_", "buffer_")):
        bits = ["sc1"] if "atomic" in name else ["sc0", "sc1"]
        for bit in bits:
            if bit in instruction.modifiers:
                what = next(kind for kind in ("atomic", "load", "store") if kind in name)
                yield f"{bit} of a {what}", _without(instruction, bit)
    elif name == "s_waitcnt":
        counters = re.findall(r"(\w+)\((\d+)\)", instruction.text)
        for counter, _ in counters:
            rest = [f"{one}({count})" for one, count in counters if one != counter]
            yield f"s_waitcnt {counter}", replace(instruction, text=f"s_waitcnt {' '.join(rest)}")
    elif name == "s_barrier":
        yield name, None
    elif "mfma" in name:
        yield "mfma", None
    elif name.startswith("ds_"):
        yield ("ds_write" if "write" in name else "ds_read"), None
    elif name.startswith(("s_cbranch_scc", "s_cbranch_vcc")):
        yield "branch never goes", None
        yield "branch always goes", replace(instruction, opcode="s_branch")
    elif name == "s_cbranch_execz":  # going on with no lane on only takes time
        yield "branch always goes", replace(instruction, opcode="s_branch")


def _without(instruction: Instruction, bit: str) -> Instruction:
    kept = {name: value for name, value in instruction.modifiers.items() if name != bit}
    return replace(instruction, modifiers=kept)


def mutants(key: str, program: Program) -> Iterator[Mutant]:
    """The mutants of a kernel, of instructions that were executed.

    Args:
        key: of the program, Triton's.
    """
    for index, instruction in enumerate(program.listing.instructions):
        if program.hits[index]:
            for kind, after in changes(instruction):
                yield Mutant(key, program.listing.name, kind, index, instruction, after)


class Subject:
    """A variant whose machine code is changed.

    Args:
        problems: one or more; a mutant is tried on each.

    Raises:
        AssertionError: the code is not right as it is.
    """

    def __init__(
        self, op: str, variant: str, problems: Sequence[Problem], architecture: str = "gfx942"
    ) -> None:
        self.op, self.variant, self.architecture = op, variant, architecture
        self._cases: list[tuple[Problem, dict[str, Program], Witness, int]] = []
        for problem in problems:
            programs: dict[str, Program] = {}
            # the first run decodes the kernels, and the others are watched
            self._run(problem, programs, 0, TACTICS[0][1])
            witness = Witness()
            watched = {key: witness.watching(key, program) for key, program in programs.items()}
            longest = 0
            for seed, tactics in TACTICS[:3]:
                longest = max(longest, self._run(problem, watched, seed, tactics))
            witness.finish()
            for key, program in programs.items():
                program.hits = watched[key].hits
            self._cases.append((problem, programs, witness, longest))

    def _run(
        self, problem: Problem, programs: dict[str, Program], seed: int, tactics: Tactics
    ) -> int:
        shown = run(
            self.op, self.variant, problem, None, seed, self.architecture,
            tactics=tactics, programs=programs,
        )  # fmt: skip
        assert shown.verdict == "right", shown
        return shown.instructions

    def mutants(self) -> list[Mutant]:
        """Of instructions that a problem executes; of a kernel that several have, once."""
        by_place: dict[tuple[str, int, str], Mutant] = {}
        for _, programs, _, _ in self._cases:
            for key, program in programs.items():
                by_place |= {
                    (mutant.key, mutant.at, mutant.kind): mutant for mutant in mutants(key, program)
                }
        return list(by_place.values())

    def instructions(self) -> tuple[int, int]:
        """Of all kernels, those executed, and all."""
        hits: dict[str, bytearray] = {}
        for _, programs, _, _ in self._cases:
            for key, program in programs.items():
                before = hits.get(key, bytearray(len(program.hits)))
                hits[key] = bytearray(a | b for a, b in zip(before, program.hits, strict=True))
        return sum(map(sum, hits.values())), sum(map(len, hits.values()))

    def try_one(self, mutant: Mutant) -> Tried:
        """Whether a mutant is equivalent, and else what shows it."""
        cases = [case for case in self._cases if mutant.key in case[1]]
        reasons = [witness.reason(mutant.key, mutant.at, mutant.kind) for _, _, witness, _ in cases]
        if all(reasons):
            return Tried(mutant, "equivalent", reasons[0])
        for problem, programs, _, longest in cases:
            changed = {mutant.at: mutant.step(programs[mutant.key].listing.labels)}
            mutated = programs | {mutant.key: programs[mutant.key].with_steps(changed)}
            for seed, tactics in TACTICS:
                verdict = self._verdict(problem, mutated, seed, tactics, longest)
                if verdict != "right":
                    return Tried(mutant, verdict)
        return Tried(mutant, "survives")

    def _verdict(
        self,
        problem: Problem,
        programs: dict[str, Program],
        seed: int,
        tactics: Tactics,
        longest: int,
    ) -> str:
        try:
            return run(
                self.op, self.variant, problem, None, seed, self.architecture,
                most_instructions=2 * longest + _SHORTEST, tactics=tactics, programs=programs,
            ).verdict  # fmt: skip
        except Exception:  # whatever undefined registers lead to
            return "error"


def sampled(every: Sequence[Mutant], most_of_a_kind: int) -> list[Mutant]:
    """Of each kernel and kind so many, at random but the same each time."""
    by_kind: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in every:
        by_kind.setdefault((mutant.kernel, mutant.kind), []).append(mutant)
    rng, kept = Random(0), []
    for group in by_kind.values():
        kept += rng.sample(group, min(most_of_a_kind, len(group)))
    return kept
