"""The control flow of a compiled kernel: blocks of instructions, paths, loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from taxfree_check.cross_compile.assembly import AMDGCN, PTX, AsmInstruction, Role, Syntax

Place = tuple[int, int]  # block, instruction in it

#: where what follows comes from, in a file by its number; line 0: from several places
_SOURCE = re.compile(r"\.loc\s+\d+\s+(?P<line>\d+)")


@dataclass
class BasicBlock:
    """Instructions that run one after the other; then one of `successors`.

    Args:
        label: "" behind a branch.
        target: label that the branch at its end goes to, or that of a table of labels, or "".
        falls_through: it may go on to the next block.
        skips_if_masked: the branch is for waves without active lanes.
    """

    label: str = ""
    instructions: list[AsmInstruction] = field(default_factory=list)
    target: str = ""
    falls_through: bool = True
    skips_if_masked: bool = False
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header, and its blocks."""

    header: int
    blocks: frozenset[int]


class ControlFlow:
    """The control flow of one kernel.

    Args:
        text: PTX or amdgcn.
    """

    def __init__(self, text: str) -> None:
        self.is_ptx = ".visible .entry" in text or ".target sm_" in text
        self.blocks = _parse(text, PTX if self.is_ptx else AMDGCN)
        _connect(self.blocks, _jump_tables(text))

    @cached_property
    def predecessors(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.blocks]
        for index, block in enumerate(self.blocks):
            for successor in block.successors:
                before[successor].append(index)
        return before

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, one per header; of two headers that one tail returns to, the outer."""
        dominators = self._dominators()
        bodies: dict[int, set[int]] = {}
        for tail, block in enumerate(self.blocks):
            headers = dominators[tail].intersection(block.successors)
            if headers:
                header = min(headers, key=lambda one: len(dominators[one]))
                body = bodies.setdefault(header, {header})
                body |= _reach(tail, self.predecessors.__getitem__, {header})
        return [Loop(header, frozenset(body)) for header, body in bodies.items()]

    @cached_property
    def innermost_loops(self) -> list[Loop]:
        """Loops without loops inside."""
        return innermost(self.loops, self.loops)

    def places(self, *roles: Role) -> list[Place]:
        """Places of instructions with any of `roles`, in the order of the text."""
        return [
            (index, position)
            for index, block in enumerate(self.blocks)
            for position, instruction in enumerate(block.instructions)
            if instruction.has(*roles)
        ]

    def system_acquires(self) -> list[Place]:
        return [place for place in self.places(Role.ACQUIRE) if self.at(place).is_system_acquire]

    def at(self, place: Place) -> AsmInstruction:
        return self.blocks[place[0]].instructions[place[1]]

    def inside(self, loop: Loop) -> list[AsmInstruction]:
        """The instructions of a loop, in the order of the text."""
        return [
            instruction
            for index in sorted(loop.blocks)
            for instruction in self.blocks[index].instructions
        ]

    def has(self, loop: Loop, *roles: Role) -> bool:
        """Whether a loop has an instruction with any of `roles`."""
        return any(instruction.has(*roles) for instruction in self.inside(loop))

    def walk(
        self, start: Place, stop: Callable[[AsmInstruction], bool], backwards: bool = False
    ) -> Iterator[AsmInstruction]:
        """Every instruction on any path from `start` until the path's first that `stop` accepts.

        Neither the start nor where a path stops are part of it.
        """
        index, position = start
        step = -1 if backwards else 1
        pending = [(index, position + step)]
        seen: set[int] = set()
        while pending:
            index, position = pending.pop()
            instructions = self.blocks[index].instructions
            while 0 <= position < len(instructions) and not stop(instructions[position]):
                yield instructions[position]
                position += step
            if 0 <= position < len(instructions):
                continue
            following = self.predecessors[index] if backwards else self.blocks[index].successors
            for other in following:
                if other not in seen:
                    seen.add(other)
                    end = len(self.blocks[other].instructions) - 1 if backwards else 0
                    pending.append((other, end))

    def first(
        self,
        start: Place,
        stop: Callable[[AsmInstruction], bool] | Role,
        *roles: Role,
        backwards: bool = False,
    ) -> AsmInstruction | None:
        """The first instruction with any of `roles` on the paths from `start`.

        Args:
            stop: where a path ends: at an instruction with this role, or that this accepts.
        """
        if isinstance(stop, Role):
            role, stop = stop, lambda instruction: instruction.has(role)
        passed = self.walk(start, stop, backwards=backwards)
        return next((instruction for instruction in passed if instruction.has(*roles)), None)

    def _dominators(self) -> list[set[int]]:
        everything = set(range(len(self.blocks)))
        dominators = [{0}, *(set(everything) for _ in self.blocks[1:])]
        changed = True
        while changed:
            changed = False
            for index in range(1, len(self.blocks)):
                above = [dominators[before] for before in self.predecessors[index]]
                dominating = {index} | (set.intersection(*above) if above else set())
                if dominating != dominators[index]:
                    dominators[index], changed = dominating, True
        return dominators


def innermost(loops: list[Loop], among: list[Loop]) -> list[Loop]:
    """Those of `loops` that contain none of `among`."""
    return [loop for loop in loops if not any(other.blocks < loop.blocks for other in among)]


def _parse(text: str, syntax: Syntax) -> list[BasicBlock]:
    blocks, pending_release, source = [BasicBlock("entry")], "", ""
    for number, raw in enumerate(text.splitlines(), 1):
        line, block = raw.split(syntax.comment)[0].strip(), blocks[-1]
        if not line:
            continue
        if location := _SOURCE.match(line):
            source = "" if location["line"] == "0" else location[0]
        elif label := syntax.label.match(line):
            blocks.append(BasicBlock(label.group(1)))
        elif branch := syntax.branch.match(line):
            block.target, block.falls_through = branch["target"], bool(branch["condition"])
            block.skips_if_masked = line.startswith("s_cbranch_execz")
            blocks.append(BasicBlock())
        elif syntax.end.match(line):
            block.falls_through = False
            blocks.append(BasicBlock())
        else:
            pending_release = syntax.opens_release(line) or pending_release
            instruction = replace(syntax.read(number, line, pending_release), source=source)
            if instruction.has(Role.RELEASE):
                pending_release = ""
            if instruction.roles:
                block.instructions.append(instruction)
    return blocks


def _jump_tables(text: str) -> dict[str, list[str]]:
    """The labels of each table of a PTX kernel; with roles, a warp jumps to its role's code."""
    tables = re.findall(r"^\s*(\$?\w+):\s*\.branchtargets([^;]*);", text, re.MULTILINE)
    return {name: re.findall(r"\$\w+", labels) for name, labels in tables}


