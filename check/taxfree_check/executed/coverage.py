"""Which instructions of a kernel were executed, and why the others were not.

- The path of giving up: instructions that only runs with a silent rank executed, and those that no
  way from the entry reaches without them.
- What merges lanes: Triton compiles an atomic of a block so that lanes which change one word, or
  many neighbouring words, are merged. Those of our kernels change a word at each peer, so that only
  the code which finds this out is executed. What is counted here are the other instructions of an
  atomic that was executed, but none that accesses memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from taxfree_check.executed.decode import Instruction, Listing

_ENDS = ("s_endpgm", "s_branch")
_ON_MEMORY = ("global_", "buffer_", "flat_", "s_load", "s_barrier")


@dataclass(frozen=True)
class Hits:
    """Instructions of a compiled kernel that runs executed.

    Args:
        key: Triton's, of the compiled kernel.
        by_all: in runs in which all ranks take part.
        by_some: in runs with a silent rank.
    """

    key: str
    listing: Listing
    by_all: frozenset[int]
    by_some: frozenset[int]


@dataclass(frozen=True)
class InstructionCoverage:
    """Counts of a kernel's instructions.

    Args:
        kernel: its name.
        compiled: how often it was compiled, for other problems and configs.
        instructions: all of them.
        executed: by runs in which all ranks take part.
        giving_up: on the path of giving up, executed or not.
        merging: what merges lanes of atomics, never executed.
        never: the others: text, then the lines of the program that they come from.
    """

    kernel: str
    compiled: int
    instructions: int
    executed: int
    giving_up: int
    merging: int
    never: tuple[str, ...]

    @property
    def share_never(self) -> float:
        """The share of `never`, without the path of giving up and what merges lanes."""
        return len(self.never) / max(1, self.instructions - self.giving_up - self.merging)


def coverage(every: Iterable[Hits]) -> InstructionCoverage:
    """The coverage of one kernel, all that was compiled of it together."""
    by_key: dict[str, Hits] = {}
    for hits in every:
        merged = by_key.get(hits.key, hits)
        by_key[hits.key] = replace(
            hits, by_all=merged.by_all | hits.by_all, by_some=merged.by_some | hits.by_some
        )
    parts = [_coverage(hits) for hits in by_key.values()]
    return InstructionCoverage(
        parts[0].kernel,
        len(parts),
        sum(part.instructions for part in parts),
        sum(part.executed for part in parts),
        sum(part.giving_up for part in parts),
        sum(part.merging for part in parts),
        tuple(text for part in parts for text in part.never),
    )


def _coverage(hits: Hits) -> InstructionCoverage:
    listing, instructions = hits.listing, hits.listing.instructions
    gates = hits.by_some - hits.by_all
    missing = [index for index in range(len(instructions)) if index not in hits.by_all]
    reached = _reached(listing, gates)
    others = [index for index in missing if not gates or index in reached]
    atomics = {
        instructions[index].source
        for index in hits.by_all
        if "atomic" in instructions[index].opcode
    }
    never = [index for index in others if not _merges(instructions[index], atomics)]
    return InstructionCoverage(
        listing.name,
        1,
        len(instructions),
        len(hits.by_all),
        len(missing) - len(others),
        len(others) - len(never),
        tuple(
            f"{instructions[index].text} ; {' '.join(instructions[index].source)}"
            for index in never
        ),
    )


def _merges(instruction: Instruction, atomics: Collection[tuple[str, ...]]) -> bool:
    return instruction.source in atomics and not instruction.opcode.startswith(_ON_MEMORY)


def _reached(listing: Listing, gates: Collection[int]) -> set[int]:
    """Instructions that some way from the entry reaches that passes none of `gates`."""
    seen: set[int] = set()
    pending = [0]
    while pending:
        index = pending.pop()
        if index in seen or index in gates or index >= len(listing.instructions):
            continue
        seen.add(index)
        instruction = listing.instructions[index]
        if instruction.opcode.startswith(("s_branch", "s_cbranch")):
            pending.append(listing.labels[instruction.operands[0]])
        if instruction.opcode not in _ENDS:
            pending.append(index + 1)
    return seen
