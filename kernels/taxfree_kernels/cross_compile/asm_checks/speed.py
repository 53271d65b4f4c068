"""Speed: matrix instructions, loads ahead of their use, wide accesses, no spills."""

from __future__ import annotations

import re
from collections.abc import Iterator

from taxfree_kernels.cross_compile.asm_checks.rules import Finding, gate_of_speed
from taxfree_kernels.cross_compile.asm_checks.subject import WORD_STORE, Subject, elements
from taxfree_kernels.cross_compile.assembly import Instruction, Role


@gate_of_speed
def matrix_cores(subject: Subject) -> Iterator[Finding]:
    """Every dot is done by matrix instructions, the widest that its shape allows."""
    wanted = len(re.findall(r"\btt\.dot\b", subject.ttir))
    if wanted and not subject.assembly.places(Role.MATRIX):
        yield Finding(f"{wanted} dots, no matrix instruction")
    for line in re.findall(r"= tt\.dot .*", subject.ttgir):
        shape = re.search(r"-> tensor<(\d+)x(\d+)x\w+, (#\w+)>", line)
        if shape is None:
            continue
        rows, layout = int(shape.group(1)), shape.group(3)
        if not layout.startswith("#mma"):
            yield Finding(f"dot by plain multiply-adds: {line.strip()[:80]}")
        elif subject.assembly.is_ptx and rows >= 64 and subject.num_warps >= 4:
            yield Finding(f"{shape.group(0)} by mma.sync, not by wgmma")


@gate_of_speed
def overlapping_matrices(subject: Subject) -> Iterator[Finding]:
    """Matrix instructions that run asynchronously do not wait for one another."""
    for remark in subject.matrix_remarks:
        yield Finding(remark)


@gate_of_speed
def pipelined(subject: Subject) -> Iterator[Finding]:
    """The loads of a loop of matrix instructions are issued stages ahead."""
    if not subject.aligned or subject.num_stages < 2:
        return
    code = subject.assembly
    for loop in subject.k_loops:
        inside = list(code.inside(loop))
        if code.is_ptx:
            if not any(one.plays(Role.COPY) for one in inside):
                yield Finding("no asynchronous copy in the k loop", inside[0])
            for one in inside:
                if one.plays(Role.LOAD):
                    yield Finding("synchronous load in the k loop", one)
                    break
        elif not _reads_shared_first(inside):
            yield Finding("the k loop waits for its own loads", inside[0])


@gate_of_speed
def wide_accesses(subject: Subject) -> Iterator[Finding]:
    """Loops move 16 bytes per thread and instruction, or all its share of a small tile.

    CDNA copies into shared memory by 4 or 16 bytes: a share of 8 is two copies.
    """
    if not subject.aligned:
        return
    code = subject.assembly
    shares = _small_shares(subject)

    def is_narrow(one: Instruction) -> bool:
        width = 2 * one.width if one.plays(Role.COPY) and not code.is_ptx else one.width
        return one.width < 16 and not shares & {one.width, width}

    k_blocks = {block for loop in subject.k_loops for block in loop.blocks}
    for loop in code.loops:
        if code.nested(loop):
            continue
        inside = list(code.inside(loop))
        copies = any(one.plays(Role.LOAD) for one in inside) and any(
            one.plays(Role.STORE) for one in inside
        )
        if not copies and not loop.blocks <= k_blocks:
            continue
        moves = [one for one in inside if one.plays(Role.LOAD, Role.COPY, Role.STORE)]
        narrow = [one for one in moves if is_narrow(one)]
        if narrow:
            yield Finding(f"{len(narrow)} accesses below 16 bytes in a loop", narrow[0])


@gate_of_speed
def wide_words(subject: Subject) -> Iterator[Finding]:
    """Threads that have 16 bytes or more of every block of words store as much at a time."""
    code = subject.assembly
    stored = [elements(shape) for shape, _ in WORD_STORE.findall(subject.ttgir)]
    fewest = 16 // subject.word_bytes * subject.threads
    if not subject.aligned or not stored or min(stored) < fewest:
        return
    for place in code.places(Role.STORE):
        one = code.at(place)
        if one.scope == "sys" and one.width < 16:
            yield Finding("fewer words at once than a thread has", one)
            break


@gate_of_speed
def no_spills(subject: Subject) -> Iterator[Finding]:
    """Registers suffice."""
    if subject.spill_bytes:
        yield Finding(f"{subject.spill_bytes} bytes a thread in local memory")


@gate_of_speed
def no_waterfall(subject: Subject) -> Iterator[Finding]:
    """No loop over lanes around an access whose descriptor differs between lanes (CDNA)."""
    code = subject.assembly
    for loop in code.loops:
        inside = list(code.inside(loop))
        if len(loop.blocks) > 2 or not any(one.plays(Role.FIRST_LANE) for one in inside):
            continue
        accesses = [one for one in inside if one.text.startswith("buffer_")]
        if accesses and not any(one.plays(Role.BARRIER, Role.MATRIX) for one in inside):
            yield Finding("one access per lane", accesses[0])


def _small_shares(subject: Subject) -> set[int]:
    """Bytes per thread of tiles that are too small for 16."""
    shares = set()
    for dimensions, bits in re.findall(
        r"(?:load|async_copy)\w*\b.*?(?::|->) tensor<([\dx]+)x(?:!tt\.ptr<)?[a-z]+(\d+)",
        subject.ttgir,
    ):
        shares.add(max(1, elements(dimensions) // subject.threads) * int(bits) // 8)
    return {share for share in shares if share < 16}


def _reads_shared_first(inside: list[Instruction]) -> bool:
    """Whether a loop begins with what an earlier iteration, or its prologue, has put into LDS."""
    for instruction in inside:
        if instruction.plays(Role.SHARED_LOAD, Role.COPY, Role.MATRIX):
            return True
        if instruction.plays(Role.SHARED_STORE):
            return False
    return False
