"""Scalar arithmetic, branches and waits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from taxfree_kernels.executed.decode import Instruction
from taxfree_kernels.executed.errors import UnknownInstruction
from taxfree_kernels.executed.lanes import ALL, WORD
from taxfree_kernels.executed.operands import scalar_destination, scalar_source
from taxfree_kernels.executed.wave import AGAIN, AT_BARRIER, END, EXEC, VCC, Step, Wave

Result = tuple[int, int | None]  # the value, and the new condition code or None to keep it

_COUNTER = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")


def signed(bits: int, width: int = 32) -> int:
    """An unsigned integer's bits read as two's complement."""
    return bits - (1 << width) if bits >> width - 1 else bits


def _is_nonzero(value: int) -> Result:
    return value, int(value != 0)


def _unsigned_sum(total: int) -> Result:
    return total & WORD, int(not 0 <= total <= WORD)


def _signed_sum(total: int) -> Result:
    return total & WORD, int(not -(1 << 31) <= total < 1 << 31)


def _field(value: int, place: int, width: int, *, is_signed: bool) -> Result:
    """A bit field: its offset in the low bits of `place`, its length in bits 16 to 22."""
    offset, length = place & (width - 1), place >> 16 & 127
    length = min(length, width - offset)
    bits = value >> offset & ((1 << length) - 1)
    if is_signed and length:
        bits = signed(bits, length)
    return _is_nonzero(bits & ((1 << width) - 1))


def _first_one(value: int) -> Result:
    return (value & -value).bit_length() - 1 & WORD, None


def _sign_extended(value: int, width: int) -> Result:
    return signed(value & ((1 << width) - 1), width) & WORD, None


UNARY: dict[str, tuple[int, int, Callable[[int], Result]]] = {  # words out and in
    "s_mov_b32": (1, 1, lambda a: (a, None)),
    "s_mov_b64": (2, 2, lambda a: (a, None)),
    "s_not_b32": (1, 1, lambda a: _is_nonzero(~a & WORD)),
    "s_not_b64": (2, 2, lambda a: _is_nonzero(~a & ALL)),
    "s_abs_i32": (1, 1, lambda a: _is_nonzero(abs(signed(a)) & WORD)),
    "s_brev_b32": (1, 1, lambda a: (int(f"{a:032b}"[::-1], 2), None)),
    "s_bcnt1_i32_b32": (1, 1, lambda a: _is_nonzero(a.bit_count())),
    "s_bcnt1_i32_b64": (1, 2, lambda a: _is_nonzero(a.bit_count())),
    "s_ff1_i32_b32": (1, 1, _first_one),
    "s_ff1_i32_b64": (1, 2, _first_one),
    "s_flbit_i32_b32": (1, 1, lambda a: (32 - a.bit_length() if a else WORD, None)),
    "s_sext_i32_i8": (1, 1, lambda a: _sign_extended(a, 8)),
    "s_sext_i32_i16": (1, 1, lambda a: _sign_extended(a, 16)),
}

BINARY: dict[str, tuple[int, int, int, Callable[[int, int], Result]]] = {  # words out, in, in
    "s_add_u32": (1, 1, 1, lambda a, b: _unsigned_sum(a + b)),
    "s_sub_u32": (1, 1, 1, lambda a, b: _unsigned_sum(a - b)),
    "s_add_i32": (1, 1, 1, lambda a, b: _signed_sum(signed(a) + signed(b))),
    "s_sub_i32": (1, 1, 1, lambda a, b: _signed_sum(signed(a) - signed(b))),
    "s_min_u32": (1, 1, 1, lambda a, b: (min(a, b), int(a < b))),
    "s_max_u32": (1, 1, 1, lambda a, b: (max(a, b), int(a >= b))),
    "s_min_i32": (1, 1, 1, lambda a, b: (min(a, b, key=signed), int(signed(a) < signed(b)))),
    "s_max_i32": (1, 1, 1, lambda a, b: (max(a, b, key=signed), int(signed(a) >= signed(b)))),
    "s_mul_i32": (1, 1, 1, lambda a, b: (a * b & WORD, None)),
    "s_mul_hi_u32": (1, 1, 1, lambda a, b: (a * b >> 32, None)),
    "s_mul_hi_i32": (1, 1, 1, lambda a, b: (signed(a) * signed(b) >> 32 & WORD, None)),
    "s_lshl_b32": (1, 1, 1, lambda a, b: _is_nonzero(a << (b & 31) & WORD)),
    "s_lshr_b32": (1, 1, 1, lambda a, b: _is_nonzero(a >> (b & 31))),
    "s_ashr_i32": (1, 1, 1, lambda a, b: _is_nonzero(signed(a) >> (b & 31) & WORD)),
    "s_lshl_b64": (2, 2, 1, lambda a, b: _is_nonzero(a << (b & 63) & ALL)),
    "s_lshr_b64": (2, 2, 1, lambda a, b: _is_nonzero(a >> (b & 63))),
    "s_ashr_i64": (2, 2, 1, lambda a, b: _is_nonzero(signed(a, 64) >> (b & 63) & ALL)),
    "s_bfe_u32": (1, 1, 1, lambda a, b: _field(a, b, 32, is_signed=False)),
    "s_bfe_i32": (1, 1, 1, lambda a, b: _field(a, b, 32, is_signed=True)),
    "s_bfe_u64": (2, 2, 1, lambda a, b: _field(a, b, 64, is_signed=False)),
    "s_bfe_i64": (2, 2, 1, lambda a, b: _field(a, b, 64, is_signed=True)),
    "s_bfm_b32": (1, 1, 1, lambda a, b: (((1 << (a & 31)) - 1) << (b & 31) & WORD, None)),
    "s_pack_ll_b32_b16": (1, 1, 1, lambda a, b: (a & 0xFFFF | b << 16 & WORD, None)),
}


def _shifted_sum(by: int) -> Callable[[int, int], Result]:
    return lambda a, b: _unsigned_sum((a << by) + b)


for _shift in (1, 2, 3, 4):
    BINARY[f"s_lshl{_shift}_add_u32"] = 1, 1, 1, _shifted_sum(_shift)

_LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}


def _logical(logic: Callable[[int, int], int], bits: int) -> Callable[[int, int], Result]:
    return lambda a, b: _is_nonzero(logic(a, b) & bits)


for _name, _logic in _LOGIC.items():
    BINARY[f"s_{_name}_b32"] = 1, 1, 1, _logical(_logic, WORD)
    BINARY[f"s_{_name}_b64"] = 2, 2, 2, _logical(_logic, ALL)

_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "lg": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip

#: what makes a branch go
CONDITIONS: dict[str, Callable[[Wave], object]] = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not wave.scc,
    "s_cbranch_scc1": lambda wave: wave.scc,
    "s_cbranch_execz": lambda wave: not wave.exec,
    "s_cbranch_execnz": lambda wave: wave.exec,
    "s_cbranch_vccz": lambda wave: not (wave.s[VCC] | wave.s[VCC + 1]),
    "s_cbranch_vccnz": lambda wave: wave.s[VCC] | wave.s[VCC + 1],
}

#: hints, and waits for hazards that this executor does not have
_NOTHING = {"s_nop", "s_setprio", "s_sleep"}


def build(given: Instruction, labels: Mapping[str, int]) -> Step:
    """Make the step of a scalar instruction.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    name = given.opcode
    if name in UNARY:
        return _unary(given)
    if name in BINARY:
        return _binary(given)
    if name in _NOTHING:
        return lambda wave: None
    if name in CONDITIONS:
        return _branch(CONDITIONS[name], labels[given.operands[0]])
    if name in _OTHERS:
        return _OTHERS[name](given)
    raise UnknownInstruction(f"unknown instruction {given.text}")


