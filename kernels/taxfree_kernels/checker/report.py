"""Reports of violations: the accesses, their actors, and the missing edge."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from taxfree_kernels.checker.clocks import Actor, World
from taxfree_kernels.checker.memory import Access, Conflict, Region
from taxfree_kernels.checker.sites import Site


class Reason(Enum):
    """Reasons of violations: a title for tables, and a sentence."""

    NO_ACQUIRE = (
        "no acquire",
        "the signal was read, but not by an acquire: what follows the read may still see old data",
    )
    NO_RELEASE = (
        "no release",
        "the signal was written, but not by a release: what precedes it may become visible later",
    )
    SCOPE = (
        "scope too narrow",
        "an atomic of this chain does not include the other program; between ranks, only sys does",
    )
    SEVERAL = (
        "several edges missing",
        "a signal connects the two, but needs more than one of release, acquire and sys scope",
    )
    EARLY_SIGNAL = (
        "signal before the data",
        "the signal of this call was waited for, but sent before this access was made",
    )
    STALE_SIGNAL = (
        "stale signal",
        "the wait was satisfied by a signal of an earlier call",
    )
    LIFETIME = (
        "payload lifetime",
        "memory is used for a later call while an earlier one may still be using it",
    )
    NO_WAIT = (
        "no wait",
        "no wait connects the two: nothing that the one waited for comes from the other",
    )
    HOST_WRITE = (
        "host write",
        "the host writes a word that kernels may be using; without a barrier nothing orders that",
    )
    TORN = (
        "torn word",
        "LL packets and Lamport words must be accessed whole and aligned",
    )
    DEADLOCK = ("deadlock", "all programs wait")
    LIVELOCK = ("livelock", "programs keep running without progress")
    WRONG_RESULT = ("wrong result", "the output differs from the reference")
    UNKNOWN = ("not simulated", "a kernel does what this check cannot simulate")
    OUTSIDE = ("out of bounds", "the address belongs to no tensor of the simulation")
    CRASH = ("crash", "a kernel raised an exception")

    @property
    def title(self) -> str:
        return self.value[0]

    @property
    def sentence(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class Violation:
    """One finding.

    Args:
        reason: the kind of violation.
        details: lines of text about actors and places.
        lines: the innermost source lines involved, as "file:number".
        replay: the command that repeats the schedule.
    """

    reason: Reason
    details: tuple[str, ...]
    lines: tuple[str, ...] = ()
    replay: str = field(default="", compare=False)

    def __str__(self) -> str:
        head = [f"{self.reason.title}: {self.reason.sentence}"]
        tail = [f"replay: {self.replay}"] if self.replay else []
        return "\n".join([*head, *(f"  {line}" for line in self.details), *tail])


def race(conflict: Conflict, region: Region) -> Violation:
    """Describe two unordered accesses."""
    reason = Reason.LIFETIME if region.is_lamport else _race_reason(conflict)
    accesses = (conflict.earlier, conflict.later)
    details = [f"unordered accesses of {where(region, conflict.address)}:"]
    for access in accesses:
        details += describe(access)
    lines = tuple(access.site.lines[0].where for access in accesses)
    return Violation(reason, tuple(details), lines)


def where(region: Region, address: int) -> str:
    """Name a place in memory."""
    return f"rank {region.rank}'s {region.describe(address - region.begin)}"


def who(actor: Actor) -> str:
    """Name an actor."""
    return f"rank {actor.rank}, {actor.name}, call {actor.call}"


def describe(access: Access) -> list[str]:
    """The actor, kind and source lines of an access."""
    kind = "stores" if access.writes else "loads"
    if access.is_atomic:
        kind = f"{'writes' if access.writes else 'reads'} (atomic, {access.sem}, {access.scope})"
    return [f"{who(access.actor)} {kind}", *source(access.site)]


def source(site: Site) -> list[str]:
    """The lines of a site, indented."""
    first, *callers = site.lines
    shown = [f"  {first.where}  {first.text}"]
    return shown + [f"    called from {line.where}  {line.text}" for line in callers]


def _race_reason(conflict: Conflict) -> Reason:
    one, other = conflict.earlier, conflict.later
    hosts = [access for access in (one, other) if access.actor.program is None and access.writes]
    if hosts and (one.is_atomic or other.is_atomic):
        return Reason.HOST_WRITE
    if one.is_atomic and other.is_atomic:
        return Reason.SCOPE
    if one.is_atomic or other.is_atomic:
        plain = other if one.is_atomic else one
        return Reason.NO_RELEASE if plain.writes else Reason.NO_ACQUIRE
    return _repair(conflict) or _unconnected(conflict)


def _repair(conflict: Conflict) -> Reason | None:
    """The smallest repair that would order the two accesses."""
    repairs = {
        World.ACQUIRES: Reason.NO_ACQUIRE,
        World.RELEASES: Reason.NO_RELEASE,
        World.SCOPES: Reason.SCOPE,
        World.ALL: Reason.SEVERAL,
    }
    earlier, actor = conflict.earlier, conflict.later.actor
    for world, reason in repairs.items():
        if actor.has_seen(earlier.actor.slot, earlier.epoch, world):
            return reason
    return None


def _unconnected(conflict: Conflict) -> Reason:
    """The reason where even repaired signals do not connect the two accesses."""
    one, other = conflict.earlier, conflict.later
    writer, reader = (one, other) if one.writes else (other, one)
    if one.writes and other.writes and one.actor.call != other.actor.call:
        return Reason.LIFETIME
    if writer.actor.call > reader.actor.call:
        return Reason.LIFETIME
    heard = reader.actor.heard.get(writer.actor.rank)
    if heard is None or reader.actor.rank == writer.actor.rank:
        return Reason.NO_WAIT
    return Reason.STALE_SIGNAL if heard < writer.actor.call else Reason.EARLY_SIGNAL
