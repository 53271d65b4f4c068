"""What peers are told: signals come after all that they speak of."""

from __future__ import annotations

import re
from collections.abc import Iterator

from taxfree_kernels.cross_compile.asm_checks.rules import Finding, gate
from taxfree_kernels.cross_compile.asm_checks.subject import Subject
from taxfree_kernels.cross_compile.assembly import Assembly, Instruction, Place, Role, playing

_ORDERS = {
    "release": ("release",),
    "acquire": ("acquire",),
    "acq_rel": ("acquire", "release"),
}


@gate
def barrier_before_release(subject: Subject) -> Iterator[Finding]:
    """Between a program's stores and its release there is a barrier of all its threads."""
    code = subject.assembly
    if subject.is_one_wave:
        return
    for place in code.places(Role.RELEASE):
        stores = (Role.STORE, Role.BULK_STORE)
        early = code.first(place, playing(Role.BARRIER), *stores, backwards=True)
        if early is not None:
            yield Finding("no barrier between store and release", early)


@gate
def stores_drained(subject: Subject) -> Iterator[Finding]:
    """On CDNA each wave waits for its own stores before the barrier that precedes the release."""
    code = subject.assembly
    if code.is_ptx:
        return
    for place in code.places(Role.RELEASE):
        for barrier in [place] if subject.is_one_wave else _last_barriers(code, place):
            store = code.first(barrier, playing(Role.DRAIN), Role.STORE, backwards=True)
            if store is not None:
                yield Finding("store not waited for by its own wave", store)


@gate
def system_scope(subject: Subject) -> Iterator[Finding]:
    """What is released and acquired at system scope in the source, is in the assembly.

    Device scope is for counters, which acquire and release at once.
    """
    code, orders = subject.assembly, _orders(subject.source)
    for semantics, scope in orders:
        if scope != "sys" and semantics != "acq_rel":
            yield Finding(f"{semantics} at {scope} scope in the source")
    for role, name in ((Role.RELEASE, "release"), (Role.ACQUIRE, "acquire")):
        for reach in ("sys", "gpu"):
            wanted = sum(
                name in _ORDERS[semantics] and scope == reach for semantics, scope in orders
            )
            found = sum(code.at(place).scope == reach for place in code.places(role))
            if found < wanted:
                message = (
                    f"{wanted} {name}s at {reach} scope in the source, {found} in the assembly"
                )
                yield Finding(message)
        narrow = [place for place in code.places(role) if code.at(place).scope != "sys"]
        counters = sum(scope != "sys" for _, scope in orders)
        if orders and len(narrow) > counters:
            yield Finding(f"{name} lost its system scope", code.at(narrow[0]))


@gate
def bulk_stores_done(subject: Subject) -> Iterator[Finding]:
    """A release comes after bulk stores have completed, not only read their source."""
    code = subject.assembly
    for place in code.places(Role.RELEASE):
        under_way = (Role.BULK_STORE, Role.BULK_READ)
        store = code.first(place, playing(Role.BULK_DONE), *under_way, backwards=True)
        if store is not None:
            yield Finding("bulk store unfinished at the release", store)


def _orders(ttir: str) -> list[tuple[str, str]]:
    """(semantics, scope) of the ordered atomics of the source."""
    found = re.findall(r"tt\.atomic_(?:rmw \w+|cas|load|store)[, ]+(\w+), (\w+),", ttir)
    return [(semantics, scope) for semantics, scope in found if semantics != "relaxed"]


def _last_barriers(code: Assembly, place: Place) -> list[Place]:
    """The first barriers met on the ways back from `place`."""
    met: list[Instruction] = []

    def stop(instruction: Instruction) -> bool:
        if instruction.plays(Role.BARRIER):
            met.append(instruction)
        return instruction.plays(Role.BARRIER)

    for _ in code.walk(place, stop, backwards=True):
        pass
    return [barrier for barrier in code.places(Role.BARRIER) if code.at(barrier) in met]
