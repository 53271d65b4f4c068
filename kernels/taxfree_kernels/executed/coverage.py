"""Which instructions of a kernel were executed, and which belong to the path of giving up.

That path consists of the instructions which only runs with a silent rank executed, and of those
that no way from the entry reaches without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from taxfree_kernels.executed.decode import Listing

_ENDS = ("s_endpgm", "s_branch")


@dataclass(frozen=True)
class Coverage:
    """Counts of a kernel's instructions.

    Args:
        kernel: its name.
        instructions: all of them.
        executed: by runs in which all ranks take part.
        giving_up: on the path of giving up, executed or not.
        never: the texts of the others.
    """

    kernel: str
    instructions: int
    executed: int
    giving_up: int
    never: tuple[str, ...]

    @property
    def share_never(self) -> float:
        """The share of instructions that were never executed, outside of the path of giving up."""
        return len(self.never) / max(1, self.instructions - self.giving_up)


def coverage(listing: Listing, hits: Collection[int], silent_hits: Collection[int]) -> Coverage:
    """The coverage of one kernel.

    Args:
        hits: instructions that runs executed in which all ranks take part.
        silent_hits: those that runs with a silent rank executed.
    """
    gates = set(silent_hits) - set(hits)
    reached = _reached(listing, gates)
    everything = range(len(listing.instructions))
    giving_up = (
        {at for at in everything if at not in reached and at not in hits} if gates else set()
    )
    never = [at for at in everything if at not in hits and at not in giving_up]
    texts = tuple(listing.instructions[at].text for at in never)
    return Coverage(listing.name, len(everything), len(hits), len(giving_up), texts)


def summed(every: Iterable[Coverage]) -> Coverage:
    """Several compilations of a kernel as one."""
    every = list(every)
    return Coverage(
        every[0].kernel,
        sum(each.instructions for each in every),
        sum(each.executed for each in every),
        sum(each.giving_up for each in every),
        tuple(text for each in every for text in each.never),
    )


def _reached(listing: Listing, gates: Collection[int]) -> set[int]:
    """Instructions that some way from the entry reaches that passes none of `gates`."""
    seen: set[int] = set()
    pending = [0]
    while pending:
        at = pending.pop()
        if at in seen or at in gates or at >= len(listing.instructions):
            continue
        seen.add(at)
        given = listing.instructions[at]
        if given.opcode.startswith(("s_branch", "s_cbranch")):
            pending.append(listing.labels[given.operands[0]])
        if given.opcode not in _ENDS:
            pending.append(at + 1)
    return seen
