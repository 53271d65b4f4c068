"""The wait graph of a deadlock: the waiting programs, and those that have not started."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType

from taxfree_check.checker import report
from taxfree_check.checker.memory import Region
from taxfree_check.checker.report import Reason, Violation
from taxfree_check.checker.schedule import Task
from taxfree_check.checker.shadow import Shadow
from taxfree_check.checker.sites import SYNC_FILES, site_of
from taxfree_check.checker.watch import Thread
from taxfree_kernels.device.peers import EMPTY

_MOST_PLACES = 4  # that are listed of one program


@dataclass(frozen=True)
class Barrier:
    """What hosts wait for at a barrier."""

    channel: int

    def __str__(self) -> str:
        return "a barrier" + (f" of channel {self.channel}" if self.channel else "")


def deadlock(tasks: Iterable[Task[Thread]], others: Iterable[str], shadow: Shadow) -> Violation:
    """Describe tasks that all wait.

    Args:
        tasks: asleep.
        others: lines about programs and ranks that do not wait.
    """
    details: list[str] = []
    lines: list[str] = []
    for task in tasks:
        actor, site = task.owner.actor, site_of(task.coroutine.gr_frame)
        if actor.program is None:
            barriers = [thing for thing in task.waits_for if isinstance(thing, Barrier)]
            details += [f"rank {actor.rank}'s host waits at {barrier}" for barrier in barriers]
            words = _places(task, shadow, None)
            details += [f"rank {actor.rank}'s stream waits for {word}" for word in words]
            continue
        wanted = _wanted(task)
        what = "" if wanted is None else f" for generation {wanted}"
        details.append(f"{report.who(actor)} waits{what} in")
        details += report.source(site)
        places = list(_places(task, shadow, wanted))
        details += [f"  for {place}" for place in places[:_MOST_PLACES]]
        if len(places) > _MOST_PLACES:
            details.append(f"  and {len(places) - _MOST_PLACES} more")
        lines.append(site.in_kernel.where)
    return Violation(Reason.DEADLOCK, (*details, *others), tuple(lines))


def _places(task: Task[Thread], shadow: Shadow, wanted: int | None) -> Iterator[str]:
    """The words that a task waits for and that have not arrived."""
    for address in sorted(thing for thing in task.waits_for if isinstance(thing, int)):
        region = shadow.find(address)
        if region is None:
            continue
        place = report.where(region, address)
        if wanted is None:
            yield f"{place}, {_state(region, address, shadow)}"
            continue
        seen = ctypes.c_int64.from_address(address).value
        if region.is_lamport:
            if ctypes.c_int32.from_address(address).value == EMPTY.value:
                yield f"{place}, which is empty"
        elif region.word_bytes:
            flag = seen >> 32 & 0xFFFFFFFF
            if flag != wanted & 0xFFFFFFFF:
                yield f"{place}, which has the flag {flag}"
        elif seen < wanted:
            yield f"{place}, which holds {seen}"


def _state(region: Region, address: int, shadow: Shadow) -> str:
    """What a word holds, and who has written it last."""
    word = region.words.get(address)
    writes = [] if word is None else list(word.writes.values())
    stored = shadow.last_store(region, address)
    if stored is not None:
        writes.append(stored)
    size = 4 if word is None else word.size
    size = min(size, region.end - address)
    held = int.from_bytes(ctypes.string_at(address, size), "little", signed=True)
    if not writes:
        return f"which holds {held}: nobody has written it"
    last = max(writes, key=lambda access: (access.actor.call, access.epoch))
    return (
        f"which holds {held}, last written by {report.who(last.actor)} "
        f"at {last.site.in_kernel.where}"
    )


def _wanted(task: Task[Thread]) -> int | None:
    """The generation that a sleeping `wait` or `receive` waits for, from its variables."""
    frame: FrameType | None = task.coroutine.gr_frame
    while frame is not None:
        if frame.f_code.co_filename in SYNC_FILES and frame.f_code.co_name in ("wait", "receive"):
            return int(frame.f_locals["peers"].generation.handle.data.item())
        frame = frame.f_back
    return None
