"""Signals to peers come after all that they announce."""

from __future__ import annotations

import re
from collections.abc import Iterator

from taxfree_check.cross_compile.asm_checks.rules import Finding, assembly_check
from taxfree_check.cross_compile.assembly import AsmInstruction, Role
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel
from taxfree_check.cross_compile.control_flow import ControlFlow, Place

_ORDERS = {
    "release": ("release",),
    "acquire": ("acquire",),
    "acq_rel": ("acquire", "release"),
}


@assembly_check
def barrier_before_release(kernel: CompiledKernel) -> Iterator[Finding]:
    """Between a program's stores and its release there is a barrier of all its threads."""
    if kernel.is_one_wave:
        return
    for place in kernel.code.places(Role.RELEASE):
        stores = (Role.STORE, Role.BULK_STORE)
        early = kernel.code.first(place, kernel.is_barrier, *stores, backwards=True)
        if early is not None:
            yield Finding("no barrier between store and release", early)


@assembly_check
def stores_drained(kernel: CompiledKernel) -> Iterator[Finding]:
    """On CDNA each wave waits for its own stores before the barrier that precedes the release."""
    code = kernel.code
    if code.is_ptx:
        return
    for place in code.places(Role.RELEASE):
        for barrier in [place] if kernel.is_one_wave else _last_barriers(code, place):
            store = code.first(barrier, Role.DRAIN, Role.STORE, backwards=True)
            if store is not None:
                yield Finding("the wave does not wait for its own store", store)


@assembly_check
def written_back(kernel: CompiledKernel) -> Iterator[Finding]:
    """On CDNA a release waits until the write-back of the cache before it has ended.

    Triton 3.6 breaks this rule: its LLVM deletes the wait where it counts no access in flight,
    which https://github.com/llvm/llvm-project/pull/178316 mended.
    """
    for place in kernel.code.places(Role.RELEASE):
        early = kernel.code.first(place, Role.DRAIN, Role.WRITE_BACK, backwards=True)
        if early is not None:
            yield Finding("the release does not wait for the write-back", early)


@assembly_check
def system_scope(kernel: CompiledKernel) -> Iterator[Finding]:
    """Releases and acquires at system scope in the source are in the assembly.

    Device scope is for counters, which acquire and release at once, and for hand-offs between
    programs of a cooperative launch.
    """
    code, orders = kernel.code, _orders(kernel.source)
    for semantics, scope in orders:
        if scope != "sys" and semantics != "acq_rel" and not kernel.is_cooperative:
            yield Finding(f"{semantics} at {scope} scope in the source")
    counters = sum(scope != "sys" for _, scope in orders)
    for role, name in ((Role.RELEASE, "release"), (Role.ACQUIRE, "acquire")):
        made = [code.at(place) for place in code.places(role)]
        for reach in ("sys", "gpu"):
            wanted = sum(
                name in _ORDERS[semantics] and scope == reach for semantics, scope in orders
            )
            count = sum(instruction.scope == reach for instruction in made)
            if count < wanted:
                yield Finding(
                    f"{wanted} {name}s at {reach} scope in the source, {count} in the assembly"
                )
        narrow = [instruction for instruction in made if instruction.scope != "sys"]
        if orders and len(narrow) > counters:
            yield Finding(f"{name} lost its system scope", narrow[0])


@assembly_check
def bulk_stores_done(kernel: CompiledKernel) -> Iterator[Finding]:
    """A release comes after bulk stores have completed, not only read their source."""
    for place in kernel.code.places(Role.RELEASE):
        under_way = (Role.BULK_STORE, Role.BULK_READ)
        store = kernel.code.first(place, Role.BULK_DONE, *under_way, backwards=True)
        if store is not None:
            yield Finding("bulk store unfinished at the release", store)


def _orders(ttir: str) -> list[tuple[str, str]]:
    """(semantics, scope) of the ordered atomics of the source."""
    matches = re.findall(r"tt\.atomic_(?:rmw \w+|cas|load|store)[, ]+(\w+), (\w+),", ttir)
    return [(semantics, scope) for semantics, scope in matches if semantics != "relaxed"]


def _last_barriers(code: ControlFlow, place: Place) -> list[Place]:
    """The first barriers met on the ways back from `place`."""
    met: list[AsmInstruction] = []

    def stop(instruction: AsmInstruction) -> bool:
        if instruction.has(Role.BARRIER):
            met.append(instruction)
        return instruction.has(Role.BARRIER)

    for _ in code.walk(place, stop, backwards=True):
        pass
    return [barrier for barrier in code.places(Role.BARRIER) if code.at(barrier) in met]
