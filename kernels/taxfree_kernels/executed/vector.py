"""Vector arithmetic: one NumPy operation on the 64 lanes of a wave."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from taxfree_kernels.executed import arithmetic
from taxfree_kernels.executed.decode import Instruction
from taxfree_kernels.executed.dpp import dpp_source
from taxfree_kernels.executed.errors import UnknownInstruction
from taxfree_kernels.executed.lanes import LANES, WORD, Lanes, bits_of, lanes_of
from taxfree_kernels.executed.operands import (
    ACCUMULATORS,
    Source,
    destination,
    register,
    row_of,
    scalar_destination,
    scalar_source,
    signs,
    source,
)
from taxfree_kernels.executed.wave import VCC, Step, Wave

Function = Callable[..., Any]


class Operation(NamedTuple):
    """An instruction of one destination: kinds of destination and sources, and the function."""

    out: str
    inputs: tuple[str, ...]
    function: Function


def _same(a: Lanes) -> Lanes:
    return a


def _u(number: int) -> np.uint32:
    return np.uint32(number)


def _wide(a: Lanes, mask: int) -> Lanes:
    """Shift amounts of 64-bit shifts."""
    return np.asarray(a & _u(mask), np.uint64)


_LOW24 = _u(0xFFFFFF)


def _signed24(a: Lanes) -> Lanes:
    return (a << np.int32(8)) >> np.int32(8)


def _pair_of(to_half: Function) -> Function:
    """Two numbers of 16 bits in a word."""
    return lambda a, b: to_half(a) | to_half(b) << _u(16)


def _table() -> dict[str, Operation]:
    """Name -> operation; kinds are written as "out: in in"."""
    ufuncs: dict[str, dict[str, Function]] = {
        "u32: u32": {
            "v_mov_b32": np.positive, "v_not_b32": np.invert,
            "v_accvgpr_read_b32": np.positive, "v_accvgpr_write_b32": np.positive,
            "v_accvgpr_mov_b32": np.positive, "v_bfrev_b32": arithmetic.reversed_bits,
        },
        "u64: u64": {"v_mov_b64": _same},
        "u32: u32 u32": {
            "v_add_u32": np.add, "v_sub_u32": np.subtract, "v_mul_lo_u32": np.multiply,
            "v_and_b32": np.bitwise_and, "v_or_b32": np.bitwise_or, "v_xor_b32": np.bitwise_xor,
            "v_min_u32": np.minimum, "v_max_u32": np.maximum,
            "v_subrev_u32": lambda a, b: b - a,
            "v_lshlrev_b32": lambda a, b: b << (a & _u(31)),
            "v_lshrrev_b32": lambda a, b: b >> (a & _u(31)),
            "v_mul_hi_u32": arithmetic.high_product,
            "v_mul_u32_u24": lambda a, b: (a & _LOW24) * (b & _LOW24),
            "v_pack_b32_f16": lambda a, b: a & _u(0xFFFF) | b << _u(16),
        },
        "i32: i32 i32": {
            "v_min_i32": np.minimum, "v_max_i32": np.maximum,
            "v_ashrrev_i32": lambda a, b: b >> (a & np.int32(31)),
            "v_mul_hi_i32": arithmetic.high_signed_product,
            "v_mul_i32_i24": lambda a, b: _signed24(a) * _signed24(b),
        },
        "u64: u32 u64": {
            "v_lshlrev_b64": lambda a, b: b << _wide(a, 63),
            "v_lshrrev_b64": lambda a, b: b >> _wide(a, 63),
        },
        "i64: u32 i64": {"v_ashrrev_i64": lambda a, b: b >> _wide(a, 63).astype(np.int64)},
        "u32: u32 u32 u32": {
            "v_add3_u32": lambda a, b, c: a + b + c,
            "v_lshl_add_u32": lambda a, b, c: (a << (b & _u(31))) + c,
            "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & _u(31)),
            "v_lshl_or_b32": lambda a, b, c: a << (b & _u(31)) | c,
            "v_and_or_b32": lambda a, b, c: a & b | c,
            "v_or3_b32": lambda a, b, c: a | b | c,
            "v_xad_u32": lambda a, b, c: (a ^ b) + c,
            "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
            "v_mad_u32_u24": lambda a, b, c: (a & _LOW24) * (b & _LOW24) + c,
            "v_bfe_u32": arithmetic.field, "v_bfe_i32": arithmetic.signed_field,
            "v_perm_b32": arithmetic.permuted_bytes, "v_alignbit_b32": arithmetic.shifted_pair,
        },
        "u64: u64 u32 u64": {"v_lshl_add_u64": lambda a, b, c: (a << _wide(b, 7)) + c},
        "i32: i32 i32 i32": {
            "v_min3_i32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
            "v_mad_i32_i24": lambda a, b, c: _signed24(a) * _signed24(b) + c,
            "v_max3_i32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
        },
        "f32: f32": {
            "v_sqrt_f32": np.sqrt, "v_trunc_f32": np.trunc, "v_floor_f32": np.floor,
            "v_ceil_f32": np.ceil, "v_rndne_f32": np.rint, "v_exp_f32": np.exp2,
            "v_log_f32": np.log2, "v_rcp_f32": np.reciprocal, "v_rcp_iflag_f32": np.reciprocal,
            "v_rsq_f32": lambda a: (1.0 / np.sqrt(np.asarray(a, np.float64))).astype(np.float32),
        },
        "f32: f32 f32": {
            "v_add_f32": np.add, "v_sub_f32": np.subtract, "v_mul_f32": np.multiply,
            "v_min_f32": np.fmin, "v_max_f32": np.fmax, "v_subrev_f32": lambda a, b: b - a,
        },
        "f32: f32 f32 f32": {
            "v_fma_f32": arithmetic.fma, "v_fmamk_f32": arithmetic.fma,
            "v_fmaak_f32": arithmetic.fma, "v_div_fixup_f32": arithmetic.division_fixup,
            "v_max3_f32": lambda a, b, c: np.fmax(np.fmax(a, b), c),
            "v_min3_f32": lambda a, b, c: np.fmin(np.fmin(a, b), c),
        },
        "f32: f32 i32": {"v_ldexp_f32": arithmetic.scaled},
        "f32: u32": {
            "v_cvt_f32_u32": lambda a: np.asarray(a).astype(np.float32),
            "v_cvt_f32_ubyte0": lambda a: (a & _u(255)).astype(np.float32),
        },
        "i32: i32": {"v_ffbh_i32": arithmetic.equal_leading_bits},
        "f32: i32": {"v_cvt_f32_i32": lambda a: np.asarray(a).astype(np.float32)},
        "u32: f32": {"v_cvt_u32_f32": arithmetic.to_unsigned, "v_cvt_f16_f32": arithmetic.to_half},
        "i32: f32": {"v_cvt_i32_f32": arithmetic.to_signed},
        "f32: f16": {"v_cvt_f32_f16": lambda a: np.asarray(a).astype(np.float32)},
        "u32: f32 f32": {
            "v_cvt_pk_bf16_f32": _pair_of(arithmetic.to_bfloat16),
            "v_cvt_pk_f16_f32": _pair_of(arithmetic.to_half),
        },
    }  # fmt: skip
    table = {}
    for kinds, functions in ufuncs.items():
        out, inputs = kinds.split(": ")
        for name, function in functions.items():
            table[name] = Operation(out, tuple(inputs.split()), function)
    return table


OPERATIONS = _table()
_ROWS = {"u32": "u", "i32": "i", "f32": "f"}


def build(given: Instruction) -> Step:
    """Make the step of a vector instruction.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    name = given.opcode
    if name in OPERATIONS:
        return _simple(given, OPERATIONS[name])
    if name in _OTHERS:
        return _OTHERS[name](given)
    raise UnknownInstruction(f"unknown instruction {given.text}")


