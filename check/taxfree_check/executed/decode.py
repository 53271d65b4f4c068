"""The text of a compiled kernel (amdgcn), as LLVM prints it, taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from taxfree_check.executed.errors import UnknownInstruction
from taxfree_kernels.hardware import fp8_of

_INSTRUCTION = re.compile(r"\t((?:s|v|ds|buffer|global|flat|scratch)_\w+)\s*(.*)")
_LABEL = re.compile(r"(\.?[\w$.]+):")
_FORM = re.compile(r"_(e32|e64|dpp|sdwa)$")
_WORD = re.compile(r"[^\s\[]+(?:\[[^\]]*\])?")
_SOURCE = re.compile(r"(\w+\.py:\d+):\d+")
_ARCHITECTURE = re.compile(r'\.amdgcn_target ".*?(gfx\w+)')
_ARGUMENT = re.compile(r"\.offset:\s*(\d+)\s+\.size:\s*(\d+)\s+\.value_kind:\s*(\w+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        line: in the text, from 0.
        opcode: without the suffix of its form.
        form: "e32", "e64", "dpp", "sdwa", or empty.
        operands: destinations first.
        modifiers: behind the operands; a flag has the value "1".
        text: as it is there.
        source: the lines of the program that it comes from, the innermost first, such as
            ``("sync.py:75", "sync.py:132")``; empty without debug information.
        is_fnuz: whether its fp8 is e4m3fnuz, as on gfx942; else that of the Open Compute Project.
    """

    line: int
    opcode: str
    form: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str]
    text: str
    source: tuple[str, ...] = ()
    is_fnuz: bool = False

    def number(self, name: str, default: int = 0) -> int:
        """The integer value of a modifier."""
        return int(self.modifiers[name], 0) if name in self.modifiers else default

    def flags(self, name: str, default: list[int]) -> list[int]:
        """The bits of a modifier such as ``op_sel:[0,1]``."""
        if name not in self.modifiers:
            return default
        return [int(bit) for bit in self.modifiers[name].strip("[]").split(",")]


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel: its place among the arguments' bytes, and what it holds."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Listing:
    """A kernel, decoded.

    Args:
        name: of the kernel.
        instructions: in the order of the text.
        labels: label -> index of the instruction behind it.
        arguments: in order, those that the runtime passes by itself last (``hidden_...``).
        argument_bytes: size of their block.
        pointer_register: the SGPR pair that points to the arguments.
        user_registers: SGPRs that are set before the ids of the workgroup.
        wanted_ids: which of these are, in x, y and z.
        threads: of a workgroup.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    arguments: tuple[Argument, ...]
    argument_bytes: int
    pointer_register: int
    user_registers: int
    threads: int
    wanted_ids: tuple[bool, bool, bool] = (True, False, False)


def decode(text: str) -> Listing:
    """Take the text of one kernel apart.

    Raises:
        UnknownInstruction: it is no kernel, or needs what the executor does not have.
    """
    architecture = _ARCHITECTURE.search(text)
    if architecture is None:
        raise UnknownInstruction("the text does not say for which GPU it is")
    instructions, labels = _body(text, "fnuz" in fp8_of(architecture[1]))
    if _field(text, "private_segment_fixed_size"):
        raise UnknownInstruction("the kernel spills to scratch memory", "take another config")
    every = tuple(Argument(int(offset), int(size), kind) for offset, size, kind in _arguments(text))
    name = re.search(r"\.amdhsa_kernel (\S+)", text)
    threads = re.search(r"\.max_flat_workgroup_size: (\d+)", text)
    size = re.search(r"\.kernarg_segment_size: (\d+)", text)
    if name is None or threads is None or size is None:
        raise UnknownInstruction("this is no text that LLVM prints of a kernel")
    return Listing(
        name=name[1].lstrip("_"),
        instructions=tuple(instructions),
        labels=labels,
        arguments=every,
        argument_bytes=int(size[1]),
        pointer_register=2
        * sum(_field(text, f"user_sgpr_{name}_ptr") for name in ("dispatch", "queue")),
        user_registers=_field(text, "user_sgpr_count"),
        threads=int(threads[1]),
        wanted_ids=(
            bool(_field(text, "system_sgpr_workgroup_id_x")),
            bool(_field(text, "system_sgpr_workgroup_id_y")),
            bool(_field(text, "system_sgpr_workgroup_id_z")),
        ),
    )


def instruction(
    text: str, line: int = 0, source: tuple[str, ...] = (), is_fnuz: bool = False
) -> Instruction:
    """Decode one instruction, without a label or a comment; see :class:`Instruction`."""
    opcode, _, rest = text.strip().partition(" ")
    operands, words = _split(rest.strip())
    if opcode in ("buffer_wbl2", "buffer_inv"):  # scopes only
        operands, words = [], rest.split()
    form = _FORM.search(opcode)
    modifiers = {}
    for word in words:
        key, colon, value = word.partition(":")
        modifiers[key] = value if colon else "1"
    return Instruction(
        line=line,
        opcode=_FORM.sub("", opcode),
        form=form[1] if form else "",
        operands=tuple(operands),
        modifiers=modifiers,
        text=text.strip(),
        source=source,
        is_fnuz=is_fnuz,
    )


def _body(text: str, is_fnuz: bool) -> tuple[list[Instruction], dict[str, int]]:
    lines = text.split("\n")
    first = next(number for number, line in enumerate(lines) if "; -- Begin function" in line)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source: tuple[str, ...] = ()
    for number, line in enumerate(lines[first:], first):
        code = line.split(";")[0].rstrip()
        if code.startswith("\t.section"):
            break
        if code.startswith("\t.loc"):
            source = tuple(_SOURCE.findall(line)) or source
        elif label := _LABEL.match(code):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(code):
            code = " ".join(match.groups())
            instructions.append(instruction(code, number, source, is_fnuz))
    return instructions, labels


def _arguments(text: str) -> list[tuple[str, str, str]]:
    of_kernel = text.split("amdhsa.kernels:")[1].split(".group_segment")[0]
    return _ARGUMENT.findall(of_kernel)


def _field(text: str, name: str) -> int:
    match = re.search(rf"\.amdhsa_{name} (\d+)", text)
    return int(match[1]) if match else 0


def _split(rest: str) -> tuple[list[str], list[str]]:
    """Operands, which commas separate, and modifiers, which follow the last."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(rest):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append(rest[start:index].strip())
            start = index + 1
    words = _WORD.findall(rest[start:])
    return parts + words[:1], words[1:]
