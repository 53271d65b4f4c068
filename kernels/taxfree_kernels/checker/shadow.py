"""Shadow memory: for every two bytes, who wrote them last and who has read them since.

Accesses are checked where they happen, against all earlier ones of the same memory. Plain accesses
are checked in bulk with NumPy; synchronisation words, which atomics touch, one by one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from taxfree_kernels.checker.clocks import Actor, Messages, Scope, World, covers
from taxfree_kernels.checker.sites import Site
from taxfree_kernels.device.packets import EMPTY

GRANULE = 2  # bytes; accesses of one byte share a granule
_BARE = 4  # bytes of a Lamport word


@dataclass(frozen=True, eq=False)
class Access:
    """One load, store or atomic of a program, or one operation of a host on a tensor.

    Args:
        actor: who.
        epoch: of the actor at that time.
        site: the source lines.
        writes: whether it changes memory.
        scope: of an atomic; None for a plain access.
        sem: of an atomic.
        empties: all that it stores is EMPTY.
    """

    actor: Actor
    epoch: int
    site: Site
    writes: bool
    scope: Scope | None = None
    sem: str = ""
    empties: bool = False

    @property
    def is_atomic(self) -> bool:
        return self.scope is not None

    def happened_before(self, actor: Actor) -> bool:
        return actor.has_seen(self.actor.slot, self.epoch)


@dataclass(frozen=True)
class Conflict:
    """Two unordered accesses of the same memory, at least one of which writes."""

    earlier: Access
    later: Access
    address: int


@dataclass
class _Word:
    """A word that atomics touch: its messages, and everybody's last atomic read and write of it."""

    messages: Messages = field(default_factory=Messages)
    writes: dict[int, Access] = field(default_factory=dict)
    reads: dict[int, Access] = field(default_factory=dict)


