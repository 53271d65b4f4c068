"""Vector arithmetic: what an instruction does in each lane that is on."""

from __future__ import annotations

from collections.abc import Callable

from taxfree_check.executed import arithmetic, dpp
from taxfree_check.executed.arithmetic import (
    RELATIONS,
    Word,
    division_scale,
    f32,
    is_below,
    order,
    signed,
)
from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.encoding import (
    CLAMPS,
    SCALARS,
    Form,
    Kind,
    Row,
    compiled,
    numbered,
    tabulated,
)
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.lanes import LANES
from taxfree_check.executed.operands import (
    WIDE,
    OperandPart,
    Source,
    literal,
    register,
    row,
    row_of,
    scalar_of,
    scalar_source,
    signs,
    source,
)
from taxfree_check.executed.wave import Step, Wave

#: instructions of one destination: its kind, and the kinds of the sources -> names
_KINDS = {
    "u32: u32": "v_mov_b32 v_not_b32 v_bfrev_b32 v_accvgpr_read_b32 v_accvgpr_write_b32"
    " v_accvgpr_mov_b32",
    "u64: u64": "v_mov_b64",
    "f64: f32": "v_cvt_f64_f32",
    "f32: f64": "v_cvt_f32_f64",
    "f64: f64 f64": "v_add_f64 v_mul_f64",
    "f64: f64 f64 f64": "v_fma_f64",
    "u32: u32 u32": "v_add_u32 v_sub_u32 v_subrev_u32 v_mul_lo_u32 v_mul_hi_u32 v_and_b32 v_or_b32"
    " v_xor_b32 v_min_u32 v_max_u32 v_lshlrev_b32 v_lshrrev_b32 v_mul_u32_u24 v_pack_b32_f16"
    " v_mbcnt_lo_u32_b32 v_mbcnt_hi_u32_b32 v_lshlrev_b16",
    "i32: i32 i32": "v_min_i32 v_max_i32 v_ashrrev_i32 v_mul_hi_i32 v_mul_i32_i24",
    "u64: u32 u64": "v_lshlrev_b64 v_lshrrev_b64",
    "i64: u32 i64": "v_ashrrev_i64",
    "u32: u32 u32 u32": "v_add3_u32 v_lshl_add_u32 v_add_lshl_u32 v_lshl_or_b32 v_and_or_b32"
    " v_or3_b32 v_xad_u32 v_bfi_b32 v_mad_u32_u24 v_bfe_u32 v_bfe_i32 v_perm_b32 v_alignbit_b32",
    "u64: u64 u32 u64": "v_lshl_add_u64",
    "i32: i32 i32 i32": "v_min3_i32 v_max3_i32 v_mad_i32_i24",
    "f32: f32": "v_sqrt_f32 v_trunc_f32 v_floor_f32 v_ceil_f32 v_rndne_f32 v_exp_f32 v_log_f32"
    " v_rcp_f32 v_rcp_iflag_f32 v_rsq_f32",
    "f32: f32 f32": "v_add_f32 v_sub_f32 v_subrev_f32 v_mul_f32 v_min_f32 v_max_f32",
    "f32: f32 f32 f32": "v_fma_f32 v_fmamk_f32 v_fmaak_f32 v_div_fixup_f32 v_max3_f32 v_min3_f32"
    " v_med3_f32",
    "f32: f32 i32": "v_ldexp_f32",
    "f32: u32": "v_cvt_f32_u32 v_cvt_f32_ubyte0",
    "f32: i32": "v_cvt_f32_i32",
    "f32: f16": "v_cvt_f32_f16",
    "i32: i32": "v_ffbh_i32",
    "u32: f32": "v_cvt_u32_f32 v_cvt_f16_f32",
    "i32: f32": "v_cvt_i32_f32",
    "u32: f32 f32": "v_cvt_pk_bf16_f32 v_cvt_pk_f16_f32",
}
#: name -> the kind of its destination, and those of its sources
OPERATIONS = {
    name: (kinds.split(": ")[0], kinds.split(": ")[1].split())
    for kinds, names in _KINDS.items()
    for name in names.split()
}
_RELATIONS_OF = {  # kinds -> their relations
    "u32 i32 u64 i64": "eq ne lt le gt ge",
    "f32": "eq lg lt le gt ge o u nlg neq nlt nle ngt nge",
}
_COMPARED = {
    f"v_cmp_{relation}_{kind}": (kind, RELATIONS[relation])
    for kinds, relations in _RELATIONS_OF.items()
    for kind in kinds.split()
    for relation in relations.split()
}
#: what differs from another instruction only in its operands
_SAME = {
    "v_accvgpr_read_b32": "v_mov_b32", "v_accvgpr_write_b32": "v_mov_b32",
    "v_accvgpr_mov_b32": "v_mov_b32", "v_pk_mov_b32": "v_mov_b32",
    "v_fmamk_f32": "v_fma_f32", "v_fmaak_f32": "v_fma_f32", "v_fmac_f32": "v_fma_f32",
    "v_fmac_f64": "v_fma_f64",
    "v_pk_fma_f32": "v_fma_f32", "v_fma_mix_f32": "v_fma_f32",
    "v_pk_add_f32": "v_add_f32", "v_pk_mul_f32": "v_mul_f32", "v_rcp_iflag_f32": "v_rcp_f32",
    "v_subrev_u32": "v_sub_u32", "v_subrev_f32": "v_sub_f32",
    "v_bitop3_b16": "v_bitop3_b32", "v_cvt_pk_f32_fp8": "v_cvt_f32_fp8",
    "v_cvt_scalef32_pk_fp8_f32": "v_cvt_pk_fp8_f32",
    "v_subrev_co_u32": "v_sub_co_u32", "v_subbrev_co_u32": "v_subb_co_u32",
}  # fmt: skip
_CARRIES = "v_add_co_u32 v_sub_co_u32 v_subrev_co_u32 v_addc_co_u32 v_subb_co_u32 v_subbrev_co_u32"
_WITH_MORE = (  # operands than a destination and its sources
    "v_bitop3_b32 v_cndmask_b32 v_mad_u64_u32 v_mad_i64_i32 v_div_scale_f32 v_div_fmas_f32"
    " v_fma_mixlo_f16 v_fma_mixhi_f16 v_cvt_pk_fp8_f32 v_cvt_f32_fp8 v_cvt_scalef32_pk_f16_fp8"
    " v_cvt_scalef32_pk_bf16_fp8 v_readfirstlane_b32 v_readlane_b32 v_writelane_b32"
)