def _unary(given: Instruction) -> Step:
    out, wide, function = UNARY[given.opcode]
    put, get = scalar_destination(given.operands[0], out), scalar_source(given.operands[1], wide)

    def step(wave: Wave) -> None:
        value, condition = function(get(wave))
        put(wave, value)
        if condition is not None:
            wave.scc = condition

    return step


def _binary(given: Instruction) -> Step:
    out, first_words, second_words, function = BINARY[given.opcode]
    put = scalar_destination(given.operands[0], out)
    first = scalar_source(given.operands[1], first_words)
    second = scalar_source(given.operands[2], second_words)

    def step(wave: Wave) -> None:
        value, condition = function(first(wave), second(wave))
        put(wave, value)
        if condition is not None:
            wave.scc = condition

    return step


def _compare(given: Instruction) -> Step:
    form, name, kind = given.opcode.removeprefix("s_").split("_")
    relation, words = _RELATIONS[name], int(kind[1:]) // 32
    first, second = (scalar_source(each, words) for each in given.operands)
    if form == "cmpk" and kind == "i32":  # the immediate has 16 bits, and a sign
        second = scalar_source(str(signed(int(given.operands[1], 0) & 0xFFFF, 16)))
    if kind[0] == "i":

        def step(wave: Wave) -> None:
            wave.scc = int(relation(signed(first(wave)), signed(second(wave))))

    else:

        def step(wave: Wave) -> None:
            wave.scc = int(relation(first(wave), second(wave)))

    return step


def _branch(condition: Callable[[Wave], object], target: int) -> Step:
    return lambda wave: target if condition(wave) else None


