"""Speed: matrix instructions, loads ahead of their use, wide accesses, no spills."""

from __future__ import annotations

import re
from collections.abc import Iterator

from taxfree_check.cross_compile.asm_checks.rules import Finding, speed_check
from taxfree_check.cross_compile.assembly import AsmInstruction, Role
from taxfree_check.cross_compile.compiled_kernel import WORD_STORE, CompiledKernel, elements


@speed_check
def matrix_cores(kernel: CompiledKernel) -> Iterator[Finding]:
    """Every dot is done by matrix instructions, the widest that its shape allows."""
    wanted = len(re.findall(r"\btt\.dot\b", kernel.ttir))
    if wanted and not kernel.code.places(Role.MATRIX):
        yield Finding(f"{wanted} dots, no matrix instruction")
    for line in re.findall(r"= tt\.dot .*", kernel.ttgir):
        shape = re.search(r"-> tensor<(\d+)x(\d+)x\w+, (#\w+)>", line)
        if shape is None:
            continue
        rows, layout = int(shape.group(1)), shape.group(3)
        if not layout.startswith("#mma"):
            yield Finding(f"dot by plain multiply-adds: {line.strip()[:80]}")
        elif kernel.code.is_ptx and rows >= 64 and kernel.num_warps >= 4:
            yield Finding(f"{shape.group(0)} by mma.sync, not by wgmma")


@speed_check
def overlapping_matrices(kernel: CompiledKernel) -> Iterator[Finding]:
    """Matrix instructions that run asynchronously do not wait for one another."""
    for remark in kernel.matrix_remarks:
        yield Finding(remark)


@speed_check
def pipelined(kernel: CompiledKernel) -> Iterator[Finding]:
    """The loads of a loop of matrix instructions are issued stages ahead."""
    if not kernel.aligned or kernel.num_stages < 2:
        return
    code = kernel.code
    if kernel.has_roles:  # another warp loads, behind an indirect branch that is not followed here
        if "cp.async.bulk.tensor" not in kernel.text:
            yield Finding("no asynchronous copy")
        return
    for loop in kernel.k_loops:
        inside = code.inside(loop)
        if not code.is_ptx:
            if not _reads_shared_first(inside):
                yield Finding("the k loop waits for its own loads", inside[0])
            continue
        if not code.has(loop, Role.COPY):
            yield Finding("no asynchronous copy in the k loop", inside[0])
        load = next((one for one in inside if one.has(Role.LOAD)), None)
        if load is not None:
            yield Finding("synchronous load in the k loop", load)


@speed_check
def wide_accesses(kernel: CompiledKernel) -> Iterator[Finding]:
    """Loops move 16 bytes per thread and instruction, or all its share of a small tile.

    CDNA copies into shared memory by 4 or 16 bytes: a share of 8 is two copies.
    """
    if not kernel.aligned:
        return
    code = kernel.code
    shares = _small_shares(kernel)

    def is_narrow(one: AsmInstruction) -> bool:
        width = 2 * one.width if one.has(Role.COPY) and not code.is_ptx else one.width
        return one.width < 16 and not shares & {one.width, width}

    k_blocks = {block for loop in kernel.k_loops for block in loop.blocks}
    for loop in code.innermost_loops:
        copies = code.has(loop, Role.LOAD) and code.has(loop, Role.STORE)
        if not copies and not loop.blocks <= k_blocks:
            continue
        moves = [one for one in code.inside(loop) if one.has(Role.LOAD, Role.COPY, Role.STORE)]
        narrow = [one for one in moves if is_narrow(one)]
        if narrow:
            yield Finding(f"{len(narrow)} accesses below 16 bytes in a loop", narrow[0])


@speed_check
def wide_words(kernel: CompiledKernel) -> Iterator[Finding]:
    """Threads that have 16 bytes or more of every block of words store as much at a time."""
    stored = [elements(shape) for shape, _ in WORD_STORE.findall(kernel.ttgir)]
    fewest = 16 // kernel.word_bytes * kernel.threads
    if not kernel.aligned or not stored or min(stored) < fewest:
        return
    for place in kernel.code.places(Role.STORE):
        one = kernel.code.at(place)
        if one.scope == "sys" and one.width < 16:
            yield Finding("fewer words at once than a thread has", one)
            break


@speed_check
def no_spills(kernel: CompiledKernel) -> Iterator[Finding]:
    """Registers suffice."""
    if kernel.resources.spill_bytes:
        yield Finding(f"{kernel.resources.spill_bytes} bytes a thread in local memory")


@speed_check
def no_waterfall(kernel: CompiledKernel) -> Iterator[Finding]:
    """No loop over lanes around an access whose descriptor differs between lanes (CDNA)."""
    code = kernel.code
    for loop in code.loops:
        if len(loop.blocks) > 2 or not code.has(loop, Role.FIRST_LANE):
            continue
        accesses = [one for one in code.inside(loop) if one.text.startswith("buffer_")]
        if accesses and not code.has(loop, Role.BARRIER, Role.MATRIX):
            yield Finding("one access per lane", accesses[0])


def _small_shares(kernel: CompiledKernel) -> set[int]:
    """Bytes per thread of tiles that are too small for 16."""
    shares = set()
    for dimensions, bits in re.findall(
        r"(?:load|async_copy)\w*\b.*?(?::|->) tensor<([\dx]+)x(?:!tt\.ptr<)?[a-z]+(\d+)",
        kernel.ttgir,
    ):
        shares.add(max(1, elements(dimensions) // kernel.threads) * int(bits) // 8)
    return {share for share in shares if share < 16}


def _reads_shared_first(inside: list[AsmInstruction]) -> bool:
    """Whether a loop begins with what an earlier iteration, or its prologue, has put into LDS."""
    reads = (Role.SHARED_LOAD, Role.COPY, Role.MATRIX)
    first = next((one for one in inside if one.has(*reads, Role.SHARED_STORE)), None)
    return first is not None and first.has(*reads)
