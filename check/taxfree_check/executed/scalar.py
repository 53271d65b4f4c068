"""Scalar arithmetic, branches and waits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from taxfree_check.executed import arithmetic
from taxfree_check.executed.arithmetic import RELATIONS, Word, logical_shift, ones, sign_extended
from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.encoding import (
    CLAMPS,
    EXEC,
    SCALARS,
    SCC,
    VCC,
    Form,
    Row,
    compiled,
    numbered,
    tabulated,
)
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.operands import OperandPart, literal, row, scalar_of, scalar_source
from taxfree_check.executed.wave import AGAIN, AT_BARRIER, END, Step, Wave

_COUNTER = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")

#: instructions of a destination: its words, and those of each source -> names
_WORDS = {
    (1, 1): "s_mov_b32 s_not_b32 s_abs_i32 s_brev_b32 s_bcnt1_i32_b32 s_ff1_i32_b32"
    " s_flbit_i32_b32 s_sext_i32_i8 s_sext_i32_i16",
    (1, 2): "s_bcnt1_i32_b64 s_ff1_i32_b64",
    (2, 2): "s_mov_b64 s_not_b64",
    (1, 1, 1): "s_add_u32 s_sub_u32 s_add_i32 s_sub_i32 s_addc_u32 s_subb_u32 s_min_u32 s_max_u32"
    " s_min_i32 s_max_i32 s_mul_i32 s_mul_hi_u32 s_mul_hi_i32 s_lshl_b32 s_lshr_b32 s_ashr_i32"
    " s_bfe_u32 s_bfe_i32 s_bfm_b32 s_pack_ll_b32_b16 s_lshl1_add_u32 s_lshl2_add_u32"
    " s_lshl3_add_u32 s_lshl4_add_u32 s_cselect_b32 s_and_b32 s_or_b32 s_xor_b32 s_andn2_b32"
    " s_orn2_b32 s_nand_b32 s_nor_b32 s_xnor_b32",
    (2, 2, 1): "s_lshl_b64 s_lshr_b64 s_ashr_i64 s_bfe_u64 s_bfe_i64",
    (2, 2, 2): "s_cselect_b64 s_and_b64 s_or_b64 s_xor_b64 s_andn2_b64 s_orn2_b64 s_nand_b64"
    " s_nor_b64 s_xnor_b64",
}
#: name -> words of its destination, and of its sources
OPERATIONS = {
    name: (words[0], words[1:]) for words, names in _WORDS.items() for name in names.split()
}
_SAVE_EXEC = {name.replace("b64", "saveexec_b64"): name for name in _WORDS[2, 2, 2].split()[1:]}
_COMPARED = {
    f"s_{form}_{relation}_{kind}": (kind, RELATIONS[relation])
    for form, kinds in (("cmp", "i32 u32"), ("cmpk", "i32 u32"))
    for kind in kinds.split()
    for relation in ["eq", "lg", "lt", "le", "gt", "ge"]
}
_COMPARED |= {f"s_cmp_{relation}_u64": ("u64", RELATIONS[relation]) for relation in ("eq", "lg")}

_COMPARISONS = "s_cmp_i32 s_cmp_u32 s_bitcmp0_b32 s_bitcmp1_b32"


def _without_width(name: str) -> str:
    return re.sub("(32|64)$", "", name)


#: named without the width of their operands at the end
Operation = numbered(
    dict.fromkeys(map(_without_width, [*OPERATIONS, *_COMPARISONS.split()])), __name__
)


class Condition(IntEnum):
    """What makes a branch go."""

    s_branch = 0
    s_cbranch_scc0 = 1
    s_cbranch_scc1 = 2
    s_cbranch_execz = 3
    s_cbranch_execnz = 4
    s_cbranch_vccz = 5
    s_cbranch_vccnz = 6


#: hints, and waits for hazards that this executor does not have
_NOTHING = {"s_nop", "s_setprio", "s_sleep"}


# -- what happens ---------------------------------------------------------------------------------


#: names of operations, and the value and the condition code that they give, of the sources' bits
#: `a` and `b`, the code before, and the width of the destination; of a comparison, `c` has the
#: relations
_RESULTS = """
    i, j, by = sign_extended(a, width), sign_extended(b, width), b & width - 1
    s_mov_b: a, scc
    s_brev_b: reversed_bits(a), scc
    s_ff1_i32_b: length(a & -a) - 1, scc
    s_flbit_i32_b: 32 - length(a) if a else -1, scc
    s_sext_i32_i8: sign_extended(a, 8), scc
    s_sext_i32_i16: sign_extended(a, 16), scc
    s_mul_i: a * b, scc
    s_mul_hi_u: a * b >> 32, scc
    s_mul_hi_i: i * j >> 32, scc
    s_bfm_b: ones(a & 31) << by, scc
    s_pack_ll_b32_b16: a & 0xFFFF | b << 16, scc
    s_cselect_b: a if scc else b, scc
    s_min_u: min(a, b), a < b
    s_max_u: max(a, b), a >= b
    s_min_i: min(i, j), i < j
    s_max_i: max(i, j), i >= j
    s_cmp_i: 0, order(i < j, i == j, True) & c != 0
    s_cmp_u: 0, order(is_below(a, b), a == b, True) & c != 0
    s_bitcmp0_b: 0, a >> by & 1 == 0
    s_bitcmp1_b: 0, a >> by & 1 == 1
    s_add_i: i + j, i + j != signed(i + j)
    s_sub_i: i - j, i - j != signed(i - j)
    s_add_u: _sum(a + b)
    s_sub_u: _sum(a - b)
    s_addc_u: _sum(a + b + scc)
    s_subb_u: _sum(a - b - scc)
    s_lshl1_add_u: _sum((a << 1) + b)
    s_lshl2_add_u: _sum((a << 2) + b)
    s_lshl3_add_u: _sum((a << 3) + b)
    s_lshl4_add_u: _sum((a << 4) + b)
    value = _value(operation, a, b, i, by, width) & ones(width)
    return value, value != 0
