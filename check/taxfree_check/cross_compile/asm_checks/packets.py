"""LL packets and Lamport words are accessed whole, and past all caches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from taxfree_check.cross_compile.asm_checks.rules import Finding, assembly_check
from taxfree_check.cross_compile.assembly import POLLS, AsmInstruction, Role
from taxfree_check.cross_compile.compiled_kernel import (
    WORD_POLL,
    WORD_STORE,
    CompiledKernel,
    elements,
)


@assembly_check
def whole_words(kernel: CompiledKernel) -> Iterator[Finding]:
    """LL packets (8 bytes) and Lamport words (4) are stored and polled whole, past all caches.

    LLVM merges loads of the same address, which padded rows of words have, and leaves out stores
    whose masks it knows to be false; PTX keeps all of them.
    """
    if not WORD_POLL.search(kernel.ttir) and not WORD_STORE.search(kernel.ttir):
        return
    code, size = kernel.code, kernel.word_bytes
    loops = [
        loop
        for loop in code.innermost_loops
        if any(
            _loads_words(one) and one.scope == "sys" and one.element >= size
            for one in code.inside(loop)
        )
    ]
    if len(loops) < kernel.word_loops:
        yield Finding(f"{kernel.word_loops} loops of the source poll words, {len(loops)} do")
    in_loops = [one for loop in loops for one in code.inside(loop)]
    for one in in_loops:
        if one.has(Role.LOAD):
            yield Finding("a word polled in a cache", one)
    again = [one for one in in_loops if _loads_words(one)]
    # by op, for a look at the abort word may become a load, too
    ops = {one.op for one in again}
    polls = [code.at(place) for place in code.places(*POLLS)]
    polls = [one for one in polls if _loads_words(one) and one.op in ops]
    stores = [code.at(place) for place in code.places(Role.STORE)]
    bytes_polled = _bytes(kernel, WORD_POLL) if code.is_ptx else 2 * _past_caches(again)
    bytes_stored = _bytes(kernel, WORD_STORE)
    counted = [("polled", polls, bytes_polled)]
    if code.is_ptx:
        counted.append(("stored", stores, bytes_stored))
    else:
        yield from _cached_stores(kernel, stores)
    for action, made, wanted in counted:
        past = _past_caches(made)
        if past < wanted:
            yield Finding(f"of {wanted} bytes a thread {past} are {action} past the caches")
    for one in [*polls, *(stores if bytes_stored else ())]:
        if one.scope == "sys" and one.element < size:
            yield Finding("a word in parts", one)


def _cached_stores(kernel: CompiledKernel, stores: Iterable[AsmInstruction]) -> Iterator[Finding]:
    """Stores of words, of which LLVM may leave out parts, that do not go past the caches."""
    past = [one for one in stores if one.scope == "sys"]
    wanted = len(WORD_STORE.findall(kernel.source))
    if len(past) < wanted:
        yield Finding(f"{wanted} stores of words in the source, {len(past)} go past the caches")
    sources = {one.source for one in past} - {""}
    for one in stores:
        if one.scope != "sys" and one.source in sources:
            yield Finding("a word stored in a cache", one)


def _loads_words(instruction: AsmInstruction) -> bool:
    """Whether it may be a poll of words; atomics poll signals."""
    return instruction.has(*POLLS) and not instruction.has(Role.ATOMIC)


def _past_caches(accesses: Iterable[AsmInstruction]) -> int:
    """Bytes of accesses that bypass all caches, for each thread."""
    return sum(one.width for one in accesses if one.scope == "sys")


def _bytes(kernel: CompiledKernel, words: re.Pattern[str]) -> int:
    """Bytes that a thread has of all blocks of words in the source."""
    return sum(
        max(1, elements(shape) // kernel.threads) * int(bits) // 8
        for shape, bits in words.findall(kernel.source)
    )
