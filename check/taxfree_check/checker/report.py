"""Reports of violations: the accesses, their actors, and the missing edge."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest

from taxfree_check.checker.clocks import Actor, Repair, Taken
from taxfree_check.checker.memory import Access, Conflict, Region
from taxfree_check.checker.sites import Site

_WIDEST, _NARROWEST = 80, 40


class Reason(Enum):
    """Reasons of violations: a title for tables, a sentence, and what would be right."""

    NO_ACQUIRE = (
        "no acquire",
        "the signal was read, but not by an acquire: what follows the read may still see old data",
        'make the read an acquire: sem="acquire", or a fence (fence.acq_rel) after a relaxed one',
    )
    NO_RELEASE = (
        "no release",
        "the signal was written, but not by a release: what precedes it may become visible later",
        'make the write a release: sem="release", or a fence (fence.acq_rel) before a relaxed one',
    )
    SCOPE = (
        "scope too narrow",
        "an atomic of this chain does not include the other program; between ranks, only sys does",
        'give the write and the read a scope of both programs: scope="sys" between ranks',
    )
    SEVERAL = (
        "several edges missing",
        "a signal connects the two, but needs more than one of release, acquire and sys scope",
        "write the signal by a release and read it by an acquire, both at sys scope between ranks",
    )
    EARLY_SIGNAL = (
        "signal before the data",
        "the signal of this call was waited for, but sent before this access was made",
        "signal after the access: a release covers only what its program did or acquired before it",
    )
    STALE_SIGNAL = (
        "stale signal",
        "the wait was satisfied by a signal of an earlier call",
        "signal a value that differs from call to call, or clear the flag where nobody can wait",
    )
    LIFETIME = (
        "payload lifetime",
        "memory is used for a later call while an earlier one may still be using it",
        "let the one release after its last use, and the other acquire that before it stores "
        "again; or use another buffer in the next call",
    )
    NO_WAIT = (
        "no wait",
        "no wait connects the two: nothing that the one waited for comes from the other",
        "let the first release a flag after its access, and the second acquire it before its own",
    )
    TIMEOUT = (
        "timeout ignored",
        "a poll timed out, and its program went on as if the signal had come",
        "use the result of the poll: where it is false, touch nothing that the signal guards",
    )
    HOST_WRITE = (
        "host write",
        "the host writes a word that kernels may be using; without a barrier nothing orders that",
        "put a barrier of all ranks before and after the write, or use flags that need no clearing",
    )
    TORN = (
        "torn word",
        "LL packets and Lamport words must be accessed whole and aligned",
        "",
    )
    DEADLOCK = ("deadlock", "all programs wait", "")
    LIVELOCK = ("livelock", "programs keep running without progress", "")
    WRONG_RESULT = ("wrong result", "the output differs from the reference", "")
    ASSUMPTION = (
        "false assumption",
        "tl.assume is given what is false here: compilers may build on it",
        "",
    )
    UNKNOWN = ("not simulated", "a kernel does what this check cannot simulate", "")
    OUTSIDE = ("out of bounds", "the address belongs to no tensor of the simulation", "")
    CRASH = ("crash", "a kernel raised an exception", "")

    @property
    def title(self) -> str:
        return self.value[0]

    @property
    def sentence(self) -> str:
        return self.value[1]

    @property
    def remedy(self) -> str:
        return self.value[2]


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


def race(
    conflict: Conflict,
    region: Region,
    find: Callable[[int], Region | None],
    reason: Reason | None = None,
) -> Violation:
    """Describe two unordered accesses.

    Args:
        find: the memory at an address.
        reason: why they are unordered; found out when None.
    """
    reason = reason or (Reason.LIFETIME if region.is_lamport else _race_reason(conflict))
    accesses = (conflict.earlier, conflict.later)
    text = where(region, conflict.address)
    details = [f"unordered accesses of {text}:"]
    for access in accesses:
        details += describe(access)
    signal = _signal(conflict)
    if reason in (Reason.NO_WAIT, Reason.STALE_SIGNAL, Reason.LIFETIME):
        for access in accesses:
            details += _satisfied_at_once(access.actor, find)
    if reason.remedy:
        details.append(f"what would be right: {_remedy(reason, signal)}")
    details += ["order of events:", *_picture(conflict, text, signal, find)]
    lines = tuple(access.site.lines[0].where for access in accesses)
    return Violation(reason, tuple(details), lines)


def _satisfied_at_once(actor: Actor, find: Callable[[int], Region | None]) -> list[str]:
    """The word that an actor read last of those that nobody had written."""
    if not actor.unwritten:
        return []
    address, (read, held) = list(actor.unwritten.items())[-1]
    region = find(address)
    assert region is not None
    return [
        f"{who(actor)} read {where(region, address)} before anybody had written it: what it held "
        f"at first, {int.from_bytes(held, 'little', signed=True)}, ended the wait",
        *source(read.site),
    ]


def _remedy(reason: Reason, signal: Taken | None) -> str:
    """What would be right, with the lines of the signal's write and read."""
    if signal is None:
        return reason.remedy
    lines = {"the write": signal.message.access, "the read": signal.access}
    text = reason.remedy
    for what, access in lines.items():
        text = text.replace(what, f"{what} at {access.site.in_kernel.where}", 1)
    return text