"""
#: of those whose condition code says whether the value is not 0
_VALUES = """
    s_and_b: a & b
    s_or_b: a | b
    s_xor_b: a ^ b
    s_andn2_b: a & ~b
    s_orn2_b: a | ~b
    s_nand_b: ~(a & b)
    s_nor_b: ~(a | b)
    s_xnor_b: ~(a ^ b)
    s_not_b: ~a
    s_lshl_b: a << by
    s_lshr_b: logical_shift(a, by)
    s_ashr_i: i >> by
    s_bfe_u: _field(a, by, b >> 16 & 127, width)
    s_bfe_i: _signed_field(a, by, b >> 16 & 127, width)
    s_bcnt1_i32_b: count_of_ones(a)
    s_abs_i: abs(i)
    return 0
"""


@compiled
def _sum(total: Word) -> tuple[Word, int]:
    return total, total < 0 or total > 0xFFFFFFFF


@compiled
def _field(value: Word, offset: Word, count: Word, width: int) -> Word:
    """A bit field: `count` bits of `width` from `offset` on."""
    return logical_shift(value, offset) & ones(min(count, width - offset))


@compiled
def _signed_field(value: Word, offset: Word, count: Word, width: int) -> Word:
    count = min(count, width - offset)
    return sign_extended(_field(value, offset, count, width), count) if count else 0


_NAMES = {**vars(arithmetic), **globals()}
_NAMES["_value"] = compiled(
    tabulated("_value(operation, a, b, i, by, width)", _VALUES, Operation, _NAMES)
)
#: the value that an instruction gives, and the condition code
result = compiled(tabulated("result(operation, a, b, c, scc, width)", _RESULTS, Operation, _NAMES))


@compiled
def goes(condition: int, words: Any) -> bool:
    """Whether a branch goes."""
    if condition == Condition.s_cbranch_scc0:
        return words[SCALARS + SCC] == 0
    if condition == Condition.s_cbranch_scc1:
        return words[SCALARS + SCC] != 0
    if condition == Condition.s_cbranch_execz:
        return words[SCALARS + EXEC] | words[SCALARS + EXEC + 1] == 0
    if condition == Condition.s_cbranch_execnz:
        return words[SCALARS + EXEC] | words[SCALARS + EXEC + 1] != 0
    if condition == Condition.s_cbranch_vccz:
        return words[SCALARS + VCC] | words[SCALARS + VCC + 1] == 0
    if condition == Condition.s_cbranch_vccnz:
        return words[SCALARS + VCC] | words[SCALARS + VCC + 1] != 0
    return True


# -- what instructions are made of ----------------------------------------------------------------


def build(instruction: Instruction, labels: Mapping[str, int]) -> Row | Step:
    """Make the record of a scalar instruction, or a function that executes it.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    name = instruction.opcode
    if name in OPERATIONS:
        words, kinds = OPERATIONS[name]
        sources = [
            scalar_source(text, kind)
            for text, kind in zip(instruction.operands[1:], kinds, strict=True)
        ]
        part = OperandPart(sources, _out(instruction), is_wide=words == 2)
        return row(Form.SCALAR, _number(name), part)
    if name in _SAVE_EXEC:
        sources = [scalar_source(instruction.operands[1], 2), scalar_source("exec", 2)]
        part = OperandPart(sources, _out(instruction), is_wide=True)
        return row(Form.SAVE_EXEC, _number(_SAVE_EXEC[name]), part)
    if name in _NOTHING:
        return row(Form.NOTHING)
    if name in Condition.__members__:
        return row(Form.BRANCH, Condition[name], target=labels[instruction.operands[0]])
    if name in _COMPARED:
        return _compare(instruction)
    if name in _OTHERS:
        return _OTHERS[name](instruction)
    raise UnknownInstruction(f"unknown instruction {instruction.text}")