Operation = numbered(
    [
        *OPERATIONS,
        *_CARRIES.split(),
        *_WITH_MORE.split(),
        *(f"v_cmp_{kind}" for kinds in _RELATIONS_OF for kind in kinds.split()),
        "v_add_u32_clamp",
        "v_sub_u32_clamp",
    ],
    __name__,
)


def _number(name: str) -> int:
    return int(Operation[_SAME.get(name, name)])


# -- what happens in a lane -----------------------------------------------------------------------


#: instructions of one lane: names of operations, and what they give of the sources' bits `a`, `b`
#: and `c`. `d` is a mask of lanes, the truth table of ``v_bitop3_b32``, or what the destination has
_VALUES = """
    bit = d >> lane & 1
    v_mov_b32 v_mov_b64: a
    v_not_b32: ~a
    v_bfrev_b32: reversed_bits(a)
    v_add_u32: a + b
    v_sub_u32: a - b
    v_mul_lo_u32: a * b
    v_mul_hi_u32: a * b >> 32
    v_and_b32: a & b
    v_or_b32: a | b
    v_xor_b32: a ^ b
    v_min_u32: min(a, b)
    v_max_u32: max(a, b)
    v_lshlrev_b32: b << (a & 31)
    v_lshrrev_b32: b >> (a & 31)
    v_lshlrev_b16: b << (a & 15) & 0xFFFF
    v_mul_u32_u24: (a & 0xFFFFFF) * (b & 0xFFFFFF)
    v_pack_b32_f16: a & 0xFFFF | b << 16
    v_mbcnt_lo_u32_b32: count_of_ones(a & ones(min(lane, 32))) + b
    v_mbcnt_hi_u32_b32: count_of_ones(a & ones(max(lane - 32, 0))) + b
    v_add3_u32: a + b + c
    v_lshl_add_u32: (a << (b & 31)) + c
    v_add_lshl_u32: a + b << (c & 31)
    v_lshl_or_b32: a << (b & 31) | c
    v_and_or_b32: a & b | c
    v_or3_b32: a | b | c
    v_xad_u32: (a ^ b) + c
    v_bfi_b32: a & b | ~a & c
    v_mad_u32_u24: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c
    v_bfe_u32: a >> (b & 31) & ones(c & 31)
    v_perm_b32: permuted_bytes(a, b, c)
    v_alignbit_b32: (a << 32 | b) >> (c & 31)
    v_bitop3_b32: bitwise(a, b, c, d)
    v_cndmask_b32: b if bit else a
    v_add_co_u32: a + b
    v_sub_co_u32: a - b
    v_addc_co_u32: a + b + bit
    v_subb_co_u32: a - b - bit
    v_add_u32_clamp: min(a + b, 0xFFFFFFFF)
    v_sub_u32_clamp: max(a - b, 0)
    v_lshlrev_b64: b << (a & 63)
    v_lshrrev_b64: logical_shift(b, a & 63)
    v_ashrrev_i64: b >> (a & 63)
    v_lshl_add_u64: (a << (b & 7)) + c
    v_mad_u64_u32: a * b + c
    v_cvt_f64_f32: bits64(np.float64(f32(a)))
    v_cvt_f32_f64: bits(np.float32(f64(a)))
    v_add_f64: bits64(f64(a) + f64(b))
    v_mul_f64: bits64(f64(a) * f64(b))
    v_fma_f64: bits64(fma64(f64(a), f64(b), f64(c)))
    i, j, k = signed(a), signed(b), signed(c)
    v_min_i32: min(i, j)
    v_max_i32: max(i, j)
    v_min3_i32: min(min(i, j), k)
    v_max3_i32: max(max(i, j), k)
    v_ashrrev_i32: j >> (a & 31)
    v_mul_hi_i32: i * j >> 32
    v_mul_i32_i24: sign_extended(a, 24) * sign_extended(b, 24)
    v_mad_i32_i24: sign_extended(a, 24) * sign_extended(b, 24) + c
    v_mad_i64_i32: i * j + c
    v_bfe_i32: sign_extended(i >> (b & 31), c & 31) if c & 31 else 0
    v_ffbh_i32: 32 - length(i ^ i >> 31) if i ^ i >> 31 else -1
    v_cvt_f32_u32: bits(np.float32(a))
    v_cvt_f32_i32: bits(np.float32(i))
    v_cvt_f32_ubyte0: bits(np.float32(a & 255))
    v_cvt_f32_f16: from_half(a)
    v_cvt_f16_f32: to_half(a)
    v_cvt_pk_bf16_f32: to_bfloat16(a) | to_bfloat16(b) << 16
    v_cvt_pk_f16_f32: to_half(a) | to_half(b) << 16
    v_cvt_pk_fp8_f32: packed_fp8(a, b, c, d)
    v_cvt_f32_fp8: from_fp8(a, b)
    v_cvt_scalef32_pk_f16_fp8: to_half(from_fp8(a & 255, 0)) | to_half(from_fp8(a >> 8, 0)) << 16
    v_cvt_scalef32_pk_bf16_fp8: from_fp8(a & 255, 0) >> 16 | from_fp8(a >> 8, 0) & 0xFFFF0000
    x, y, z = f32(a), f32(b), f32(c)
    v_cvt_u32_f32: to_unsigned(x)
    v_cvt_i32_f32: to_signed(x)
    v_fma_mixlo_f16: d & 0xFFFF0000 | to_half(bits(fma(x, y, z)))
    v_fma_mixhi_f16: d & 0xFFFF | to_half(bits(fma(x, y, z))) << 16
    return bits(_float_value(operation, x, y, z, bit, b))
"""
_FLOATS = """
    v_add_f32: x + y
    v_sub_f32: x - y
    v_mul_f32: x * y
    v_fma_f32: fma(x, y, z)
    v_min_f32: minimum(x, y)
    v_max_f32: maximum(x, y)
    v_min3_f32: minimum(minimum(x, y), z)
    v_max3_f32: maximum(maximum(x, y), z)
    v_med3_f32: median(x, y, z)
    v_sqrt_f32: np.sqrt(x)
    v_rcp_f32: np.float32(1) / x
    v_rsq_f32: np.float32(1 / np.sqrt(np.float64(x)))
    v_exp_f32: np.float32(np.exp2(np.float64(x)))
    v_log_f32: np.float32(np.log2(np.float64(x)))
    v_trunc_f32: np.trunc(x)
    v_floor_f32: np.floor(x)
    v_ceil_f32: np.ceil(x)
    v_rndne_f32: np.rint(x)
    v_ldexp_f32: scaled(x, signed(b))
    v_div_scale_f32: division_scale(x, y, z)[0]
    v_div_fmas_f32: division_fma(x, y, z, bit != 0)
    return division_fixup(x, y, z)
"""
_NAMES = {**vars(arithmetic), "__name__": __name__}
_NAMES["_float_value"] = compiled(
    tabulated("_float_value(operation, x, y, z, bit, b)", _FLOATS, Operation, _NAMES)
)
#: the result of an instruction in one lane; a call in each lane would take as long as the work
value = compiled(inline="always")(
    tabulated("value(operation, a, b, c, d, lane)", _VALUES, Operation, _NAMES)
)