def _simple(given: Instruction, operation: Operation) -> Step:
    if len(given.operands) != 1 + len(operation.inputs):
        raise UnknownInstruction(f"unknown form of {given.text}")
    if given.form == "dpp":
        return _across_lanes(given, operation)
    function = operation.function
    gets = [_source(given, at, kind) for at, kind in enumerate(operation.inputs)]
    if "clamp" in given.modifiers:
        function = _clamped(given)
    selected = given.modifiers.get("dst_sel", "DWORD")
    if selected != "DWORD":
        return _into_part(given, operation, gets, selected)
    known = set(given.modifiers) - _HANDLED
    if known:
        raise UnknownInstruction(f"unknown modifier of {given.text}")
    if isinstance(function, np.ufunc) and operation.out in _ROWS:
        return _ufunc(_ROWS[operation.out], row_of(given.operands[0]), function, gets)
    put = destination(given.operands[0], operation.out)
    if len(gets) == 1:
        (first,) = gets
        return lambda wave: put(wave, function(first(wave)))
    if len(gets) == 2:
        first, second = gets
        return lambda wave: put(wave, function(first(wave), second(wave)))
    first, second, third = gets
    return lambda wave: put(wave, function(first(wave), second(wave), third(wave)))


_HANDLED = {"clamp", "src0_sel", "src1_sel", "dst_sel", "dst_unused"}