def _connect(blocks: list[BasicBlock], tables: Mapping[str, list[str]]) -> None:
    index_of = {block.label: index for index, block in enumerate(blocks) if block.label}
    for index, block in enumerate(blocks):
        targets = tables.get(block.target, [block.target])
        block.successors += [index_of[target] for target in targets if target in index_of]
        if block.falls_through and index + 1 < len(blocks):
            block.successors.append(index + 1)
    _run_masked_acquires(blocks)
    for block in blocks:
        block.successors = [_through_empty(blocks, successor) for successor in block.successors]
    for index in set(range(len(blocks))) - _reach(0, lambda one: blocks[one].successors, set()):
        blocks[index] = BasicBlock("unreachable")


def _through_empty(blocks: list[BasicBlock], index: int) -> int:
    """The block that a jump to `index` ends in, past empty ones."""
    seen = {index}
    while not blocks[index].instructions and len(blocks[index].successors) == 1:
        index = blocks[index].successors[0]
        if index in seen:
            break
        seen.add(index)
    return index


def _run_masked_acquires(blocks: list[BasicBlock]) -> None:
    """Forget the jump of waves without active lanes over an acquire of the others.

    A jump past the acquire of a loop is none of these if it leaves the loop.
    """
    for index, block in enumerate(blocks):
        if not block.skips_if_masked:
            continue
        target = block.successors[0]
        skipped = blocks[index + 1 : target]
        if not any(one.has(Role.ACQUIRE) for inner in skipped for one in inner.instructions):
            continue
        if index not in _reach(index + 1, lambda one: blocks[one].successors, {target}):
            block.successors = [index + 1]


def _reach(start: int, following: Callable[[int], Iterable[int]], seen: set[int]) -> set[int]:
    """`seen`, and all blocks on the ways from `start` that do not pass them."""
    pending = [start]
    while pending:
        index = pending.pop()
        if index not in seen:
            seen.add(index)
            pending.extend(following(index))
    return seen
