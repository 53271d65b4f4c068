"""Waits for peers: polls stay in loops, and nothing that is waited for is used early."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from taxfree_check.cross_compile.asm_checks.rules import Finding, assembly_check
from taxfree_check.cross_compile.assembly import POLLS, AsmInstruction, Role
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel

#: one of these lets a loop get on
_PROGRESS = (
    Role.POLL, Role.ACQUIRE, Role.RELEASE, Role.CAS, Role.LOAD, Role.COPY, Role.STORE,
    Role.SHARED_STORE, Role.MATRIX,
)  # fmt: skip

#: a loop with one of these does more than wait
_NOT_IN_A_WAIT = (
    Role.LOAD, Role.COPY, Role.STORE, Role.BULK_STORE, Role.MATRIX, Role.RELEASE,
)  # fmt: skip

#: in assembly: the exchange by which one thread claims to report a timeout
_REPORTS_TIMEOUT = re.compile(r"relaxed\.exch|atomic_swap")


@assembly_check
def poll_in_loop(kernel: CompiledKernel) -> Iterator[Finding]:
    """The polled load was not moved out of its loop, nor the loop deleted.

    An acquire is in a loop of polls, or before it (when the first poll acquires), or after it.
    """
    code = kernel.code
    spinning = {
        code.at(place).line
        for loop in kernel.poll_loops
        for place in code.places(Role.POLL, Role.ACQUIRE)
        if place[0] in loop.blocks
    }
    for place in code.system_acquires():
        around = {code.at(place).line}
        around.update(one.line for one in code.walk(place, _never))
        around.update(one.line for one in code.walk(place, _never, backwards=True))
        if not around & spinning:
            yield Finding("acquire without a polling loop", code.at(place))
    # on CDNA polls of words look like others
    wanted = kernel.wait_loops + (0 if code.is_ptx else kernel.word_loops)
    only = [loop for loop in kernel.poll_loops if not code.has(loop, *_NOT_IN_A_WAIT)]
    if len(only) < wanted:
        yield Finding(f"{wanted} waits in the source, {len(only)} loops poll")


@assembly_check
def acquire_after_poll(kernel: CompiledKernel) -> Iterator[Finding]:
    """A loop of relaxed polls is left through an acquire at system scope, before any load.

    Polls of words need none; on CDNA they look like others, and are counted. Nor do those of an
    abort in a loop that acquires what another program of a cooperative launch counts.
    """
    code = kernel.code
    findings = []
    for loop in kernel.poll_loops:
        acquires = [one for one in code.inside(loop) if one.has(Role.ACQUIRE)]
        if any(one.scope == "sys" or kernel.is_cooperative for one in acquires):
            continue
        place = next(poll for poll in code.places(Role.POLL) if poll[0] in loop.blocks)
        early = code.first(place, _acquires, Role.LOAD, Role.COPY)
        if early is not None:
            findings.append(Finding("load before the acquire", early))
        elif not any(map(_acquires, code.walk(place, _never))):
            findings.append(Finding("poll without an acquire after it", code.at(place)))
    yield from findings[0 if code.is_ptx else kernel.word_loops :]


@assembly_check
def barrier_after_acquire(kernel: CompiledKernel) -> Iterator[Finding]:
    """All threads of a program wait for the one that acquired, before any of them loads."""
    if kernel.is_one_wave:
        return
    for place in kernel.code.places(Role.ACQUIRE):
        uses = (Role.LOAD, Role.COPY, Role.STORE, Role.BULK_STORE)
        early = kernel.code.first(place, partial(_ends_wait, kernel), *uses)
        if early is not None:
            yield Finding("no barrier between acquire and use", early)


@assembly_check
def proxy_fence_before_bulk_copies(kernel: CompiledKernel) -> Iterator[Finding]:
    """Between a wait and a copy of the TMA there is a fence between the two proxies."""
    for place in kernel.code.system_acquires():
        early = kernel.code.first(place, Role.PROXY_FENCE, Role.BULK_COPY)
        if early is not None:
            yield Finding("no proxy fence between acquire and copy", early)


@assembly_check
def nothing_before_early_wait(kernel: CompiledKernel) -> Iterator[Finding]:
    """A kernel that is launched early waits, and on no path accesses memory before that wait.

    Exceptions: after a kernel of its own call it may read the generation, by an atomic that only
    reads, since the kernels of earlier calls have ended; and what by a promise nobody writes.
    """
    uses = [Role.LOAD, Role.COPY, Role.BULK_COPY, Role.STORE, Role.BULK_STORE, Role.ATOMIC]
    if kernel.begins_call:
        uses += [*POLLS, Role.ACQUIRE]
    if not kernel.code.places(Role.EARLY_WAIT):
        if kernel.launched_early:
            yield Finding("launched early, and does not wait")
        return
    for early in kernel.code.walk((0, -1), lambda one: one.has(Role.EARLY_WAIT)):
        if early.has(*uses) and not kernel.loads_static(early):
            yield Finding("memory is used before the wait", early)
            return


@assembly_check
def next_launch_after_early_wait(kernel: CompiledKernel) -> Iterator[Finding]:
    """A kernel that is launched early lets the next one begin only after its own wait.

    So a kernel that has begun knows that the last but one before it has ended.
    """
    early = kernel.code.first((0, -1), Role.EARLY_WAIT, Role.LAUNCH_NEXT)
    if kernel.launched_early and early is not None:
        yield Finding("the next kernel may begin before the wait", early)


@assembly_check
def no_wait_in_k_loop(kernel: CompiledKernel) -> Iterator[Finding]:
    """No poll and no acquire in a loop of matrix instructions: its loads are issued ahead."""
    for loop in kernel.k_loops:
        for one in kernel.code.inside(loop):
            if one.has(*POLLS) or one.is_system_acquire:
                yield Finding("wait inside a pipelined loop", one)
                break


@assembly_check
def no_weak_poll(kernel: CompiledKernel) -> Iterator[Finding]:
    """No signal is polled by compare-and-swap or volatile load: some compilers get them wrong."""
    weak = (Role.CAS,) if kernel.word_loops else (Role.CAS, Role.VOLATILE)
    for place in kernel.code.places(*weak):
        yield Finding("compare-and-swap or volatile load", kernel.code.at(place))


@assembly_check
def no_blind_spin(kernel: CompiledKernel) -> Iterator[Finding]:
    """No loop of barriers whose threads only look at shared memory that it does not write.

    Some compilers move the polling thread out of the loop in which the others wait for it. Where
    warps have roles, those that have none yet wait in such a loop.
    """
    code = kernel.code
    if kernel.has_roles:
        return
    for loop in code.innermost_loops:
        barriers = [one for one in code.inside(loop) if one.has(Role.BARRIER)]
        if barriers and code.has(loop, Role.SHARED_LOAD) and not code.has(loop, *_PROGRESS):
            yield Finding("a loop that waits for a thread outside of it", barriers[0])


def _ends_wait(kernel: CompiledKernel, instruction: AsmInstruction) -> bool:
    """A barrier; or the exchange of the thread that alone reports a timeout."""
    reports = _REPORTS_TIMEOUT.search(instruction.text) is not None
    return reports or kernel.is_barrier(instruction)


def _acquires(instruction: AsmInstruction) -> bool:
    return instruction.is_system_acquire


def _never(instruction: AsmInstruction) -> bool:
    return False
