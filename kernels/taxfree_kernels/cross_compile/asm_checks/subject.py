"""What gates look at: one compiled kernel, with what Triton made of it on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from taxfree_kernels.cross_compile.assembly import Assembly, Loop, Role

#: in Triton's IR: a loop, up to the brace that closes it; polls of signals and of words, a store
#: of words
_WHILE = re.compile(r"^( *)(?:%[^\n]*? = )?scf\.while\b(.*?)^\1\}(?! do)", re.MULTILINE | re.DOTALL)
_SIGNAL_POLL = re.compile(r"tt\.atomic_rmw add, (?:acquire|relaxed), sys,")
WORD_POLL = re.compile(r"tt\.load .*isVolatile = true.*: tensor<([\dx]+)x!tt\.ptr<i(32|64)>>")
WORD_STORE = re.compile(
    r"tt\.store .*cache_?[mM]odifier = wt.*: tensor<([\dx]+)x!tt\.ptr<i(32|64)>"
)

#: in Triton's IR: what no program's id is, and a branch up to its end or its other side
_NO_PROGRAM = re.compile(r"(%[\w#]+) = arith\.cmpi slt, %program\w*, %c0_i32\b")
_IF = re.compile(
    r"^( *)(?:%[^\n]*? = )?scf\.if (%[\w#]+)[^\n]*\{\n.*?^\1\}", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Subject:
    """One compiled kernel.

    Args:
        text: its PTX or amdgcn.
        ttir, ttgir: what it was before.
        num_warps, num_stages: it was compiled with.
        spill_bytes: per thread.
        matrix_remarks: see :func:`taxfree_kernels.cross_compile.compile.matrix_remarks`.
        aligned: rows of all matrices start at multiples of 16 bytes, so accesses can be wide.
        launched_early: before the kernel before it has ended.
        begins_call: the kernel before it is of another call.
    """

    text: str
    ttir: str = ""
    ttgir: str = ""
    num_warps: int = 4
    num_stages: int = 1
    spill_bytes: int = 0
    matrix_remarks: Sequence[str] = ()
    aligned: bool = True
    launched_early: bool = False
    begins_call: bool = True

    @cached_property
    def assembly(self) -> Assembly:
        return Assembly(self.text)

    @property
    def threads(self) -> int:
        """Of one program."""
        return self.num_warps * (32 if self.assembly.is_ptx else 64)

    @property
    def is_one_wave(self) -> bool:
        """Whether its threads run in step, on CDNA: compilers then leave barriers out."""
        return self.num_warps == 1 and not self.assembly.is_ptx

    @cached_property
    def k_loops(self) -> list[Loop]:
        """Loops with matrix instructions, without the loops around them."""
        code = self.assembly
        matrix = [loop for loop in code.loops if code.has(loop, Role.MATRIX)]
        return [loop for loop in matrix if not any(other.blocks < loop.blocks for other in matrix)]

    @cached_property
    def poll_loops(self) -> list[Loop]:
        """Innermost loops that read a word that a peer writes."""
        code = self.assembly
        return [loop for loop in code.loops if _polls(code, loop) and not code.nested(loop)]

    @cached_property
    def source(self) -> str:
        """Its first form, without the branches that no program takes."""
        never = set(_NO_PROGRAM.findall(self.ttir))
        return _IF.sub(lambda found: "" if found[2] in never else found[0], self.ttir)

    @cached_property
    def wait_loops(self) -> int:
        """Loops of the source that poll signals, by atomics."""
        return sum(bool(_SIGNAL_POLL.search(body)) for _, body in _WHILE.findall(self.source))

    @cached_property
    def word_loops(self) -> int:
        """Loops of the source that poll words: blocks of them, by volatile loads."""
        return sum(bool(WORD_POLL.search(body)) for _, body in _WHILE.findall(self.ttir))

    @cached_property
    def word_bytes(self) -> int:
        """Of a LL packet 8, of a bare one 4; a kernel has one kind or none."""
        found = [*WORD_POLL.findall(self.ttir), *WORD_STORE.findall(self.ttir)]
        return min((int(bits) // 8 for _, bits in found), default=8)


def _polls(code: Assembly, loop: Loop) -> bool:
    return any(
        instruction.plays(Role.POLL) or instruction.is_system_acquire
        for instruction in code.inside(loop)
    )


def elements(shape: str) -> int:
    """Elements of a block: 128, of 2x64."""
    return math.prod(map(int, shape.split("x")))
