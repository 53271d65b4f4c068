"""Kernels whose programs wait for one another, and rings of stages that the TMA fills."""

from __future__ import annotations

import re
from collections.abc import Iterator

from taxfree_check.cross_compile.asm_checks.rules import Finding, assembly_check
from taxfree_check.cross_compile.assembly import AsmInstruction, Role
from taxfree_check.cross_compile.compiled_kernel import CompiledKernel

#: in Triton's IR: layouts of what the TMA fills; a load of it into registers; a fence of the
#: asynchronous proxy in shared memory; an arrival at a barrier
_FILLED = re.compile(r"^(#\w+) = #ttg\.nvmma_shared", re.MULTILINE)
_LOADED = re.compile(r"ttg\.local_load .*memdesc<[\dx]+\w+, (#\w+),")
_FENCE = re.compile(r"fence\.proxy\.async\.shared|fence_async_shared")
_ARRIVAL = re.compile(r"arrive_barrier")

#: of another program's results, past the cache of the own compute unit
_HANDED_ON = re.compile(r"ld\.global\.cg\b")


@assembly_check
def all_resident(kernel: CompiledKernel) -> Iterator[Finding]:
    """Programs that wait for others of their launch are launched cooperatively, and all fit.

    They wait at device scope; signals of peers, and of lower programs, have system scope.
    """
    code = kernel.code
    waits = [code.at(place) for place in code.places(Role.ACQUIRE)]
    waits = [one for one in waits if one.scope == "gpu" and not one.has(Role.ATOMIC)]
    if not kernel.is_cooperative:
        if waits and code.is_ptx:
            yield Finding("programs wait for others, which may not have started", waits[0])
    elif kernel.programs > kernel.resident_programs:
        yield Finding(f"{kernel.programs} programs, of which {kernel.resident_programs} fit")


@assembly_check
def handed_on_after_wait(kernel: CompiledKernel) -> Iterator[Finding]:
    """What another program hands on is loaded behind a wait that follows the own last release.

    By the TMA behind a proxy fence as well. A role that never releases loads what nobody hands on.
    """
    code = kernel.code
    releases = [one for one in code.places(Role.RELEASE) if not code.at(one).has(Role.ACQUIRE)]
    for place in [(0, -1), *releases] if kernel.is_cooperative else []:
        for one in code.walk(place, lambda at: at.has(Role.ACQUIRE)):
            is_copied = one.has(Role.BULK_COPY) and place in releases
            if is_copied or (one.has(Role.LOAD) and _HANDED_ON.search(one.text)):
                yield Finding("a load above its wait", one)
                break
    for place in code.places(Role.ACQUIRE) if kernel.is_cooperative else []:
        if code.at(place).scope == "gpu" and not code.at(place).has(Role.ATOMIC):
            early = code.first(place, Role.PROXY_FENCE, Role.BULK_COPY)
            if early is not None:
                yield Finding("no proxy fence between wait and copy", early)


@assembly_check
def stages_fenced(kernel: CompiledKernel) -> Iterator[Finding]:
    """Before a stage goes back to the TMA, a proxy fence follows the loads of it into registers.

    An arrival orders them before accesses of the generic proxy alone: the TMA could overwrite what
    a load that is under way has yet to read.
    """
    filled = set(_FILLED.findall(kernel.ttgir))
    if not filled or not _ARRIVAL.search(kernel.ttgir):  # by hand: a pipeline's are the compiler's
        return
    lines = kernel.ttgir.splitlines()
    for number, line in enumerate(lines):
        loaded = _LOADED.search(line)
        if loaded is None or loaded[1] not in filled:
            continue
        for following in lines[number:]:
            if _FENCE.search(following):
                break
            if _ARRIVAL.search(following):
                yield Finding(f"no fence between load and arrival: {line.strip()[:80]}")
                break
    for place in kernel.code.places(Role.SHARED_FENCE) if _FENCE.search(kernel.ttgir) else ():
        late = kernel.code.first(place, _hands_on, Role.SHARED_LOAD)
        if late is not None:
            yield Finding("a load behind the fence of its stage", late)


def _hands_on(instruction: AsmInstruction) -> bool:
    """An arrival at a barrier, another fence, or the copy that a fence of the compiler is for."""
    return instruction.has(Role.ARRIVAL, Role.SHARED_FENCE, Role.BULK_COPY, Role.BULK_STORE)
