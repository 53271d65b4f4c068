"""Vector clocks, and the messages that atomics leave on words for later readers.

Every clock is kept several times: for the kernels as written, and with one kind of mistake repaired
everywhere. If two accesses turn out to be unordered, the repair that would order them names the
missing edge. One more clock tracks what the arrival of LL packets and Lamport words implies: too
little to order loads, enough to order stores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

Scope = Literal["cta", "gpu", "sys"]
_SCOPES = ("cta", "gpu", "sys")


class Repair(IntEnum):
    """The mistakes that are repaired."""

    AS_WRITTEN = 0
    ACQUIRES = 1  # every read of a synchronisation word acquires
    RELEASES = 2  # every write of one releases
    SCOPES = 3  # every atomic has system scope
    ALL = 4
    #: As written, but a program that has seen an LL packet or a Lamport word also knows what its
    #: sender knew to have ended, such as the kernels before. Their stores need not be visible to
    #: it, but their memory may be reused.
    ENDED = 5
    #: The same of what a rank's programs did to its own memory: a release to its device waits for
    #: that, but not for stores that are on their way to a peer.
    ENDED_HERE = 6


ENDED = [Repair.ENDED, Repair.ENDED_HERE]


def _repairs(*, releases: bool, acquires: bool, reaches: bool) -> np.ndarray:
    """The repairs with which a message counts: bool [repairs, 1]."""
    counts = [
        (releases or repair in (Repair.RELEASES, Repair.ALL))
        and (acquires or repair in (Repair.ACQUIRES, Repair.ALL))
        and (reaches or repair in (Repair.SCOPES, Repair.ALL))
        for repair in Repair
    ]
    return np.array(counts)[:, None]


_COUNTS = {
    flags: _repairs(releases=flags[0], acquires=flags[1], reaches=flags[2])
    for flags in product((False, True), repeat=3)
}


@dataclass(eq=False)
class Actor:
    """Something that runs in order: a program, or a rank's host with its stream.

    Args:
        slot: its index in vector clocks. Programs of one id and rank share a slot, as kernel
            boundaries order them.
        rank: its rank.
        program: its id, or None for the host.
        name: of the program and its kernel, or of the host, for reports.
        call: number of its rank's call when it started.
        clocks: int64 [repairs, slots].
    """

    slot: int
    rank: int
    program: int | None
    name: str
    call: int
    clocks: np.ndarray
    #: For both kinds of ended, its own clock before its first epoch or at its last release, [2].
    ended: np.ndarray = field(init=False)
    heard: dict[int, int] = field(default_factory=dict)  # rank -> call acquired from
    #: The last message read of each word and sender, for reports.
    taken: dict[tuple[int, Sender], Taken] = field(default_factory=dict)
    #: Words that nobody had written when this last read them -> that read, and what they held.
    unwritten: dict[int, tuple[Any, bytes]] = field(default_factory=dict)
    #: Clocks at the last fence of each scope: relaxed writes since then release them.
    fenced: dict[Scope, np.ndarray] = field(default_factory=dict)
    #: Clocks at the begin of its kernel, if that counts as a fence.
    begun: np.ndarray | None = None
    #: Messages that relaxed reads found: a fence acquires them.
    pending: dict[tuple[int, Sender, Scope], Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ended = np.full(2, self.epoch)
        self.step()

    @property
    def epoch(self) -> int:
        return int(self.clocks[0, self.slot])

    def step(self) -> None:
        """Begin a new epoch: what follows is not covered by what was released so far."""
        self.clocks[:, self.slot] += 1

    def join(self, clocks: np.ndarray) -> None:
        np.maximum(self.clocks, clocks, out=self.clocks)

    def ended_before(self) -> np.ndarray:
        """The clocks of what this actor knows to have ended: int64 [2, slots].

        What had when it began, what it acquired since, and what it did before its last release: a
        release waits for it.
        """
        ended: np.ndarray = self.clocks[ENDED]  # a copy
        ended[:, self.slot] = self.ended
        return ended

    def has_seen(self, slot: int, epoch: int, repair: Repair = Repair.AS_WRITTEN) -> bool:
        """Whether epoch `epoch` of `slot` happened before now."""
        return epoch <= int(self.clocks[repair, slot])


@dataclass(frozen=True)
class Sender:
    """A kind of writes of one rank."""

    rank: int
    scope: Scope
    releases: bool


class Message(NamedTuple):
    """The clocks of all writes of one kind, and the last of these writes."""

    clocks: np.ndarray
    call: int
    access: Any


class Taken(NamedTuple):
    """A message, and the access that read it."""

    message: Message
    access: Any
    address: int


class Messages:
    """The messages of a synchronisation word: the release sequences that its value belongs to."""

    def __init__(self) -> None:
        self._by_sender: dict[Sender, Message] = {}
        # Some access releases or acquires it, or another rank writes it. Any other word is merely
        # a counter, and no repair turns it into a signal.
        self.is_signal = False

    def leave(
        self, actor: Actor, scope: Scope, access: Any, *, releases: bool, continues: bool
    ) -> None:
        """Record a write of the word.

        Args:
            releases: it is a release.
            continues: it is a read-modify-write, which keeps earlier releases alive.
        """
        self.is_signal |= releases or bool(actor.fenced)
        if releases and scope != "cta":
            actor.ended[1 if scope == "gpu" else slice(None)] = actor.epoch
        if not continues:
            self._by_sender.clear()
        self._add(Sender(actor.rank, scope, releases), actor.clocks, actor.call, access)
        if not releases and access.is_atomic:
            fences = dict(actor.fenced)
            if actor.begun is not None:
                fences.setdefault("sys", actor.begun)
            for fence, clocks in fences.items():
                sender = Sender(actor.rank, narrower(fence, scope), True)
                self._add(sender, clocks, actor.call, access)

    def _add(self, sender: Sender, clocks: np.ndarray, call: int, access: Any) -> None:
        message = self._by_sender.get(sender)
        if message is None:
            self._by_sender[sender] = Message(clocks.copy(), call, access)
            return
        together = np.maximum(message.clocks, clocks)
        self._by_sender[sender] = Message(together, max(message.call, call), access)

    def take(
        self, actor: Actor, scope: Scope, access: Any, address: int, *, acquires: bool
    ) -> None:
        """Record a read of the word: the messages that reach `actor` join its clocks."""
        self.is_signal |= acquires
        for sender, message in self._by_sender.items():
            if not acquires:
                actor.pending[address, sender, scope] = message
            if not self.is_signal:
                continue
            taken = actor.taken.get((address, sender))
            if taken is not None and taken.message is message and taken.access.reads_as(access):
                continue
            join(actor, sender, message, scope, acquires=acquires)
            actor.taken[address, sender] = Taken(message, access, address)
            heard = actor.heard.get(sender.rank, 0)
            actor.heard[sender.rank] = max(heard, message.call)


def join(actor: Actor, sender: Sender, message: Message, scope: Scope, *, acquires: bool) -> None:
    """Join a message to a reader's clocks, with the repairs with which it counts."""
    reaches = covers(sender.scope, scope, same_rank=sender.rank == actor.rank)
    counts = _COUNTS[sender.releases, acquires, reaches]
    np.maximum(actor.clocks, message.clocks, out=actor.clocks, where=counts)


def fence(actor: Actor, scope: Scope) -> None:
    """A fence: earlier relaxed reads acquire, later relaxed writes release."""
    for (_, sender, read), message in actor.pending.items():
        join(actor, sender, message, narrower(read, scope), acquires=True)
    actor.fenced[scope] = actor.clocks.copy()
    actor.step()


def end(actor: Actor) -> None:
    """The end of a kernel that counts as a fence."""
    for (_, sender, read), message in actor.pending.items():
        join(actor, sender, message, read, acquires=True)


def narrower(one: Scope, other: Scope) -> Scope:
    """The smaller of two scopes."""
    return min(one, other, key=_SCOPES.index)


def covers(one: Scope, other: Scope, *, same_rank: bool) -> bool:
    """Whether two atomics of different programs synchronise: both scopes include both programs."""
    if same_rank:
        return "cta" not in (one, other)
    return one == other == "sys"
