"""One compiled kernel, with the intermediate forms that Triton made on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from taxfree_check.cross_compile.assembly import AsmInstruction, Role
from taxfree_check.cross_compile.control_flow import ControlFlow, Loop, innermost
from taxfree_check.cross_compile.resources import Resources

#: in Triton's IR: a loop, up to the brace that closes it; polls of signals and of words, a store
#: of words
_WHILE = re.compile(r"^( *)(?:%[^\n]*? = )?scf\.while\b(.*?)^\1\}(?! do)", re.MULTILINE | re.DOTALL)
_SIGNAL_POLL = re.compile(r"tt\.atomic_rmw add, (?:acquire|relaxed), sys,")
WORD_POLL = re.compile(r"tt\.load .*isVolatile = true.*: tensor<([\dx]+)x!tt\.ptr<i(32|64)>>")
WORD_STORE = re.compile(
    r"tt\.store .*cache_?[mM]odifier = wt.*: tensor<([\dx]+)x!tt\.ptr<i(32|64)>"
)

#: in Triton's IR: a condition that holds for no program, and a branch up to its end or its else
_NO_PROGRAM = re.compile(r"(%[\w#]+) = arith\.cmpi slt, %program\w*, %c0_i32\b")
_IF = re.compile(
    r"^( *)(?:%[^\n]*? = )?scf\.if (%[\w#]+)[^\n]*\{\n.*?^\1\}", re.MULTILINE | re.DOTALL
)


#: in PTX: the moves of an address, and the source of a copy of the TMA
_MOVED = re.compile(r"^\s*(?:mov|cvta?)\.\S+\s+(%\w+), (%?\w+);", re.MULTILINE)
_TENSOR_MAP = re.compile(r"cp\.async\.bulk\.tensor\.\S*\.global\S* \[%\w+\], \[(%\w+), \{")


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel, as the assembly checks look at it.

    Args:
        text: PTX or amdgcn.
        ttir, ttgir: Triton's intermediate forms.
        num_warps, num_stages: compile options.
        resources: of one program.
        name: of the kernel.
        cache_key: of Triton's cache.
        matrix_remarks: see :func:`taxfree_check.cross_compile.compile.matrix_remarks`.
        aligned: rows of all matrices start at multiples of 16 bytes, so accesses can be wide.
        launched_early: before the kernel before it has ended.
        begins_call: the kernel before it is of another call.
        static: names of arguments: descriptors of memory that nobody writes.
        programs: of the launch.
        resident_programs: that the device holds at once.
        is_cooperative: it is launched only if all programs fit.
    """

    text: str
    ttir: str = ""
    ttgir: str = ""
    num_warps: int = 4
    num_stages: int = 1
    resources: Resources = field(default=Resources(0, 0, 0, 0))
    name: str = ""
    cache_key: str = ""
    matrix_remarks: Sequence[str] = ()
    aligned: bool = True
    launched_early: bool = False
    begins_call: bool = True
    static: Sequence[str] = ()
    programs: int = 0
    resident_programs: int = 0
    is_cooperative: bool = False

    @cached_property
    def code(self) -> ControlFlow:
        return ControlFlow(self.text)

    @property
    def threads(self) -> int:
        """Threads of one program."""
        return self.num_warps * (32 if self.code.is_ptx else 64)

    @property
    def is_one_wave(self) -> bool:
        """Whether its threads run in step, on CDNA: compilers then leave barriers out."""
        return self.num_warps == 1 and not self.code.is_ptx

    def is_barrier(self, instruction: AsmInstruction) -> bool:
        """Whether it is a barrier of all threads that run the same code."""
        roles = (Role.BARRIER, Role.WARP_BARRIER) if self.has_roles else (Role.BARRIER,)
        return instruction.has(*roles)

    @cached_property
    def k_loops(self) -> list[Loop]:
        """Loops with matrix instructions, without the loops around them."""
        matrix = [loop for loop in self.code.loops if self.code.has(loop, Role.MATRIX)]
        return innermost(matrix, matrix)

    @cached_property
    def poll_loops(self) -> list[Loop]:
        """Innermost loops that read a word that a peer writes."""
        return [
            loop
            for loop in self.code.innermost_loops
            if any(one.has(Role.POLL) or one.is_system_acquire for one in self.code.inside(loop))
        ]

    @cached_property
    def source(self) -> str:
        """Its TTIR, without the branches that no program takes."""
        never = set(_NO_PROGRAM.findall(self.ttir))
        return _IF.sub(lambda match: "" if match[2] in never else match[0], self.ttir)

    @cached_property
    def has_roles(self) -> bool:
        """Whether its warps have different programs: some load what others compute with."""
        return "ttg.warp_specialize" in self.ttgir

    @cached_property
    def _static_maps(self) -> set[str]:
        """Parameters and registers of PTX that hold addresses of static arguments' descriptors."""
        signature = next((line for line in self.ttgir.splitlines() if "tt.func public" in line), "")
        names = re.findall(r"[(,] ?%([\w.]+):", signature)
        entry = re.search(r"\.entry (\w+)", self.text)
        held = {f"{entry[1]}_param_{names.index(name)}" for name in self.static} if entry else set()
        for target, source in _MOVED.findall(self.text):  # in the order of the text
            if source in held:
                held.add(target)
        return held

    def loads_static(self, instruction: AsmInstruction) -> bool:
        """Whether an instruction is a copy of the TMA from memory that nobody writes."""
        source = _TENSOR_MAP.search(instruction.text)
        return source is not None and source[1] in self._static_maps

    @cached_property
    def wait_loops(self) -> int:
        """Loops of the source that poll signals, by atomics."""
        return sum(bool(_SIGNAL_POLL.search(body)) for _, body in _WHILE.findall(self.source))

    @cached_property
    def word_loops(self) -> int:
        """Loops of the source that poll blocks of words, by volatile loads."""
        return sum(bool(WORD_POLL.search(body)) for _, body in _WHILE.findall(self.ttir))

    @cached_property
    def word_bytes(self) -> int:
        """8 of an LL packet, 4 of a Lamport word; a kernel has one kind or none."""
        matches = [*WORD_POLL.findall(self.ttir), *WORD_STORE.findall(self.ttir)]
        return min((int(bits) // 8 for _, bits in matches), default=8)


def elements(shape: str) -> int:
    """Elements of a block: 128, of 2x64."""
    return math.prod(map(int, shape.split("x")))