def _signal(conflict: Conflict) -> Taken | None:
    """The signal that connects the two accesses, or would if it were repaired."""
    earlier, later = conflict.earlier, conflict.later
    if conflict.is_narrow:
        return None
    receipts = list(later.actor.taken.values())
    slot = earlier.actor.slot
    ordering = [
        receipt for receipt in receipts if receipt.message.clocks[Repair.ALL, slot] >= earlier.epoch
    ] or [receipt for receipt in receipts if receipt.message.access.actor is earlier.actor]
    return ordering[-1] if ordering else None


def _picture(
    conflict: Conflict, place: str, signal: Taken | None, find: Callable[[int], Region | None]
) -> list[str]:
    """The order of events as text, a column for each actor."""
    earlier, later = conflict.earlier, conflict.later
    events = [(earlier, f"{kind_of(earlier)} {place}")]
    if signal is not None:
        region = find(signal.address)
        word = "a flag" if region is None else where(region, signal.address)
        sent, seen = signal.message.access, signal.access
        is_before = sent.actor is earlier.actor and sent.epoch < earlier.epoch
        events.insert(0 if is_before else 1, (sent, f"{kind_of(sent)} {word}"))
        reads = kind_of(seen).replace("writes", "reads and writes", 1)
        events.append((seen, f"{reads} {word}"))
    events.append((later, f"{kind_of(later)} {place}"))
    actors = list(dict.fromkeys(access.actor for access, _ in events))
    rows = [[_folded(who(actor)) for actor in actors]]
    for access, text in events:
        cell = _folded(f"{text}  {access.site.in_kernel.where}")
        rows.append([cell if actor is access.actor else [] for actor in actors])
    widths = [
        max(len(line) for row in rows for line in row[column]) for column in range(len(actors))
    ]
    return [
        "  " + " | ".join(map(str.ljust, line, widths)).rstrip()
        for row in rows
        for line in zip_longest(*row, fillvalue="")
    ]


def _folded(text: str) -> list[str]:
    """A text in lines of which two stand side by side in a terminal of up to 80 columns."""
    columns = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size().columns))
    indent_and_rule = 8
    return textwrap.wrap(
        text, (columns - indent_and_rule) // 2, subsequent_indent="  ", break_on_hyphens=False
    )


def where(region: Region, address: int) -> str:
    """Name a place in memory."""
    return f"rank {region.rank}'s {region.describe(address - region.begin)}"


def who(actor: Actor) -> str:
    """Name an actor."""
    return f"rank {actor.rank}, {actor.name}, call {actor.call}"


def kind_of(access: Access) -> str:
    """The kind of an access."""
    if access.is_atomic:
        return f"{'writes' if access.writes else 'reads'} (atomic, {access.sem}, {access.scope})"
    return "stores" if access.writes else "loads"


def describe(access: Access) -> list[str]:
    """The actor, kind and source lines of an access."""
    return [f"{who(access.actor)} {kind_of(access)}", *source(access.site)]


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
    if conflict.is_narrow:
        return Reason.SCOPE
    if one.is_atomic != other.is_atomic:
        plain = other if one.is_atomic else one
        return Reason.NO_RELEASE if plain.writes else Reason.NO_ACQUIRE
    return _repair(conflict) or _unconnected(conflict)


def _repair(conflict: Conflict) -> Reason | None:
    """The smallest repair that would order the two accesses."""
    repairs = {
        Repair.SCOPES: Reason.SCOPE,
        Repair.ACQUIRES: Reason.NO_ACQUIRE,
        Repair.RELEASES: Reason.NO_RELEASE,
        Repair.ALL: Reason.SEVERAL,
    }
    earlier, actor = conflict.earlier, conflict.later.actor
    for repair, reason in repairs.items():
        if actor.has_seen(earlier.actor.slot, earlier.epoch, repair):
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
