"""Layouts in Triton's IR for GPUs: how blocks are shared among threads and warps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from taxfree_check.cross_compile.asm_checks.rules import Finding, assembly_check
from taxfree_check.cross_compile.compiled_kernel import WORD_POLL, CompiledKernel, elements

#: a poll of words
_POLLED = re.compile(
    r"(?:tt\.load .*isVolatile = true|buffer_load .*\bcv\b).*"
    r" tensor<([\dx]+)x(?:!tt\.ptr<)?i(?:32|64)"
)
#: a linear layout and its steps from warp to warp; a reduction
_LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?warp = (\[.*\]), block", re.MULTILINE)
_STEP = re.compile(r"\[([\d, ]+)\]")
_REDUCTION = re.compile(
    r'"tt\.reduce"\([^\n]*?<\{axis = (\d+) : i32\}> \(\{.*?\n *\}\) : \(tensor<[^\n]*?, (#\w+)>',
    re.DOTALL,
)


@assembly_check
def own_words(kernel: CompiledKernel) -> Iterator[Finding]:
    """No word is polled by two threads, or twice: one poll may see what the other has not.

    Compilers replicate a block smaller than the program across threads, and load such a block again
    for each layout that it is used in.
    """
    polls = [elements(shape) for shape in _POLLED.findall(kernel.ttgir)]
    if len(polls) != len(WORD_POLL.findall(kernel.ttir)):
        yield Finding("the compiler has doubled a load of words, or lost one")
    for words in polls:
        if words < kernel.threads:
            yield Finding(f"{words} words are polled by {kernel.threads} threads")


@assembly_check
def warps_of_reductions(kernel: CompiledKernel) -> Iterator[Finding]:
    """No reduction across warps has a layout that interleaves warps along its axis and others.

    Some compilers number such warps wrongly, so that two of them store to the same location.
    """
    layouts = dict(_LINEAR.findall(kernel.ttgir))
    for body in _REDUCTION.finditer(kernel.ttgir):
        axis, layout = int(body.group(1)), body.group(2)
        steps = [step.split(",") for step in _STEP.findall(layouts.get(layout, ""))]
        dims = [
            next((index for index, offset in enumerate(step) if int(offset)), -1) for step in steps
        ]
        if axis in dims and len([*groupby(dims)]) > len(set(dims)):
            yield Finding(f"along axis {axis} with warps {layouts[layout]}")