def _ufunc(kind: str, row: int, function: np.ufunc, gets: list[Source]) -> Step:
    """Let NumPy write where the result belongs."""
    rows = operator.attrgetter(kind)
    if len(gets) == 1:
        (first,) = gets

        def unary(wave: Wave) -> None:
            out = rows(wave)[row]
            if wave.is_full:
                function(first(wave), out=out)
            else:
                function(first(wave), out=out, where=wave.mask)

        return unary
    first, second = gets

    def binary(wave: Wave) -> None:
        out = rows(wave)[row]
        if wave.is_full:
            function(first(wave), second(wave), out=out)
        else:
            function(first(wave), second(wave), out=out, where=wave.mask)

    return binary


def _clamped(given: Instruction) -> Function:
    if given.opcode == "v_sub_u32":
        return lambda a, b: np.where(a < b, _u(0), a - b)
    if given.opcode == "v_add_u32":
        return lambda a, b: np.where(a + b < a, _u(WORD), a + b)
    raise UnknownInstruction(f"unknown form of {given.text}")


# -- parts of registers (SDWA) --------------------------------------------------------------------

_PARTS = {
    "BYTE_0": (0, 0xFF), "BYTE_1": (8, 0xFF), "BYTE_2": (16, 0xFF), "BYTE_3": (24, 0xFF),
    "WORD_0": (0, 0xFFFF), "WORD_1": (16, 0xFFFF),
}  # fmt: skip


def _source(given: Instruction, at: int, kind: str) -> Source:
    """The source operand number `at`, or the part of it that SDWA selects, without its sign."""
    text = given.operands[1 + at]
    selected = given.modifiers.get(f"src{at}_sel", "DWORD")
    if selected == "DWORD":
        return source(text, kind)
    if selected not in _PARTS or kind not in ("u32", "f16", "i32"):
        raise UnknownInstruction(f"unknown form of {given.text}")
    shift, mask = (_u(number) for number in _PARTS[selected])
    get = source(text, "u32")
    if kind == "f16":
        return lambda wave: (get(wave) >> shift & mask).astype(np.uint16).view(np.float16)
    if kind == "i32":
        return lambda wave: (get(wave) >> shift & mask).view(np.int32)
    return lambda wave: get(wave) >> shift & mask


def _into_part(given: Instruction, operation: Operation, gets: list[Source], selected: str) -> Step:
    if given.modifiers.get("dst_unused") != "UNUSED_PAD" or operation.out != "u32":
        raise UnknownInstruction(f"unknown form of {given.text}")
    shift, mask = (_u(number) for number in _PARTS[selected])
    put = destination(given.operands[0], "u32")
    function = operation.function
    return lambda wave: put(wave, (function(*[get(wave) for get in gets]) & mask) << shift)


def _across_lanes(given: Instruction, operation: Operation) -> Step:
    """An instruction whose first source comes from other lanes (DPP)."""
    get, writes = dpp_source(given, operation.inputs[0])
    rest = [
        source(text, kind)
        for text, kind in zip(given.operands[2:], operation.inputs[1:], strict=True)
    ]
    rows, row, function = _ROWS[operation.out], row_of(given.operands[0]), operation.function

    def step(wave: Wave) -> None:
        value = function(get(wave), *[each(wave) for each in rest])
        np.copyto(getattr(wave, rows)[row], value, where=writes(wave))

    return step