@compiled(inline="always")  # a call in each lane would take as long as the work
def flag(operation: int, a: Word, b: Word, c: Word, d: Word, lane: int) -> bool:
    """The bit that an instruction gives for one lane: of a comparison, a carry, or a division.

    Args:
        operation: see :data:`Operation`.
        a, b, c, d, lane: as in `_VALUES`; of a comparison, `c` has the relations.
    """
    o, bit = Operation, d >> lane & 1
    if operation == o.v_add_co_u32 or operation == o.v_addc_co_u32:
        return a + b + bit > 0xFFFFFFFF
    if operation == o.v_sub_co_u32 or operation == o.v_subb_co_u32:
        return a - b - bit < 0
    if operation == o.v_mad_u64_u32:
        return is_below(a * b + c, a * b)
    i, j = signed(a), signed(b)
    if operation == o.v_mad_i64_i32:
        # the sum has a 65th bit, its sign, which differs from the 64th if it overflows
        product, total = i * j, i * j + c
        return ((product ^ total) & (c ^ total) < 0) != (total < 0)
    x, y = f32(a), f32(b)
    if operation == o.v_div_scale_f32:
        return division_scale(x, y, f32(c))[1]
    if operation == o.v_cmp_f32:
        return order(x < y, x == y, x > y) & c != 0
    if operation == o.v_cmp_i32:
        return order(i < j, i == j, True) & c != 0
    if operation == o.v_cmp_u64:
        return order(is_below(a, b), a == b, True) & c != 0
    return order(a < b, a == b, True) & c != 0  # of words, and of 64 bits with a sign