def _number(name: str) -> int:
    return int(Operation[_without_width(name)])


def _out(instruction: Instruction) -> int:
    return SCALARS + scalar_of(instruction.operands[0])


def _compare(instruction: Instruction) -> Row:
    kind, relations = _COMPARED[instruction.opcode]
    first, second = (
        scalar_source(operand, int(kind[1:]) // 32) for operand in instruction.operands
    )
    if instruction.opcode.startswith("s_cmpk") and kind == "i32":
        second = literal(_immediate(instruction))
    part = OperandPart([first, second, literal(relations)])
    return row(Form.SCALAR, _number(f"s_cmp_{kind}"), part)


def _bit_test(instruction: Instruction) -> Row:
    part = OperandPart([scalar_source(operand) for operand in instruction.operands])
    return row(Form.SCALAR, _number(instruction.opcode), part)


def _immediate(instruction: Instruction) -> int:
    """A word: it has 16 bits, and a sign."""
    bits = int(instruction.operands[1], 0) & 0xFFFF
    return bits | (0xFFFF0000 if bits >> 15 else 0)


def _with_immediate(instruction: Instruction) -> Row:
    immediate, target = literal(_immediate(instruction)), scalar_source(instruction.operands[0])
    name = instruction.opcode.replace("k_i32", "_i32")
    if name == "s_mov_i32":
        return row(Form.SCALAR, _number("s_mov_b32"), OperandPart([immediate], _out(instruction)))
    return row(Form.SCALAR, _number(name), OperandPart([target, immediate], _out(instruction)))


def left_in_flight(instruction: Instruction) -> tuple[int, int]:
    """How many vector memory operations, and others, an ``s_waitcnt`` leaves in flight."""
    counters = {name: int(number) for name, number in _COUNTER.findall(instruction.text)}
    return counters.get("vmcnt", 63), counters.get("lgkmcnt", 15)


def _wait(instruction: Instruction) -> Step:
    vector, local = left_in_flight(instruction)

    def step(wave: Wave) -> int | None:
        queue, timing = wave.vector_queue, wave.timing
        if len(queue) > vector and not timing.has_drained(queue, vector, wave.stalls):
            return AGAIN
        if len(wave.local_queue) > local:
            timing.drain(wave.local_queue, local)
        return None

    return step


def _hardware_register(instruction: Instruction) -> Step:
    """The number of the chiplet that the wave runs on is the only one that kernels read."""
    target, name = scalar_of(instruction.operands[0]), instruction.operands[1]
    if name != "hwreg(HW_REG_XCC_ID)":
        raise UnknownInstruction(f"{instruction.text}: {name} is not modelled")

    def step(wave: Wave) -> None:
        wave.s[target] = wave.view.chiplet

    return step


def _mode(instruction: Instruction) -> Row:
    """Of the modes, whether conversions to fp8 clamp is the only one that kernels change."""
    name, value = instruction.operands
    if name != "hwreg(HW_REG_MODE, 23, 1)":
        raise UnknownInstruction(f"{instruction.text}: {name} is not modelled")
    part = OperandPart([scalar_source(value)], SCALARS + CLAMPS)
    return row(Form.SCALAR, _number("s_mov_b32"), part)


def _end(instruction: Instruction) -> Step:
    def step(wave: Wave) -> int:
        if wave.vector_queue and not wave.timing.has_drained(wave.vector_queue, 0, wave.stalls):
            return AGAIN
        wave.timing.drain(wave.local_queue, 0)
        return END

    return step


_MAKERS: dict[Callable[[Instruction], Row | Step], str] = {
    _bit_test: "s_bitcmp0_b32 s_bitcmp1_b32",
    _with_immediate: "s_movk_i32 s_addk_i32 s_mulk_i32",
    _hardware_register: "s_getreg_b32",
    _mode: "s_setreg_imm32_b32",
    _wait: "s_waitcnt",
    _end: "s_endpgm",
    lambda instruction: lambda wave: AT_BARRIER: "s_barrier",
}
_OTHERS = {name: make for make, names in _MAKERS.items() for name in names.split()}

#: all that this module knows
OPCODES = (
    frozenset(OPERATIONS) | frozenset(_SAVE_EXEC) | _NOTHING | frozenset(Condition.__members__)
    | frozenset(_COMPARED) | frozenset(_OTHERS)
)  # fmt: skip
