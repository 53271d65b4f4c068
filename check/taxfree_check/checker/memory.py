"""Memory of a simulation and the accesses of it, as shadow memory records them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from taxfree_check.checker.clocks import Actor, Messages, Scope, covers
from taxfree_check.checker.sites import Site

_GRANULE = 2  # bytes
_LAMPORT_BYTES = 4
_WIDEST_WORD = 8  # bytes


@dataclass(frozen=True, eq=False)
class Access:
    """One load, store or atomic of a program, or one operation of a host on a tensor.

    Args:
        actor: who.
        epoch: of the actor at that time.
        site: the source lines.
        writes: it changes memory.
        scope: of an atomic; None for a plain access.
        sem: of an atomic.
        empties: it stores EMPTY only.
        time: number of the access.
    """

    actor: Actor
    epoch: int
    site: Site
    writes: bool
    scope: Scope | None = None
    sem: str = ""
    empties: bool = False
    time: int = 0

    @property
    def is_atomic(self) -> bool:
        return self.scope is not None

    def reads_as(self, other: Access) -> bool:
        """Whether the other one synchronises with the same messages."""
        return (self.sem, self.scope) == (other.sem, other.scope)

    def happened_before(self, actor: Actor) -> bool:
        return actor.has_seen(self.actor.slot, self.epoch)


@dataclass(frozen=True)
class Conflict:
    """Two unordered accesses of the same memory, at least one of which writes."""

    earlier: Access
    later: Access
    address: int

    @property
    def is_narrow(self) -> bool:
        """Whether both are atomics, of which one's scope leaves the other out."""
        one, other = self.earlier, self.later
        if one.scope is None or other.scope is None:
            return False
        return not covers(one.scope, other.scope, same_rank=one.actor.rank == other.actor.rank)


@dataclass(frozen=True)
class Stale:
    """A word that an atomic read may find as it was before a write.

    Args:
        conflict: of the write and the read.
        before: the word's bytes before the write.
    """

    conflict: Conflict
    before: bytes


@dataclass
class Word:
    """A word that atomics touch: its messages, and each slot's last atomic write and read of it.

    Args:
        size: bytes.
        before: what the word held before each slot's last write.
    """

    size: int
    messages: Messages = field(default_factory=Messages)
    writes: dict[int, Access] = field(default_factory=dict)
    reads: dict[int, Access] = field(default_factory=dict)
    before: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Region:
    """A tensor's memory, or that of a block of a heap.

    Args:
        describe: byte offset -> name of the place, for reports.
        rank: its owner.
        begin, end: addresses.
        is_symmetric: each rank has one like it.
        word_bytes: 8 if it holds LL packets, 4 if it holds Lamport words, else 0. Races on whole
            words of one call are allowed.
    """

    describe: Callable[[int], str]
    rank: int
    begin: int
    end: int
    is_symmetric: bool = False
    word_bytes: int = 0
    words: dict[int, Word] = field(default_factory=dict)
    reads: dict[int, np.ndarray] = field(default_factory=dict)
    told: dict[int, np.ndarray] = field(default_factory=dict)  # word -> clocks of what had ended
    found: set[int] = field(default_factory=set)  # Lamport words that their owner has seen arrive
    granule: int = field(init=False, default=_GRANULE)  # bytes; 1 once an access is so narrow
    written: np.ndarray = field(init=False)
    has_word: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        granules = -(-(self.end - self.begin) // self.granule)
        self.written = np.zeros(granules, np.int32)  # index of an access; 0 is none
        self.has_word = np.zeros(granules, bool)

    @property
    def is_lamport(self) -> bool:
        """Whether it holds Lamport words."""
        return self.word_bytes == _LAMPORT_BYTES

    def granules(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Indices of granules, int64 [addresses, granules], of `size` bytes at each address."""
        if size < self.granule:
            self._refine()
        first = (addresses - np.uint64(self.begin)).astype(np.int64) // self.granule
        return first[:, None] + np.arange(size // self.granule)

    def _refine(self) -> None:
        """Tell bytes apart from now on; accesses so far were of whole granules."""
        self.written, self.has_word = self.written.repeat(_GRANULE), self.has_word.repeat(_GRANULE)
        self.reads = {slot: reads.repeat(_GRANULE) for slot, reads in self.reads.items()}
        self.granule = 1

    def word(self, address: int, size: int) -> Word:
        """The synchronisation word at `address`, which becomes one now if it is not yet."""
        word = self.words.get(address)
        if word is None:
            word = self.words[address] = Word(size)
            self.has_word[self.granules(np.array([address], np.uint64), size)] = True
        return word

    def words_in(self, address: int, size: int) -> Iterator[tuple[int, Word]]:
        """The synchronisation words that share bytes with `size` bytes at `address`."""
        for start in range(address - _WIDEST_WORD + 1, address + size):
            word = self.words.get(start)
            if word is not None and start + word.size > address:
                yield start, word

    def reads_of(self, slot: int) -> np.ndarray:
        if slot not in self.reads:
            self.reads[slot] = np.zeros_like(self.written)
        return self.reads[slot]
