"""Shadow memory: for every two bytes, or each, the last store and each slot's last load since.

Accesses are checked where they happen, against all earlier ones of the same memory. Plain accesses
are checked in bulk with NumPy; synchronisation words, which atomics touch, one by one.
"""

from __future__ import annotations

import ctypes
import itertools
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from taxfree_check.checker.clocks import ENDED, Repair, covers
from taxfree_check.checker.memory import Access, Conflict, Region, Stale, Word
from taxfree_kernels.device.peers import EMPTY


class Shadow:
    """All memory of a simulation."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._sorted: list[int] = []
        self._begins = np.zeros(0, np.uint64)
        self._accesses: list[Access | None] = [None]
        self.newest_call = 0  # the last one that stored to symmetric memory where none had
        self._times = np.zeros((4, 1024), np.int64)  # epoch, slot, call and rank of each access

    def add(self, region: Region) -> None:
        """Declare memory; a region that is known is not declared again."""
        if region.begin == region.end or self.find(region.begin) is not None:
            return
        self._regions.append(region)
        self._regions.sort(key=lambda region: region.begin)
        self._sorted = [region.begin for region in self._regions]
        self._begins = np.array(self._sorted, np.uint64)

    def find(self, address: int) -> Region | None:
        """The region that holds `address`, or None."""
        index = bisect_right(self._sorted, address) - 1
        if index < 0 or address >= self._regions[index].end:
            return None
        return self._regions[index]

    def split(self, addresses: np.ndarray, size: int) -> Iterator[tuple[Region | None, np.ndarray]]:
        """Addresses by region; None where one of them is in no region."""
        low, high = int(addresses.min()), int(addresses.max())
        region = self.find(low)
        if region is not None and high + size <= region.end:
            yield region, addresses
            return
        indices = np.searchsorted(self._begins, addresses, side="right") - 1
        for index in np.unique(indices).tolist():
            inside = addresses[indices == index]
            is_outside = index < 0 or int(inside.max()) + size > self._regions[index].end
            yield None if is_outside else self._regions[index], inside

    # -- plain accesses ---------------------------------------------------------------------------

    def plain(
        self, access: Access, region: Region, addresses: np.ndarray, size: int
    ) -> Conflict | None:
        """Check and record a plain access of `size` bytes at each address of one region."""
        number = self._number(access)
        of_each = region.granules(addresses, size)
        granules = of_each.ravel()
        conflict = self._against_plain(access, region, granules)
        if conflict is None and region.words and region.has_word[granules].any():
            touching = addresses[region.has_word[of_each].any(axis=1)]
            conflict = self._plain_against_words(access, region, touching, size)
        if access.writes:
            if region.is_symmetric and not region.written[granules].all():
                self.newest_call = max(self.newest_call, access.actor.call)
            region.written[granules] = number
        else:
            region.reads_of(access.actor.slot)[granules] = number
        return conflict

    def _against_plain(
        self, access: Access, region: Region, granules: np.ndarray
    ) -> Conflict | None:
        for numbers in self._last(access, region):
            earlier = numbers[granules]
            wrong = self._unordered(access, region, earlier)
            if conflict := self._conflict(access, region, granules, earlier, wrong):
                return conflict
        return None

    def _last(self, access: Access, region: Region) -> list[np.ndarray]:
        """The last accesses by others that an access may conflict with, by number."""
        last = [region.written]
        if access.writes:
            last += [reads for slot, reads in region.reads.items() if slot != access.actor.slot]
        return last

    def _unordered(self, access: Access, region: Region, earlier: np.ndarray) -> np.ndarray:
        """Which of earlier accesses, by number, did not happen before this one.

        For a store it is enough that they have ended; a load has to see what they stored.
        """
        (epochs, slots, _, ranks), clocks = self._times[:, earlier], access.actor.clocks
        if access.writes:
            ended, ended_here = clocks[ENDED][:, slots]
            return epochs > np.where(ranks == region.rank, ended_here, ended)
        return epochs > clocks[Repair.AS_WRITTEN][slots]

    def _of_others(self, access: Access, earlier: np.ndarray) -> np.ndarray:
        """Which of earlier accesses, by number, are of other generations than this one."""
        return self._times[2][earlier] != access.actor.call

    def _conflict(
        self,
        access: Access,
        region: Region,
        granules: np.ndarray,
        earlier: np.ndarray,
        wrong: np.ndarray,
    ) -> Conflict | None:
        """The conflict with the first earlier access, by number, that is wrong, or None."""
        if not wrong.any():
            return None
        index = int(wrong.argmax())
        address = region.begin + int(granules[index]) * region.granule
        return Conflict(self._access(int(earlier[index])), access, address)

    def _plain_against_words(
        self, access: Access, region: Region, addresses: np.ndarray, size: int
    ) -> Conflict | None:
        touched = {
            start: word
            for address in sorted(set(addresses.tolist()))
            for start, word in region.words_in(address, size)
        }
        conflict = None
        for address, word in touched.items():
            others = [*word.writes.values(), *(word.reads.values() if access.writes else ())]
            for other in others:
                if conflict is None and not other.happened_before(access.actor):
                    conflict = Conflict(other, access, address)
            if access.writes:
                word.messages.leave(access.actor, "gpu", access, releases=False, continues=False)
            else:
                word.messages.take(access.actor, "gpu", access, address, acquires=False)
        if access.writes and touched:
            access.actor.step()
        return conflict

    # -- LL packets and Lamport words -------------------------------------------------------------

    def ll_packets(self, access: Access, region: Region, addresses: np.ndarray) -> Conflict | None:
        """Check and record an access of whole LL packets of one region.

        A poll may find any packet of its own generation or of an earlier one. A store has to come
        after all accesses of other generations, and after all other stores.
        """
        granules = region.granules(addresses, region.word_bytes)[:, 0]
        conflict = None
        for numbers in self._last(access, region):
            earlier = numbers[granules]
            if access.writes:
                racing = (numbers is not region.written) & ~self._of_others(access, earlier)
                wrong = self._unordered(access, region, earlier) & ~racing
            else:
                wrong = self._times[2][earlier] > access.actor.call
            conflict = conflict or self._conflict(access, region, granules, earlier, wrong)
        self._note_words(access, region, granules, addresses.tolist())
        return conflict

    def lamport_words(
        self, access: Access, region: Region, addresses: np.ndarray
    ) -> Conflict | None:
        """Check and record an access of whole Lamport words of one region.

        A poll must find words empty, or of its own generation. A sender stores only where the
        region's owner has emptied: after all other accesses, except polls of its own generation.
        The owner empties a word after all polls of it, and after the store that a poll has found.
        """
        granules = region.granules(addresses, region.word_bytes)[:, 0]
        words = addresses.tolist()
        last, arrived = region.written[granules], _have_arrived(words)
        if not access.writes:
            there = list(itertools.compress(words, arrived))
            region.found.update(there)
            self._note_words(access, region, granules, there)
            stale = arrived & self._of_others(access, last)
            return self._conflict(access, region, granules, last, stale)
        if not access.empties and arrived.any():
            return self._conflict(access, region, granules, last, arrived)
        is_empty = np.array([access.empties and word in region.found for word in words])
        wrong = self._unordered(access, region, last) & ~is_empty
        conflict = self._conflict(access, region, granules, last, wrong)
        for slot, reads in region.reads.items():
            if slot != access.actor.slot:
                earlier = reads[granules]
                counts = access.empties | self._of_others(access, earlier)
                wrong = self._unordered(access, region, earlier) & counts
                conflict = conflict or self._conflict(access, region, granules, earlier, wrong)
        region.found.difference_update(words)
        self._note_words(access, region, granules, words)
        return conflict

    def _note_words(
        self, access: Access, region: Region, granules: np.ndarray, words: list[int]
    ) -> None:
        """Record an access of words; a reader learns which kernels had ended by then."""
        number, actor = self._number(access), access.actor
        if access.writes:
            region.written[granules] = number
            region.told.update(dict.fromkeys(words, actor.ended_before()))
            return
        region.reads_of(actor.slot)[granules] = number
        told = [region.told.get(word) for word in words]
        for ended in {id(clocks): clocks for clocks in told if clocks is not None}.values():
            actor.clocks[ENDED] = np.maximum(actor.clocks[ENDED], ended)

    # -- atomics ----------------------------------------------------------------------------------

    def atomic(
        self, access: Access, region: Region, address: int, size: int, *, reads: bool
    ) -> Conflict | None:
        """Check and record an atomic access of one word.

        Args:
            reads: it returns the old value and keeps release sequences alive; an atomic store does
                neither.
        """
        assert access.scope is not None
        word, actor = region.word(address, size), access.actor
        granules = region.granules(np.array([address], np.uint64), size)[0]
        conflict = self._word_against_plain(access, region, granules)
        for start, other in region.words_in(address, size):
            conflict = conflict or _against_atomics(access, other, start, is_same=other is word)
        word.messages.is_signal |= access.writes and actor.rank != region.rank
        if reads:
            acquires = access.sem in ("acquire", "acq_rel")
            word.messages.take(actor, access.scope, access, address, acquires=acquires)
            word.reads[actor.slot] = access
            actor.unwritten.pop(address, None)
            if not (access.writes or word.writes or region.written[granules].any()):
                actor.unwritten[address] = access, ctypes.string_at(address, size)
        if access.writes:
            if region.is_symmetric and not word.writes:
                self.newest_call = max(self.newest_call, actor.call)
            releases = access.sem in ("release", "acq_rel")
            word.messages.leave(actor, access.scope, access, releases=releases, continues=reads)
            word.writes[actor.slot] = access
            word.before[actor.slot] = ctypes.string_at(address, size)
        return conflict

    def stale(self, access: Access, region: Region, address: int) -> Stale | None:
        """What else an atomic read may find: the value before a write that is announced, not seen.

        A chain of atomics leads from the write to the reader, but it lacks a release, an acquire or
        a scope. Where no chain leads, the reader does not expect the write.
        """
        word, actor = region.words.get(address), access.actor
        if word is None:
            return None
        newest, announced = 0, []
        for other in (*word.writes.values(), *word.reads.values()):
            if other.actor is actor or other.happened_before(actor):
                newest = max(newest, other.time)
            elif other.writes and actor.has_seen(other.actor.slot, other.epoch, Repair.ALL):
                announced.append(other)
        late = min(
            (access for access in announced if access.time > newest), key=_time, default=None
        )
        if late is None:
            return None
        return Stale(Conflict(late, access, address), word.before[late.actor.slot])

    def _word_against_plain(
        self, access: Access, region: Region, granules: np.ndarray
    ) -> Conflict | None:
        """As :meth:`_against_plain`, for the few granules of a word, which mostly has none."""
        for numbers in self._last(access, region):
            if numbers[granules].any():
                return self._against_plain(access, region, granules)
        return None

    def last_store(self, region: Region, address: int) -> Access | None:
        """The last plain store to an address."""
        return self._accesses[int(region.written[(address - region.begin) // region.granule])]

    # -- accesses by number -----------------------------------------------------------------------

    def _number(self, access: Access) -> int:
        number = len(self._accesses)
        self._accesses.append(access)
        if number == self._times.shape[1]:
            self._times = np.concatenate([self._times, np.zeros_like(self._times)], axis=1)
        actor = access.actor
        self._times[:, number] = access.epoch, actor.slot, actor.call, actor.rank
        return number

    def _access(self, number: int) -> Access:
        access = self._accesses[number]
        assert access is not None
        return access


def _time(access: Access) -> int:
    return access.time


def _have_arrived(words: list[int]) -> np.ndarray:
    """Which Lamport words, by address, are not empty."""
    return np.array([ctypes.c_int32.from_address(word).value != EMPTY.value for word in words])


def _against_atomics(access: Access, word: Word, address: int, *, is_same: bool) -> Conflict | None:
    """Atomics of the same word do not race, unless the scope of one leaves the other out.

    Args:
        is_same: the word is the one that is accessed; else they share bytes.
    """
    assert access.scope is not None
    others = [*word.writes.values(), *(word.reads.values() if access.writes else ())]
    for other in others:
        if other.actor is access.actor or other.happened_before(access.actor):
            continue
        assert other.scope is not None
        same_rank = other.actor.rank == access.actor.rank
        if not is_same or not covers(access.scope, other.scope, same_rank=same_rank):
            return Conflict(other, access, address)
    return None
