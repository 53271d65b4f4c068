"""Waiting for peers: polls stay in loops, and nothing that is waited for is used early."""

from __future__ import annotations

import re
from collections.abc import Iterator

from taxfree_kernels.cross_compile.asm_checks.rules import Finding, gate
from taxfree_kernels.cross_compile.asm_checks.subject import Subject
from taxfree_kernels.cross_compile.assembly import (
    POLLS,
    Assembly,
    Instruction,
    Place,
    Role,
    playing,
)

#: by one of which a loop gets on
_PROGRESS = (
    Role.POLL, Role.ACQUIRE, Role.RELEASE, Role.CAS, Role.LOAD, Role.COPY, Role.STORE,
    Role.SHARED_STORE, Role.MATRIX,
)  # fmt: skip

#: in assembly: the exchange of a thread that has waited in vain
_GIVES_UP = re.compile(r"relaxed\.exch|atomic_swap")

#: what a loop does besides, around a wait that is gone
_NOT_IN_A_WAIT = (
    Role.LOAD, Role.COPY, Role.STORE, Role.BULK_STORE, Role.MATRIX, Role.RELEASE,
)  # fmt: skip


@gate
def poll_in_loop(subject: Subject) -> Iterator[Finding]:
    """The polled load was not moved out of its loop, nor the loop deleted.

    An acquire is in a loop of polls, or before it (when the first poll acquires), or after it.
    """
    code = subject.assembly
    spinning = {
        code.at(place).line
        for loop in subject.poll_loops
        for place in code.places(Role.POLL, Role.ACQUIRE)
        if place[0] in loop.blocks
    }
    for place in code.places_at_system_scope(Role.ACQUIRE):
        around = {code.at(place).line}
        around.update(one.line for one in code.walk(place, _never))
        around.update(one.line for one in code.walk(place, _never, backwards=True))
        if not around & spinning:
            yield Finding("acquire without a polling loop", code.at(place))
    # on CDNA polls of words look like others
    wanted = subject.wait_loops + (0 if code.is_ptx else subject.word_loops)
    only = [loop for loop in subject.poll_loops if not code.has(loop, *_NOT_IN_A_WAIT)]
    if len(only) < wanted:
        yield Finding(f"{wanted} waits in the source, {len(only)} loops poll")


@gate
def acquire_after_poll(subject: Subject) -> Iterator[Finding]:
    """A loop of relaxed polls is left through an acquire at system scope, before any load.

    Polls of words need none; on CDNA they look like others, and are counted.
    """
    code = subject.assembly
    found = []
    for loop in subject.poll_loops:
        if any(instruction.is_system_acquire for instruction in code.inside(loop)):
            continue
        place = next(at for at in code.places(Role.POLL) if at[0] in loop.blocks)
        passed = list(code.walk(place, lambda one: one.is_system_acquire))
        early = [one for one in passed if one.plays(Role.LOAD, Role.COPY)]
        if early:
            found.append(Finding("load before the acquire", early[0]))
        elif not _acquires_after(code, place):
            found.append(Finding("poll without an acquire after it", code.at(place)))
    yield from found[0 if code.is_ptx else subject.word_loops :]


@gate
def barrier_after_acquire(subject: Subject) -> Iterator[Finding]:
    """All threads of a program wait for the one that acquired, before any of them loads."""
    code = subject.assembly
    if subject.is_one_wave:
        return
    for place in code.places(Role.ACQUIRE):
        uses = (Role.LOAD, Role.COPY, Role.STORE, Role.BULK_STORE)
        early = code.first(place, _ends_wait, *uses)
        if early is not None:
            yield Finding("no barrier between acquire and use", early)


@gate
def proxy_fence_before_bulk_copies(subject: Subject) -> Iterator[Finding]:
    """What was waited for is copied by the TMA only behind a fence between the two proxies."""
    code = subject.assembly
    for place in code.places_at_system_scope(Role.ACQUIRE):
        early = code.first(place, playing(Role.PROXY_FENCE), Role.BULK_COPY)
        if early is not None:
            yield Finding("no proxy fence between acquire and copy", early)


@gate
def nothing_before_early_wait(subject: Subject) -> Iterator[Finding]:
    """A kernel that is launched early waits, and on no path accesses memory before that wait.

    Exception: after a kernel of its own call it may read the generation, by an atomic that only
    reads, since the kernels of earlier calls have ended.
    """
    code = subject.assembly
    uses = [Role.LOAD, Role.COPY, Role.BULK_COPY, Role.STORE, Role.BULK_STORE, Role.ATOMIC]
    if subject.begins_call:
        uses += [*POLLS, Role.ACQUIRE]
    waits = code.places(Role.EARLY_WAIT)
    if subject.launched_early and not waits:
        yield Finding("launched early, and does not wait")
    if not waits:
        return
    begin = (0, -1)
    early = code.first(begin, playing(Role.EARLY_WAIT), *uses)
    if early is not None:
        yield Finding("memory is used before the wait", early)


@gate
def no_wait_in_k_loop(subject: Subject) -> Iterator[Finding]:
    """No poll and no acquire in a loop of matrix instructions: its loads are issued ahead."""
    code = subject.assembly
    for loop in subject.k_loops:
        for instruction in code.inside(loop):
            if instruction.plays(*POLLS) or instruction.is_system_acquire:
                yield Finding("wait inside a pipelined loop", instruction)
                break


@gate
def no_weak_poll(subject: Subject) -> Iterator[Finding]:
    """Nothing is polled by compare-and-swap or volatile load: some compilers get them wrong.

    Except blocks of words.
    """
    code = subject.assembly
    weak = (Role.CAS,) if subject.word_loops else (Role.CAS, Role.VOLATILE)
    for place in code.places(*weak):
        yield Finding("compare-and-swap or volatile load", code.at(place))


@gate
def no_blind_spin(subject: Subject) -> Iterator[Finding]:
    """No loop of barriers whose threads only look at shared memory that it does not write.

    Some compilers move the polling thread out of the loop in which the others wait for it.
    """
    code = subject.assembly
    for loop in code.loops:
        if code.nested(loop):
            continue
        inside = list(code.inside(loop))
        looks = any(one.plays(Role.SHARED_LOAD) for one in inside)
        waits = [one for one in inside if one.plays(Role.BARRIER)]
        if looks and waits and not any(one.plays(*_PROGRESS) for one in inside):
            yield Finding("a loop that waits for a thread outside of it", waits[0])


def _ends_wait(instruction: Instruction) -> bool:
    """A barrier; or the exchange by which the thread that polled gives up, to report it alone."""
    return instruction.plays(Role.BARRIER) or _GIVES_UP.search(instruction.text) is not None


def _acquires_after(code: Assembly, place: Place) -> bool:
    return any(one.is_system_acquire for one in code.walk(place, _never))


def _never(instruction: Instruction) -> bool:
    return False