@dataclass(eq=False)
class Region:
    """A piece of memory that belongs together.

    Args:
        describe: byte offset -> what it is, for reports.
        rank: that owns it.
        begin, end: addresses.
        word_bytes: if not 0, it holds 8-byte LL packets or 4-byte Lamport words. Races on
            words of one generation are allowed, but only on whole words.
    """

    describe: Callable[[int], str]
    rank: int
    begin: int
    end: int
    word_bytes: int = 0
    words: dict[int, _Word] = field(default_factory=dict)
    reads: dict[int, np.ndarray] = field(default_factory=dict)
    told: dict[int, np.ndarray] = field(default_factory=dict)  # by words: what ended
    found: set[int] = field(default_factory=set)  # Lamport words that their owner has seen come
    written: np.ndarray = field(init=False)
    has_word: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        granules = -(-(self.end - self.begin) // GRANULE)
        self.written = np.zeros(granules, np.int32)  # index of an access; 0 is none
        self.has_word = np.zeros(granules, bool)

    @property
    def is_lamport(self) -> bool:
        """Whether it holds Lamport words."""
        return self.word_bytes == _BARE

    def word(self, address: int, size: int) -> _Word:
        """The synchronisation word at `address`, which becomes one now if it is not yet."""
        found = self.words.get(address)
        if found is None:
            found = self.words[address] = _Word()
            at = (address - self.begin) // GRANULE
            self.has_word[at : at + max(1, size // GRANULE)] = True
        return found

    def reads_of(self, slot: int) -> np.ndarray:
        if slot not in self.reads:
            self.reads[slot] = np.zeros_like(self.written)
        return self.reads[slot]


class Outside(Exception):
    """An access of memory that belongs to no tensor of the simulation."""

    def __init__(self, address: int) -> None:
        super().__init__(hex(address))
        self.address = address


class Shadow:
    """All memory of a simulation."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._begins = np.zeros(0, np.uint64)
        self._accesses: list[Access | None] = [None]
        self._epochs = np.zeros(1024, np.int64)
        self._slots = np.zeros(1024, np.int64)
        self._calls = np.zeros(1024, np.int64)

    def add(self, region: Region) -> None:
        """Declare memory; what is known already is not declared again."""
        if region.begin == region.end or self.find(region.begin) is not None:
            return
        self._regions.append(region)
        self._regions.sort(key=lambda each: each.begin)
        self._begins = np.array([each.begin for each in self._regions], np.uint64)

    def find(self, address: int) -> Region | None:
        """The region that `address` belongs to."""
        index = int(np.searchsorted(self._begins, np.uint64(address), side="right")) - 1
        if index < 0 or address >= self._regions[index].end:
            return None
        return self._regions[index]

    def split(self, addresses: np.ndarray, size: int) -> Iterator[tuple[Region, np.ndarray]]:
        """Addresses by the region that they are in.

        Raises:
            Outside: one is in none.
        """
        low, high = int(addresses.min()), int(addresses.max())
        region = self.find(low)
        if region is not None and high + size <= region.end:
            yield region, addresses
            return
        indices = np.searchsorted(self._begins, addresses, side="right") - 1
        for index in np.unique(indices).tolist():
            inside = addresses[indices == index]
            if index < 0 or int(inside.max()) + size > self._regions[index].end:
                raise Outside(int(inside.max()))
            yield self._regions[index], inside

    # -- plain accesses ---------------------------------------------------------------------------

    def plain(
        self, access: Access, region: Region, addresses: np.ndarray, size: int
    ) -> Conflict | None:
        """Check and record a plain access of `size` bytes at each address of one region."""
        number = self._number(access)
        offsets = (addresses - np.uint64(region.begin)).astype(np.int64) // GRANULE
        granules = offsets
        if size > GRANULE:
            granules = (offsets[:, None] + np.arange(size // GRANULE)).ravel()
        conflict = self._against_plain(access, region, granules)
        if conflict is None and region.words and region.has_word[granules].any():
            conflict = self._plain_against_words(access, region, addresses, size)
        if access.writes:
            region.written[granules] = number
        else:
            region.reads_of(access.actor.slot)[granules] = number
        return conflict

    def _against_plain(
        self, access: Access, region: Region, granules: np.ndarray
    ) -> Conflict | None:
        for numbers in self._last(access, region):
            earlier = numbers[granules]
            unordered = self._unordered(access, earlier)
            if unordered.any():
                return self._conflict(access, region, granules, earlier, unordered)
        return None

    def _last(self, access: Access, region: Region) -> list[np.ndarray]:
        """The last accesses by others that an access may conflict with, by number."""
        last = [region.written]
        if access.writes:
            last += [reads for slot, reads in region.reads.items() if slot != access.actor.slot]
        return last

    def _unordered(self, access: Access, earlier: np.ndarray) -> np.ndarray:
        """Which of earlier accesses, by number, did not happen before this one.

        For a store it is enough that they have ended; a load has to see what they stored.
        """
        world = World.ENDED if access.writes else World.AS_WRITTEN
        return self._epochs[earlier] > access.actor.clocks[world][self._slots[earlier]]

    def _conflict(
        self,
        access: Access,
        region: Region,
        granules: np.ndarray,
        earlier: np.ndarray,
        unordered: np.ndarray,
    ) -> Conflict:
        at = int(unordered.argmax())
        address = region.begin + int(granules[at]) * GRANULE
        return Conflict(self._access(int(earlier[at])), access, address)

    def _plain_against_words(
        self, access: Access, region: Region, addresses: np.ndarray, size: int
    ) -> Conflict | None:
        touched = {
            address: region.words[address]
            for address in sorted(set(addresses.tolist()))
            if address in region.words
        }
        conflict = None
        for address, word in touched.items():
            others = [*word.writes.values(), *(word.reads.values() if access.writes else ())]
            for other in others:
                if conflict is None and not other.happened_before(access.actor):
                    conflict = Conflict(other, access, address)
            if access.writes:
                word.messages.leave(access.actor, "gpu", releases=False, continues=False)
            else:
                word.messages.take(access.actor, "gpu", acquires=False)
        if access.writes and touched:
            access.actor.step()
        return conflict

    # -- self-announcing words: flag-in-data and bare ---------------------------------------------

    def flagged(self, access: Access, region: Region, addresses: np.ndarray) -> Conflict | None:
        """Check and record an access of whole LL packets of one region.

        A poll may find any word of its own generation or of an earlier one. A store has to come
        after all accesses that belong to other generations, and after all other stores.
        """
        number, actor = self._number(access), access.actor
        granules = (addresses - np.uint64(region.begin)).astype(np.int64) // GRANULE
        conflict = None
        for numbers in self._last(access, region):
            earlier = numbers[granules]
            if access.writes:
                racing = (self._calls[earlier] == actor.call) & (numbers is not region.written)
                wrong = self._unordered(access, earlier) & ~racing
            else:
                wrong = self._calls[earlier] > actor.call
            if conflict is None and wrong.any():
                conflict = self._conflict(access, region, granules, earlier, wrong)
        self._note_words(access, number, region, granules, addresses.tolist())
        return conflict

    def bare(self, access: Access, region: Region, addresses: np.ndarray) -> Conflict | None:
        """Check and record an access of whole Lamport words of one region.

        A poll must find words empty, or of its own generation. A sender stores only where the
        region's owner has emptied: after all other accesses, except polls of its own generation.
        The owner empties a word after all polls of it, and after the store that a poll has found.
        """
        number, actor = self._number(access), access.actor
        granules = (addresses - np.uint64(region.begin)).astype(np.int64) // GRANULE
        words = addresses.tolist()
        last = region.written[granules]
        if access.writes and not access.empties and (full := _have_come(words)).any():
            return self._conflict(access, region, granules, last, full)
        if access.writes:
            found = np.array([access.empties and word in region.found for word in words])
            conflict = self._first(access, region, granules, last, ~found)
            for slot, reads in region.reads.items():
                if slot != actor.slot:
                    earlier = reads[granules]
                    counts = access.empties | (self._calls[earlier] != actor.call)
                    conflict = conflict or self._first(access, region, granules, earlier, counts)
            region.found.difference_update(words)
            self._note_words(access, number, region, granules, words)
            return conflict
        has_come = _have_come(words)
        there = list(itertools.compress(words, has_come))
        region.found.update(there)
        self._note_words(access, number, region, granules, there)
        stale = has_come & (self._calls[last] != actor.call)
        return self._conflict(access, region, granules, last, stale) if stale.any() else None

    def _first(
        self,
        access: Access,
        region: Region,
        granules: np.ndarray,
        earlier: np.ndarray,
        counts: np.ndarray,
    ) -> Conflict | None:
        """The conflict with the first earlier access that counts and is unordered, or None."""
        wrong = self._unordered(access, earlier) & counts
        return self._conflict(access, region, granules, earlier, wrong) if wrong.any() else None

    def _note_words(
        self, access: Access, number: int, region: Region, granules: np.ndarray, words: list[int]
    ) -> None:
        """Record an access of words; a reader learns what had ended when `words` were sent."""
        actor = access.actor
        if access.writes:
            region.written[granules] = number
            region.told.update(dict.fromkeys(words, actor.ended_before()))
            return
        region.reads_of(actor.slot)[granules] = number
        told = [region.told.get(word) for word in words]
        for ended in {id(each): each for each in told if each is not None}.values():
            np.maximum(actor.clocks[World.ENDED], ended, out=actor.clocks[World.ENDED])

    # -- atomics ----------------------------------------------------------------------------------

    def atomic(
        self, access: Access, region: Region, address: int, size: int, *, reads: bool
    ) -> Conflict | None:
        """Check and record an atomic access of one word.

        Args:
            reads: it returns the old value to the program, and keeps release sequences alive; False
                for an atomic store.
        """
        assert access.scope is not None
        word, actor = region.word(address, size), access.actor
        at = (address - region.begin) // GRANULE
        conflict = self._against_plain(access, region, np.arange(at, at + max(1, size // GRANULE)))
        conflict = conflict or _against_atomics(access, word, address)
        word.messages.is_signal |= access.writes and actor.rank != region.rank
        if reads:
            word.messages.take(actor, access.scope, acquires=access.sem in ("acquire", "acq_rel"))
            word.reads[actor.slot] = access
        if access.writes:
            releases = access.sem in ("release", "acq_rel")
            word.messages.leave(actor, access.scope, releases=releases, continues=reads)
            word.writes[actor.slot] = access
        return conflict

    # -- accesses by number -----------------------------------------------------------------------

    def _number(self, access: Access) -> int:
        number = len(self._accesses)
        self._accesses.append(access)
        if number == len(self._epochs):
            self._epochs = np.concatenate([self._epochs, np.zeros_like(self._epochs)])
            self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
            self._calls = np.concatenate([self._calls, np.zeros_like(self._calls)])
        self._epochs[number] = access.epoch
        self._slots[number] = access.actor.slot
        self._calls[number] = access.actor.call
        return number

    def _access(self, number: int) -> Access:
        access = self._accesses[number]
        assert access is not None
        return access


def _have_come(words: list[int]) -> np.ndarray:
    """Which Lamport words, by address, are not empty."""
    return np.array([ctypes.c_int32.from_address(word).value != EMPTY.value for word in words])


def _against_atomics(access: Access, word: _Word, address: int) -> Conflict | None:
    """Atomics of one word do not race, unless the scope of one leaves the other out."""
    assert access.scope is not None
    others = [*word.writes.values(), *(word.reads.values() if access.writes else ())]
    for other in others:
        if other.actor is access.actor or other.happened_before(access.actor):
            continue
        assert other.scope is not None
        same_rank = other.actor.rank == access.actor.rank
        if not covers(access.scope, other.scope, same_rank=same_rank):
            return Conflict(other, access, address)
    return None
