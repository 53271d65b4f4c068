"""Words that show themselves whether they have arrived: whole, past all caches, seen once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from taxfree_kernels.cross_compile.asm_checks.rules import Finding, gate
from taxfree_kernels.cross_compile.asm_checks.subject import (
    WORD_POLL,
    WORD_STORE,
    Subject,
    elements,
)
from taxfree_kernels.cross_compile.assembly import POLLS, Assembly, Instruction, Loop, Role

#: in Triton's IR for GPUs: a poll of words
_POLLED = re.compile(
    r"(?:tt\.load .*isVolatile = true|buffer_load .*\bcv\b).*"
    r" tensor<([\dx]+)x(?:!tt\.ptr<)?i(?:32|64)"
)


@gate
def whole_words(subject: Subject) -> Iterator[Finding]:
    """Words are stored and polled as a whole (8 bytes, bare ones 4), bypassing all caches.

    LLVM merges loads of the same address, which padded rows of words have; PTX keeps all of them.
    """
    if not WORD_POLL.search(subject.ttir) and not WORD_STORE.search(subject.ttir):
        return
    code, size = subject.assembly, subject.word_bytes
    innermost = [loop for loop in code.loops if not code.nested(loop)]
    loops = [loop for loop in innermost if _polls_words(code, loop, size)]
    if len(loops) < subject.word_loops:
        yield Finding(f"{subject.word_loops} loops of the source poll words, {len(loops)} do")
    in_loops = [one for loop in loops for one in code.inside(loop)]
    for one in in_loops:
        if one.plays(Role.LOAD):
            yield Finding("a word polled in a cache", one)
    again = [one for one in in_loops if _loads_words(one)]
    # by op, for the look at whether a peer gave up may become a load, too
    ops = {one.op for one in again}
    polls = [code.at(place) for place in code.places(*POLLS)]
    polls = [one for one in polls if _loads_words(one) and one.op in ops]
    stores = [code.at(place) for place in code.places(Role.STORE)]
    bytes_polled = _bytes(subject, WORD_POLL) if code.is_ptx else 2 * _past_caches(again)
    bytes_stored = _bytes(subject, WORD_STORE)
    for what, made, wanted in (("polled", polls, bytes_polled), ("stored", stores, bytes_stored)):
        past = _past_caches(made)
        if past < wanted:
            yield Finding(f"of {wanted} bytes a thread {past} are {what} past the caches")
    for one in [*polls, *(stores if bytes_stored else ())]:
        if one.scope == "sys" and one.element < size:
            yield Finding("a word in parts", one)


@gate
def own_words(subject: Subject) -> Iterator[Finding]:
    """No word is polled by two threads, or twice: one poll may see what the other has not.

    Compilers replicate a block smaller than the program across threads, and load such a block again
    for each layout that it is used in.
    """
    polls = [elements(shape) for shape in _POLLED.findall(subject.ttgir)]
    if len(polls) != len(WORD_POLL.findall(subject.ttir)):
        yield Finding("the compiler has doubled a load of words, or lost one")
    for words in polls:
        if words < subject.threads:
            yield Finding(f"{words} words are polled by {subject.threads} threads")


def _loads_words(instruction: Instruction) -> bool:
    """Whether it may be a poll of words; atomics poll signals."""
    return instruction.plays(*POLLS) and not instruction.plays(Role.ATOMIC)


def _polls_words(code: Assembly, loop: Loop, word_bytes: int) -> bool:
    """Whether a loop loads whole words past the caches."""
    return any(
        _loads_words(one) and one.scope == "sys" and one.element >= word_bytes
        for one in code.inside(loop)
    )


def _past_caches(accesses: Iterable[Instruction]) -> int:
    """Bytes of accesses that bypass all caches, for each thread."""
    return sum(one.width for one in accesses if one.scope == "sys")


def _bytes(subject: Subject, words: re.Pattern[str]) -> int:
    """Bytes that a thread has of all blocks of words in the source."""
    return sum(
        max(1, elements(shape) // subject.threads) * int(bits) // 8
        for shape, bits in words.findall(subject.source)
    )
