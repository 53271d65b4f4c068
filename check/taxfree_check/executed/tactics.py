"""How adverse a run is: the order of waves, how late accesses take effect, how old caches are."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

#: what undefined registers hold: NaNs, no addresses, and as integers positive or negative
POISON, NEGATIVE_POISON = 0x7FC0DEAD, 0xFFC0DEAD


@dataclass(frozen=True)
class Tactics:
    """What one run draws.

    Args:
        promptness: the chance that an operation on memory takes effect when it is issued. At 0 it
            does so where a wave waits for it, no sooner.
        stalls: the chance that a wave which waits for memory lets others go first; half of the
            waves never do.
        churn: the chance, each turn, that a cache evicts lines, and fetches them again.
        resident: workgroups of a rank that run at a time.
        by_priority: the ready wave of the highest priority runs, so that some are far ahead of
            others; priorities change now and then. Otherwise a random one runs.
        grain: how GPUs cache memory, see :mod:`taxfree_check.executed.caches`.
        poison: what undefined registers, pending destinations and unwritten LDS hold.
    """

    promptness: float = 0.0
    stalls: float = 0.0
    churn: float = 0.0
    resident: int = 8
    by_priority: bool = False
    grain: str = "any"
    poison: int = POISON

    @classmethod
    def drawn(cls, rng: Random) -> Tactics:
        return cls(
            promptness=rng.choice((0.0, 0.02, 0.3, 1.0)),
            stalls=rng.choice((0.0, 0.3, 0.7)),
            churn=rng.choice((0.0, 0.0, 0.02)),
            resident=rng.choice((1, 2, 3, 8)),
            by_priority=rng.choice((False, True)),
            grain=rng.choice(("any", "coarse", "fine")),
            poison=rng.choice((POISON, NEGATIVE_POISON)),
        )