# -- comparisons, carries, selections -------------------------------------------------------------


def _is_ordered(a: Lanes, b: Lanes) -> Lanes:
    return ~(np.isnan(a) | np.isnan(b))


_RELATIONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": _is_ordered, "u": lambda a, b: ~_is_ordered(a, b),
    "neq": np.not_equal, "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b),
}  # fmt: skip


_COMPARED = {  # kinds -> their relations
    "u32 i32 u64 i64": "eq ne lt le gt ge",
    "f32": "eq lg lt le gt ge o u nlg neq nlt nle ngt nge",
}


def _compare(given: Instruction) -> Step:
    _, _, relation, kind = given.opcode.split("_")
    function = _RELATIONS[relation]
    first, second = (_source(given, at, kind) for at in range(2))
    put = scalar_destination(given.operands[0], 2)

    def step(wave: Wave) -> None:
        put(wave, bits_of(function(first(wave), second(wave))) & wave.exec)

    return step


def _carry(given: Instruction) -> Step:
    name = given.opcode.removeprefix("v_").removesuffix("_co_u32")
    takes, adds = name in ("addc", "subb", "subbrev"), name.startswith("add")
    put = destination(given.operands[0], "u32")
    put_carry = scalar_destination(given.operands[1], 2)
    first, second = (source(text, "u32") for text in given.operands[2:4])
    if name.endswith("rev"):
        first, second = second, first
    carry = scalar_source(given.operands[4], 2) if takes else None

    def step(wave: Wave) -> None:
        a, b = first(wave), second(wave)
        total = a + b if adds else a - b
        carries = bits_of(total < a if adds else a < b)
        if carry is not None:
            given_in = lanes_of(carry(wave))
            before, total = total, total + given_in if adds else total - given_in
            carries |= bits_of(total < before if adds else total > before)
        put(wave, total)
        put_carry(wave, carries & wave.exec)

    return step


def _select(given: Instruction) -> Step:
    has_signs = any(signs(text)[1] or signs(text)[2] for text in given.operands[1:3])
    kind = "f32" if has_signs else "u32"
    no, yes = (_source(given, at, kind) for at in range(2))
    condition, put = scalar_source(given.operands[3], 2), destination(given.operands[0], kind)
    return lambda wave: put(wave, np.where(lanes_of(condition(wave)), yes(wave), no(wave)))


# -- between lanes --------------------------------------------------------------------------------


def _count_below(given: Instruction) -> Step:
    first_bit = 32 if "hi" in given.opcode else 0
    below = [(1 << min(max(lane - first_bit, 0), 32)) - 1 for lane in range(64)]
    masks = np.array(below, np.uint32)
    bits, addend = (source(text, "u32") for text in given.operands[1:])
    put = destination(given.operands[0], "u32")

    def step(wave: Wave) -> None:
        put(wave, np.bitwise_count(bits(wave) & masks) + addend(wave))

    return step


def _read_first_lane(given: Instruction) -> Step:
    put, get = scalar_destination(given.operands[0]), source(given.operands[1], "u32")

    def step(wave: Wave) -> None:
        lane = (wave.exec & -wave.exec).bit_length() - 1 if wave.exec else 0
        value = get(wave)
        put(wave, int(value[lane] if value.ndim else value))

    return step


def _read_lane(given: Instruction) -> Step:
    put, row = scalar_destination(given.operands[0]), row_of(given.operands[1])
    lane = scalar_source(given.operands[2])
    return lambda wave: put(wave, int(wave.u[row][lane(wave) & 63]))


def _write_lane(given: Instruction) -> Step:
    row, get = row_of(given.operands[0]), scalar_source(given.operands[1])
    lane = scalar_source(given.operands[2])

    def step(wave: Wave) -> None:
        wave.u[row][lane(wave) & 63] = get(wave)

    return step