# -- what instructions are made of ----------------------------------------------------------------


def build(instruction: Instruction) -> Row | Step:
    """Make the record of a vector instruction, or a function that executes it.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    name = instruction.opcode
    if name in OPERATIONS:
        return _simple(instruction)
    if name in _COMPARED:
        kind, relations = _COMPARED[name]
        part = OperandPart(
            [*_sources(instruction, [kind] * 2), literal(relations)], bits=_pair(instruction, 0)
        )
        return _row(instruction, f"v_cmp_{kind}", part)
    if name in _OTHERS:
        return _OTHERS[name](instruction)
    raise UnknownInstruction(f"unknown instruction {instruction.text}")


def _row(instruction: Instruction, name: str, *parts: OperandPart) -> Row:
    fields = dpp.fields(instruction) if instruction.form == "dpp" else {}
    return row(Form.VECTOR, _number(name), *parts, **fields)


def _out(instruction: Instruction, operand: int = 0) -> int:
    return 64 * row_of(instruction.operands[operand])


def _pair(instruction: Instruction, operand: int) -> int:
    return SCALARS + scalar_of(instruction.operands[operand])


_HANDLED = {"clamp", "src0_sel", "src1_sel", "dst_sel", "dst_unused"}
_PARTS = {  # of registers (SDWA)
    "BYTE_0": (0, 0xFF), "BYTE_1": (8, 0xFF), "BYTE_2": (16, 0xFF), "BYTE_3": (24, 0xFF),
    "WORD_0": (0, 0xFFFF), "WORD_1": (16, 0xFFFF),
}  # fmt: skip


def _sources(instruction: Instruction, kinds: list[str], first: int = 1) -> list[Source]:
    """The operands from number `first` on, or the parts of them that SDWA selects."""
    made = []
    for number, kind in enumerate(kinds):
        selected = instruction.modifiers.get(f"src{number}_sel", "DWORD")
        part = None
        if selected != "DWORD":
            if selected not in _PARTS or kind not in ("u32", "i32", "f16"):
                raise UnknownInstruction(f"unknown form of {instruction.text}")
            part = _PARTS[selected]
        made.append(source(instruction.operands[first + number], kind, part))
    if "rev" in instruction.opcode and "sub" in instruction.opcode:
        made.reverse()
    return made


def _simple(instruction: Instruction) -> Row:
    name, (out, kinds) = instruction.opcode, OPERATIONS[instruction.opcode]
    if len(instruction.operands) != 1 + len(kinds):
        raise UnknownInstruction(f"unknown form of {instruction.text}")
    if instruction.form != "dpp" and set(instruction.modifiers) - _HANDLED:
        raise UnknownInstruction(f"unknown modifier of {instruction.text}")
    if "clamp" in instruction.modifiers:
        name += "_clamp"
        if name not in Operation.__members__:
            raise UnknownInstruction(f"unknown form of {instruction.text}")
    sources = _sources(instruction, kinds)
    shift, mask = 0, -1
    if (selected := instruction.modifiers.get("dst_sel", "DWORD")) != "DWORD":
        if instruction.modifiers.get("dst_unused") != "UNUSED_PAD" or out != "u32":
            raise UnknownInstruction(f"unknown form of {instruction.text}")
        shift, mask = _PARTS[selected]
    return _row(
        instruction, name, OperandPart(sources, _out(instruction), out in WIDE, mask, shift)
    )


def _carry(instruction: Instruction) -> Row:
    sources = [*_sources(instruction, ["u32"] * 2, 2), literal(0)]
    if len(instruction.operands) > 4:
        sources.append(scalar_source(instruction.operands[4], 2))
    return _row(
        instruction,
        instruction.opcode,
        OperandPart(sources, _out(instruction), bits=_pair(instruction, 1)),
    )


def _select(instruction: Instruction) -> Row:
    has_signs = any(signs(text)[1] or signs(text)[2] for text in instruction.operands[1:3])
    no, yes = _sources(instruction, ["f32" if has_signs else "u32"] * 2)
    condition = scalar_source(instruction.operands[3], 2)
    return _row(
        instruction,
        instruction.opcode,
        OperandPart([no, yes, literal(0), condition], _out(instruction)),
    )


def _wide_product(instruction: Instruction) -> Row:
    sources = _sources(instruction, ["u32", "u32", "u64"], 2)
    part = OperandPart(sources, _out(instruction), is_wide=True, bits=_pair(instruction, 1))
    return _row(instruction, instruction.opcode, part)


def _division_scale(instruction: Instruction) -> Row:
    part = OperandPart(
        _sources(instruction, ["f32"] * 3, 2), _out(instruction), bits=_pair(instruction, 1)
    )
    return _row(instruction, instruction.opcode, part)


def _division_fma(instruction: Instruction) -> Row:
    sources = [*_sources(instruction, ["f32"] * 3), scalar_source("vcc", 2)]
    return _row(instruction, instruction.opcode, OperandPart(sources, _out(instruction)))


def _accumulate(instruction: Instruction) -> Row:
    kind = instruction.opcode.removeprefix("v_fmac_")
    sources = [*_sources(instruction, [kind] * 2), source(instruction.operands[0], kind)]
    part = OperandPart(sources, _out(instruction), kind in WIDE)
    return _row(instruction, instruction.opcode, part)


def _bitwise(instruction: Instruction) -> Row:
    sources = [*_sources(instruction, ["u32"] * 3), literal(instruction.number("bitop3"))]
    # LLVM expects nothing of the upper half behind 16 bits
    mask = 0xFFFF if instruction.opcode.endswith("b16") else -1
    return _row(instruction, instruction.opcode, OperandPart(sources, _out(instruction), mask=mask))


def _packed(instruction: Instruction) -> Row:
    """Two results, in neighbouring registers, each of one word of each source."""
    count = len(instruction.operands) - 1
    selected = instruction.flags("op_sel", [0] * count), instruction.flags("op_sel_hi", [1] * count)
    negated = [instruction.flags(name, [0] * count) for name in ("neg_lo", "neg_hi")]
    out = _out(instruction)
    if instruction.opcode == "v_pk_mov_b32":  # of the first source, then of the second
        words = [
            source(instruction.operands[1 + half], "u32", which=selected[0][half])
            for half in range(2)
        ]
        parts = [OperandPart([word], out + 64 * half) for half, word in enumerate(words)]
        return _row(instruction, instruction.opcode, *parts)
    parts = []
    for half in range(2):
        halves = [
            source(f"neg({text})" if sign else text, "f32", which=which)
            for text, which, sign in zip(
                instruction.operands[1:], selected[half], negated[half], strict=True
            )
        ]
        parts.append(OperandPart(halves, out + 64 * half))
    return _row(instruction, instruction.opcode, *parts)


def _mixed(instruction: Instruction) -> Row:
    """A fused multiply-add in float32, of float32 operands and halves of registers."""
    selected, is_half = (
        instruction.flags("op_sel", [0] * 3),
        instruction.flags("op_sel_hi", [0] * 3),
    )
    sources = []
    for text, which, half in zip(instruction.operands[1:], selected, is_half, strict=True):
        if half:
            is_constant = register(signs(text)[0]) is None
            part = (0 if is_constant else 16 * which, 0xFFFF)
            sources.append(source(text, "f16", part)._replace(is_half=True))
        else:
            sources.append(source(text, "f32"))
    if instruction.opcode != "v_fma_mix_f32":
        sources.append(source(instruction.operands[0], "u32"))
    return _row(instruction, instruction.opcode, OperandPart(sources, _out(instruction)))


def _require_no_scale(instruction: Instruction) -> None:
    if "scalef32" in instruction.opcode and instruction.operands[-1] != "1.0":
        raise UnknownInstruction(f"{instruction.text}: scales are not modelled")


def _to_fp8(instruction: Instruction) -> Row:
    """Two numbers to half of a word; the last bit of `op_sel` says which."""
    _require_no_scale(instruction)
    *first, half = instruction.flags("op_sel", [0])
    if any(first):
        raise UnknownInstruction(f"unknown form of {instruction.text}")
    how = 2 * half + 4 * instruction.is_fnuz
    sources = [
        *_sources(instruction, ["f32"] * 2),
        Source(Kind.SCALAR, SCALARS + CLAMPS, flip=how),
        source(instruction.operands[0], "u32"),
    ]
    return _row(instruction, instruction.opcode, OperandPart(sources, _out(instruction)))


def _of_fp8(instruction: Instruction) -> Row:
    """One number, or two of neighbouring bytes in neighbouring registers."""
    is_pair = "_pk_" in instruction.opcode
    selected = instruction.modifiers.get("src0_sel", "WORD_0" if is_pair else "BYTE_0")
    first, mask = _PARTS[selected]
    if set(instruction.modifiers) - _HANDLED or (mask > 0xFF) != is_pair:
        raise UnknownInstruction(f"unknown form of {instruction.text}")
    is_fnuz = literal(instruction.is_fnuz)
    parts = [
        OperandPart(
            [source(instruction.operands[1], "u32", (first + 8 * byte, 0xFF)), is_fnuz],
            _out(instruction) + 64 * byte,
        )
        for byte in range(1 + is_pair)
    ]
    return _row(instruction, instruction.opcode, *parts)


def _halves_of_fp8(instruction: Instruction) -> Row:
    """Two numbers of half of a word; the first bit of `op_sel` says which."""
    _require_no_scale(instruction)
    half, *others = instruction.flags("op_sel", [0])
    if any(others):
        raise UnknownInstruction(f"unknown form of {instruction.text}")
    word = source(instruction.operands[1], "u32", (16 * half, 0xFFFF))
    return _row(instruction, instruction.opcode, OperandPart([word], _out(instruction)))


def _lane(instruction: Instruction) -> Row:
    """A word that moves between a lane and a scalar register."""
    is_write = instruction.opcode == "v_writelane_b32"
    out = _out(instruction) if is_write else _pair(instruction, 0)
    taken = (
        scalar_source(instruction.operands[1])
        if is_write
        else source(instruction.operands[1], "u32")
    )
    lane = scalar_source(instruction.operands[2]) if len(instruction.operands) > 2 else literal(0)
    return row(Form.LANE, _number(instruction.opcode), OperandPart([taken, lane], out))


def _swap_lanes(instruction: Instruction) -> Step:
    """Exchange odd rows of 16 or 32 lanes of one register with even ones of another."""
    size = int(instruction.opcode.removeprefix("v_permlane")[:2])
    first, second = (row_of(text) for text in instruction.operands)
    odd, even = (LANES // size % 2 == 1), (LANES // size % 2 == 0)

    def step(wave: Wave) -> None:
        if not wave.is_full:
            raise UnknownInstruction(f"{instruction.opcode} with lanes off")
        a, b = wave.registers[first], wave.registers[second]
        a[odd], b[even] = b[even], a[odd]

    return step


_MAKERS: dict[Callable[[Instruction], Row | Step], str] = {
    _carry: _CARRIES,
    _select: "v_cndmask_b32",
    _lane: "v_readfirstlane_b32 v_readlane_b32 v_writelane_b32",
    _swap_lanes: "v_permlane16_swap_b32 v_permlane32_swap_b32",
    _wide_product: "v_mad_u64_u32 v_mad_i64_i32",
    _division_scale: "v_div_scale_f32",
    _division_fma: "v_div_fmas_f32",
    _accumulate: "v_fmac_f32 v_fmac_f64",
    _bitwise: "v_bitop3_b32 v_bitop3_b16",
    _to_fp8: "v_cvt_pk_fp8_f32 v_cvt_scalef32_pk_fp8_f32",
    _of_fp8: "v_cvt_f32_fp8 v_cvt_pk_f32_fp8",
    _halves_of_fp8: "v_cvt_scalef32_pk_f16_fp8 v_cvt_scalef32_pk_bf16_fp8",
    _packed: "v_pk_add_f32 v_pk_mul_f32 v_pk_fma_f32 v_pk_mov_b32",
    _mixed: "v_fma_mix_f32 v_fma_mixlo_f16 v_fma_mixhi_f16",
}
_OTHERS = {name: make for make, names in _MAKERS.items() for name in names.split()}

#: of these, the instructions whose result is rounded to float16
MAKES_HALVES = frozenset(
    ["v_cvt_f16_f32", "v_cvt_pk_f16_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"]
)
#: all that this module knows
OPCODES = frozenset(OPERATIONS) | frozenset(_COMPARED) | frozenset(_OTHERS)