def _save_exec(given: Instruction) -> Step:
    """Save the mask of lanes, then combine: the operand is the first of the two."""
    logic = _LOGIC[given.opcode.split("_")[1]]
    put, get = scalar_destination(given.operands[0], 2), scalar_source(given.operands[1], 2)

    def step(wave: Wave) -> None:
        before = wave.s[EXEC] | wave.s[EXEC + 1] << 32
        after = logic(get(wave), before) & ALL
        put(wave, before)
        wave.set_exec(after)
        wave.scc = int(after != 0)

    return step


def _select(given: Instruction) -> Step:
    words = 2 if given.opcode.endswith("b64") else 1
    put = scalar_destination(given.operands[0], words)
    yes, no = (scalar_source(each, words) for each in given.operands[1:])
    return lambda wave: put(wave, yes(wave) if wave.scc else no(wave))


def _with_carry(given: Instruction) -> Step:
    put = scalar_destination(given.operands[0])
    first, second = (scalar_source(each) for each in given.operands[1:])
    sign = 1 if given.opcode == "s_addc_u32" else -1

    def step(wave: Wave) -> None:
        value, wave.scc = _unsigned_sum(first(wave) + sign * (second(wave) + wave.scc))  # type: ignore[assignment]
        put(wave, value)

    return step


def _bit_test(given: Instruction) -> Step:
    wanted = int(given.opcode[8])
    value, place = (scalar_source(each) for each in given.operands)

    def step(wave: Wave) -> None:
        wave.scc = int(value(wave) >> (place(wave) & 31) & 1 == wanted)

    return step


def _with_immediate(given: Instruction) -> Step:
    put, get = scalar_destination(given.operands[0]), scalar_source(given.operands[0])
    immediate = signed(int(given.operands[1], 0) & 0xFFFF, 16)
    if given.opcode == "s_movk_i32":
        return lambda wave: put(wave, immediate & WORD)
    if given.opcode == "s_mulk_i32":
        return lambda wave: put(wave, get(wave) * immediate & WORD)

    def step(wave: Wave) -> None:
        value, wave.scc = _signed_sum(signed(get(wave)) + immediate)  # type: ignore[assignment]
        put(wave, value)

    return step


def left_in_flight(given: Instruction) -> tuple[int, int]:
    """How many vector memory operations, and others, an ``s_waitcnt`` leaves in flight."""
    counters = {name: int(number) for name, number in _COUNTER.findall(given.text)}
    return counters.get("vmcnt", 63), counters.get("lgkmcnt", 15)


def _wait(given: Instruction) -> Step:
    vector, local = left_in_flight(given)

    def step(wave: Wave) -> int | None:
        queue, timing = wave.vector_queue, wave.timing
        if len(queue) > vector and not timing.has_drained(queue, vector, wave.stalls):
            return AGAIN
        if len(wave.local_queue) > local:
            timing.drain(wave.local_queue, local)
        return None

    return step


def _hardware_register(given: Instruction) -> Step:
    """The number of the chiplet that the wave runs on is the only one that kernels read."""
    put, name = scalar_destination(given.operands[0]), given.operands[1]
    if name != "hwreg(HW_REG_XCC_ID)":
        raise UnknownInstruction(f"{given.text}: {name} is not modelled")
    return lambda wave: put(wave, wave.view.chiplet)


def _end(given: Instruction) -> Step:
    def step(wave: Wave) -> int:
        if wave.vector_queue and not wave.timing.has_drained(wave.vector_queue, 0, wave.stalls):
            return AGAIN
        wave.timing.drain(wave.local_queue, 0)
        return END

    return step


_OTHERS: dict[str, Callable[[Instruction], Step]] = {
    "s_cselect_b32": _select, "s_cselect_b64": _select,
    "s_addc_u32": _with_carry, "s_subb_u32": _with_carry,
    "s_bitcmp0_b32": _bit_test, "s_bitcmp1_b32": _bit_test,
    "s_movk_i32": _with_immediate, "s_addk_i32": _with_immediate, "s_mulk_i32": _with_immediate,
    "s_getreg_b32": _hardware_register,
    "s_waitcnt": _wait, "s_endpgm": _end, "s_barrier": lambda given: lambda wave: AT_BARRIER,
    **{f"s_{logic}_saveexec_b64": _save_exec for logic in _LOGIC},
    **{
        f"s_{form}_{relation}_{kind}": _compare
        for form in ("cmp", "cmpk") for kind in ("i32", "u32") for relation in _RELATIONS
    },
    "s_cmp_eq_u64": _compare, "s_cmp_lg_u64": _compare,
}  # fmt: skip

#: all that this module knows
OPCODES = (
    frozenset(UNARY) | frozenset(BINARY) | _NOTHING | frozenset(CONDITIONS) | frozenset(_OTHERS)
)