def _swap_lanes(given: Instruction) -> Step:
    """Exchange odd rows of 16 or 32 lanes of one register with even ones of another."""
    size = int(given.opcode.removeprefix("v_permlane")[:2])
    first, second = (row_of(text) for text in given.operands)
    odd, even = (LANES // size % 2 == 1), (LANES // size % 2 == 0)

    def step(wave: Wave) -> None:
        if not wave.is_full:
            raise UnknownInstruction(f"{given.opcode} with lanes off")
        a, b = wave.u[first], wave.u[second]
        a[odd], b[even] = b[even], a[odd]

    return step


# -- wide products, divisions ---------------------------------------------------------------------


def _wide_product(given: Instruction) -> Step:
    is_signed = "i64" in given.opcode
    narrow, wide, dtype = ("i32", "i64", np.int64) if is_signed else ("u32", "u64", np.uint64)
    put, put_carry = destination(given.operands[0], wide), scalar_destination(given.operands[1], 2)
    first, second = (source(text, narrow) for text in given.operands[2:4])
    addend = source(given.operands[4], wide)

    def step(wave: Wave) -> None:
        product, c = np.multiply(first(wave), second(wave), dtype=dtype), addend(wave)
        total = np.broadcast_to(product + c, (64,))
        # a signed sum has a 65th bit, its sign, which differs from the 64th if it overflows
        overflows = ((product ^ total) & (c ^ total)) < 0 if is_signed else total < product
        carry = overflows ^ (total < 0) if is_signed else overflows
        put(wave, total)
        put_carry(wave, bits_of(carry & wave.mask))

    return step


def _division_scale(given: Instruction) -> Step:
    put, put_back = destination(given.operands[0], "f32"), scalar_destination(given.operands[1], 2)
    gets = [source(text, "f32") for text in given.operands[2:]]

    def step(wave: Wave) -> None:
        value, scales_back = arithmetic.division_scale(*[get(wave) for get in gets])
        put(wave, value)
        put_back(wave, bits_of(scales_back & wave.mask))

    return step


def _division_fma(given: Instruction) -> Step:
    put = destination(given.operands[0], "f32")
    a, b, c = (source(text, "f32") for text in given.operands[1:])

    def step(wave: Wave) -> None:
        scales_back = lanes_of(wave.s[VCC] | wave.s[VCC + 1] << 32)
        put(wave, arithmetic.division_fma(a(wave), b(wave), c(wave), scales_back))

    return step


def _accumulate(given: Instruction) -> Step:
    texts = (*given.operands[1:3], given.operands[0])
    put, gets = destination(given.operands[0], "f32"), [source(text, "f32") for text in texts]
    return lambda wave: put(wave, arithmetic.fma(*[get(wave) for get in gets]))


def _bitwise(given: Instruction) -> Step:
    table = given.number("bitop3")
    put = destination(given.operands[0], "u32")
    a, b, c = (source(text, "u32") for text in given.operands[1:])
    return lambda wave: put(wave, arithmetic.bitwise(a(wave), b(wave), c(wave), table))


# -- pairs and halves -----------------------------------------------------------------------------


def _half_of_pair(text: str, kind: str, which: int) -> Source:
    """The low or high word of an operand of two; constants have one, for both."""
    found = register(text)
    if found is None:
        return source(text, kind)
    if not found.is_vector:
        return source(f"s{found.row + which}", kind)
    at = found.row + which
    return source(f"a{at - ACCUMULATORS}" if at >= ACCUMULATORS else f"v{at}", kind)


def _packed(given: Instruction) -> Step:
    count = len(given.operands) - 1
    low, high = given.flags("op_sel", [0] * count), given.flags("op_sel_hi", [1] * count)
    if given.opcode == "v_pk_mov_b32":
        firsts = _half_of_pair(given.operands[1], "u32", low[0])
        seconds = _half_of_pair(given.operands[2], "u32", low[1])
        put, put_next = _pair_destination(given, "u32")

        def move(wave: Wave) -> None:
            a, b = firsts(wave) + _u(0), seconds(wave) + _u(0)
            put(wave, a)
            put_next(wave, b)

        return move
    function = _PACKED[given.opcode]
    low_signs, high_signs = (given.flags(name, [0] * count) for name in ("neg_lo", "neg_hi"))
    halves = [
        [
            _negated(_half_of_pair(text, "f32", which), sign)
            for text, which, sign in zip(given.operands[1:], selected, negated, strict=True)
        ]
        for selected, negated in ((low, low_signs), (high, high_signs))
    ]
    put, put_next = _pair_destination(given, "f32")

    def step(wave: Wave) -> None:
        a, b = (function(*[get(wave) for get in half]) for half in halves)
        put(wave, a)
        put_next(wave, b)

    return step


_PACKED: dict[str, Function] = {
    "v_pk_add_f32": np.add, "v_pk_mul_f32": np.multiply, "v_pk_fma_f32": arithmetic.fma,
}  # fmt: skip


def _negated(get: Source, is_negated: int) -> Source:
    return (lambda wave: -get(wave)) if is_negated else get


def _pair_destination(given: Instruction, kind: str) -> tuple[Any, Any]:
    row = row_of(given.operands[0])
    letter, row = ("a", row - ACCUMULATORS) if row >= ACCUMULATORS else ("v", row)
    return destination(f"{letter}{row}", kind), destination(f"{letter}{row + 1}", kind)


def _mixed(given: Instruction) -> Step:
    """A fused multiply-add in float32, of float32 operands and halves of registers."""
    selected, is_half = given.flags("op_sel", [0] * 3), given.flags("op_sel_hi", [0] * 3)
    gets = [
        _half_as_float(text, which) if half else source(text, "f32")
        for text, which, half in zip(given.operands[1:], selected, is_half, strict=True)
    ]
    if given.opcode == "v_fma_mix_f32":
        put = destination(given.operands[0], "f32")
        return lambda wave: put(wave, arithmetic.fma(*[get(wave) for get in gets]))
    put, row = destination(given.operands[0], "u32"), row_of(given.operands[0])
    shift = _u(16 if given.opcode == "v_fma_mixhi_f16" else 0)
    kept = _u(0xFFFF if shift else 0xFFFF0000)

    def step(wave: Wave) -> None:
        half: Any = arithmetic.to_half(arithmetic.fma(*[get(wave) for get in gets]))
        put(wave, np.bitwise_and(wave.u[row], kept) | half << shift)

    return step


def _part(text: str, shift: int) -> Source:
    word: Any = source(text, "u32")
    by, mask = _u(shift), _u(0xFFFF)
    return lambda wave: (word(wave) >> by & mask).astype(np.uint16).view(np.float16)


def _half_as_float(text: str, which: int) -> Source:
    text, is_negated, is_positive = signs(text)
    half = source(text, "f16") if register(text) is None else _part(text, 16 * which)

    def get(wave: Wave) -> Lanes:
        value = half(wave).astype(np.float32)
        value = np.abs(value) if is_positive else value
        return -value if is_negated else value

    return get


_MAKERS: dict[Callable[[Instruction], Step], str] = {
    _compare: " ".join(
        f"v_cmp_{relation}_{kind}"
        for kinds, relations in _COMPARED.items()
        for kind in kinds.split()
        for relation in relations.split()
    ),
    _carry: "v_add_co_u32 v_addc_co_u32 v_sub_co_u32 v_subb_co_u32"
    " v_subrev_co_u32 v_subbrev_co_u32",
    _select: "v_cndmask_b32",
    _count_below: "v_mbcnt_lo_u32_b32 v_mbcnt_hi_u32_b32",
    _read_first_lane: "v_readfirstlane_b32",
    _read_lane: "v_readlane_b32",
    _write_lane: "v_writelane_b32",
    _swap_lanes: "v_permlane16_swap_b32 v_permlane32_swap_b32",
    _wide_product: "v_mad_u64_u32 v_mad_i64_i32",
    _division_scale: "v_div_scale_f32",
    _division_fma: "v_div_fmas_f32",
    _accumulate: "v_fmac_f32",
    _bitwise: "v_bitop3_b32",
    _packed: "v_pk_add_f32 v_pk_mul_f32 v_pk_fma_f32 v_pk_mov_b32",
    _mixed: "v_fma_mix_f32 v_fma_mixlo_f16 v_fma_mixhi_f16",
}
_OTHERS = {name: make for make, names in _MAKERS.items() for name in names.split()}

#: all that this module knows
OPCODES = frozenset(OPERATIONS) | frozenset(_OTHERS)
