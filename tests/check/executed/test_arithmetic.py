"""Single instructions against what the ISA documents say of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from taxfree_check.executed import matrix
from taxfree_check.executed.errors import UnknownInstruction
from tests.check.executed.machine import Machine
from tests.check.executed.pseudocode import packed

RNG = np.random.default_rng(0)

DIVISION = (
    "v_div_scale_f32 v10, s[2:3], v2, v2, v1",
    "v_div_scale_f32 v11, vcc, v1, v2, v1",
    "v_rcp_f32_e32 v12, v10",
    "v_fma_f32 v13, -v10, v12, 1.0",
    "v_fmac_f32_e32 v12, v13, v12",
    "v_mul_f32_e32 v13, v11, v12",
    "v_fma_f32 v14, -v10, v13, v11",
    "v_fmac_f32_e32 v13, v14, v12",
    "v_fma_f32 v11, -v10, v13, v11",
    "v_div_fmas_f32 v11, v11, v12, v13",
    "v_div_fixup_f32 v0, v11, v2, v1",
)


def divided(numerators, denominators):
    machine = Machine()
    machine.set(1, numerators, np.float32)
    machine.set(2, denominators, np.float32)
    machine.run(*DIVISION)
    return machine.get(0, np.float32)


@pytest.mark.parametrize("spread", [1, 30, 60, 120])
def test_the_compilers_division_is_that_of_ieee(spread):
    for _ in range(20):
        a, b = (np.ldexp(RNG.uniform(-2, 2, 64), RNG.integers(-spread, spread, 64)) for _ in "ab")
        a, b = a.astype(np.float32), b.astype(np.float32)
        with np.errstate(all="ignore"):
            expected = a / b
        result = divided(a, b)
        is_tiny = np.abs(expected) < 2.0**-125  # a subnormal quotient is rounded twice
        is_normal = ~is_tiny & np.isfinite(expected)
        assert np.array_equal(result[is_normal], expected[is_normal])
        assert (np.abs(result[is_tiny] - expected[is_tiny]) <= 2.0**-149).all()


@pytest.mark.parametrize(
    ("numerator", "denominator", "quotient"),
    [(1, 0, np.inf), (-1, 0, -np.inf), (0, 0, np.nan), (0, -3, -0.0), (np.inf, np.inf, np.nan),
     (3, np.inf, 0.0), (np.inf, -3, -np.inf), (np.nan, 1, np.nan)],
)  # fmt: skip
def test_special_operands_of_a_division(numerator, denominator, quotient):
    result = divided(np.float32(numerator), np.float32(denominator))[0]
    assert np.array_equal(result, np.float32(quotient), equal_nan=True)
    assert np.signbit(result) == np.signbit(quotient) or np.isnan(quotient)


def test_a_multiply_add_rounds_once():
    machine = Machine()
    # the exact sum lies just above the middle of two floats; rounded to float64 first, on it
    machine.set(1, 1 + 2.0**-12, np.float32)
    machine.set(2, 1 + 2.0**-12, np.float32)
    machine.set(3, 2.0**-60, np.float32)
    machine.run("v_fma_f32 v0, v1, v2, v3")
    assert machine.get(0, np.float32)[0] == np.float32(1 + 2.0**-11 + 2.0**-23)


def test_subnormals_are_kept():
    machine = Machine()
    machine.set(1, 2.0**-140, np.float32)
    machine.run("v_mul_f32_e32 v0, 0.5, v1", "v_add_f32_e32 v2, v1, v1")
    assert machine.get(0, np.float32)[0] == 2.0**-141
    assert machine.get(2, np.float32)[0] == 2.0**-139


@pytest.mark.parametrize(
    ("value", "converted"),
    [(-1.5, 0), (3.99, 3), (5e9, 0xFFFFFFFF), (np.nan, 0), (np.inf, 0xFFFFFFFF)],
)
def test_conversion_to_unsigned_truncates_and_saturates(value, converted):
    machine = Machine()
    machine.set(1, value, np.float32)
    machine.run("v_cvt_u32_f32_e32 v0, v1")
    assert machine.get(0)[0] == converted


def test_conversions_to_halves_round_to_even_and_keep_subnormals():
    machine = Machine()
    machine.set(1, 1 + 2.0**-11, np.float32)
    machine.set(2, 2.0**-24, np.float32)
    machine.run("v_cvt_f16_f32_e32 v3, v1", "v_cvt_f16_f32_e32 v4, v2")
    assert machine.get(3)[0] == 0x3C00
    assert machine.get(4)[0] == 1
    machine.set(1, 1 + 2.0**-8, np.float32)
    machine.run("v_cvt_pk_bf16_f32 v5, v1, 2.0")
    assert machine.get(5)[0] == 0x40003F80


def test_bits_are_reversed_permuted_and_extracted():
    machine = Machine()
    machine.set(1, 0x80000001)
    machine.set(2, 0x11223344)
    machine.set(3, 0x55667788)
    machine.run(
        "v_bfrev_b32_e32 v4, 2",
        "s_mov_b32 s5, 0x07030c00",
        "v_perm_b32 v6, v2, v3, s5",
        "v_bfe_i32 v7, v1, 24, 8",
        "v_bitop3_b32 v8, v1, v2, v3 bitop3:0x96",
        "v_alignbit_b32 v9, v2, v3, 8",
    )
    assert machine.get(4)[0] == 0x40000000
    assert machine.get(6)[0] == 0x11550088
    assert machine.get(7)[0] == 0xFFFFFF80
    assert machine.get(8)[0] == 0x80000001 ^ 0x11223344 ^ 0x55667788
    assert machine.get(9)[0] == 0x44556677


def test_lanes_that_are_off_keep_what_they_have():
    machine = Machine()
    machine.set(0, 7)
    machine.run("s_mov_b64 exec, 1", "v_mov_b32_e32 v0, 9", "v_cmp_eq_u32_e32 vcc, 9, v0")
    assert machine.get(0).tolist() == [9] + [7] * 63
    assert machine.wave.s[106:108].tolist() == [1, 0]


def test_scalar_carry_and_condition_codes():
    machine = Machine()
    machine.run(
        "s_mov_b64 s[0:1], -1",
        "s_add_u32 s2, s0, 1",
        "s_addc_u32 s3, s1, 0",
        "s_cselect_b32 s4, 1, 2",
        "s_bfe_i32 s5, 0xf0, 0x40004",
        "s_ashr_i32 s6, -8, 1",
    )
    assert machine.wave.s[2:7].tolist() == [0, 0, 1, 0xFFFFFFFF, 0xFFFFFFFC]


def test_shifted_lanes_without_a_source_keep_the_destination_or_read_zero():
    machine = Machine()
    machine.set(1, np.arange(64))
    machine.set(0, 100)
    machine.set(2, 100)
    mask = "row_mask:0xf bank_mask:0xf"
    machine.run(f"v_mov_b32_dpp v0, v1 row_shr:1 {mask}")
    machine.run(f"v_mov_b32_dpp v2, v1 row_shr:1 {mask} bound_ctrl:1")
    assert machine.get(0)[:3].tolist() == [100, 0, 1]
    assert machine.get(0)[16] == 100
    assert machine.get(2)[[0, 1, 16]].tolist() == [0, 0, 0]


def test_a_sum_takes_factors_of_other_lanes():
    machine = Machine()
    machine.set(0, 100, np.float32)
    machine.set(1, np.arange(64), np.float32)
    machine.set(2, 2, np.float32)
    machine.run("v_fmac_f32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf")
    assert machine.get(0, np.float32)[:3].tolist() == [100, 100, 102]


def test_a_lane_that_is_off_is_no_source():
    machine = Machine()
    machine.set(1, np.arange(64))
    machine.set(0, 100)
    machine.run("s_mov_b64 exec, -2")
    machine.run("v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf")
    assert machine.get(0)[:4].tolist() == [100, 100, 3, 2]


@pytest.mark.parametrize(
    ("control", "row", "lane"), [("row_bcast:15", 0xA, 15), ("row_bcast:31", 0xC, 31)]
)
def test_the_sum_over_rows_by_broadcasts(control, row, lane):
    machine = Machine()
    machine.set(0, np.arange(64))
    machine.run(f"v_add_u32_dpp v0, v0, v0 {control} row_mask:{row:#x} bank_mask:0xf")
    rows = [number for number in range(4) if row >> number & 1]
    for number in range(4):
        reads = (16 * number - 1 if lane == 15 else 31) if number in rows else 0
        assert machine.get(0)[16 * number] == 16 * number + reads


def test_counting_lanes_below():
    machine = Machine()
    machine.run("v_mbcnt_lo_u32_b32 v0, -1, 0", "v_mbcnt_hi_u32_b32 v0, -1, v0")
    assert machine.get(0).tolist() == list(range(64))


#: whether it is that of gfx942 -> e4m3
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e4m3fnuz}
CLAMP = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"


def codes_of(numbers, is_fnuz):
    return numbers.to(FORMATS[is_fnuz]).view(torch.uint8)


@pytest.mark.parametrize("is_fnuz", FORMATS)
def test_all_codes_of_fp8_are_those_of_torch(is_fnuz):
    expected = torch.arange(256, dtype=torch.uint8).view(FORMATS[is_fnuz]).float().numpy()
    found = []
    for first in (0, 128):  # two of a lane
        machine = Machine(is_fnuz=is_fnuz)
        codes = first + 2 * np.arange(64)
        machine.set(1, (codes | codes + 1 << 8) << 16)
        machine.run("v_cvt_pk_f32_fp8_sdwa v[2:3], v1 src0_sel:WORD_1")
        machine.run("v_cvt_f32_fp8_sdwa v4, v1 src0_sel:BYTE_3")
        pairs = np.stack([machine.get(row, np.float32) for row in (2, 3)], 1)
        assert np.array_equal(pairs[:, 1], machine.get(4, np.float32), equal_nan=True)
        if not is_fnuz:
            machine.run("v_cvt_scalef32_pk_f16_fp8 v5, v1, 1.0 op_sel:[1,0,0]")
            machine.run("v_cvt_scalef32_pk_bf16_fp8 v6, v1, 1.0 op_sel:[1,0,0]")
            halves = machine.get(5).view(np.float16).reshape(64, 2)
            assert np.array_equal(halves, pairs, equal_nan=True)
            bfloats = torch.from_numpy(machine.get(6).view(np.int16)).view(torch.bfloat16)
            assert np.array_equal(bfloats.float().numpy().reshape(64, 2), pairs, equal_nan=True)
        found += pairs.flatten().tolist()
    assert np.array_equal(found, expected, equal_nan=True)
    is_number = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found)[is_number], np.signbit(expected)[is_number])


def hard_to_round(is_fnuz):
    """All numbers of a format, what is halfway to the next, and the float32 beside each."""
    exact = torch.arange(256, dtype=torch.uint8).view(FORMATS[is_fnuz]).float().numpy()
    exact = np.unique(exact[np.isfinite(exact)])
    beyond = np.float32([1.03125, 1.0625, 2, 1e30]) * exact[-1]
    beyond = np.concatenate([beyond, np.float32([np.inf, 1e-40])])
    every = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2, beyond, -beyond])
    ends = np.float32([-np.inf, np.inf])
    every = np.concatenate([every, *(np.nextafter(every, end) for end in ends), [np.nan]])
    return torch.from_numpy(np.resize(every.astype(np.float32), -(-len(every) // 128) * 128))


@pytest.mark.parametrize("is_fnuz", FORMATS)
@pytest.mark.parametrize("clamps", [False, True])
@pytest.mark.parametrize(
    "form",
    ["v_cvt_pk_fp8_f32 v3, v1, v2 op_sel:[0,0,{}]",
     "v_cvt_scalef32_pk_fp8_f32 v3, v1, v2, 1.0 op_sel:[0,0,0,{}]"],
)  # fmt: skip
def test_numbers_are_rounded_to_fp8_as_torch_does(form, clamps, is_fnuz):
    numbers = hard_to_round(is_fnuz)
    most = torch.finfo(FORMATS[is_fnuz]).max
    expected = codes_of(numbers.clamp(-most, most), is_fnuz).view(-1, 128)
    # of what is halfway to the next, to even: 464 to 448 is, 248 to 240 is not
    last = np.float32(464 if not is_fnuz else np.nextafter(np.float32(248), np.float32(0)))
    machine = Machine(is_fnuz=is_fnuz)
    if clamps:
        machine.run(CLAMP)
    for part, codes in zip(numbers.view(-1, 128).numpy(), expected.numpy(), strict=True):
        machine.set(1, part[:64], np.float32)
        machine.set(2, part[64:], np.float32)
        for half in (0, 1):
            machine.set(3, 0xABCDABCD)
            machine.run(form.format(half))
            word = machine.get(3)
            assert (word >> 16 * (1 - half) & 0xFFFF == 0xABCD).all()
            found = np.concatenate([word >> 16 * half & 0xFF, word >> 16 * half + 8 & 0xFF])
            is_nan = np.isnan(part) | (not clamps) & (np.abs(part) > last)
            assert np.array_equal(found[~is_nan], codes[~is_nan])
            assert set(found[is_nan] & 0x7F) <= {0 if is_fnuz else 0x7F}


@pytest.mark.parametrize(
    "text",
    ["v_cvt_scalef32_pk_fp8_f32 v3, v1, v2, 2.0", "v_cvt_scalef32_pk_f16_fp8 v3, v1, v2",
     "v_cvt_pk_fp8_f32 v3, v1, v2 op_sel:[1,0,0]", "v_cvt_f32_fp8_sdwa v3, v1 src0_sel:WORD_1",
     "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3] cbsz:1",
     "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3"],
)  # fmt: skip
def test_what_is_not_modelled_of_fp8_is_refused(text):
    with pytest.raises(UnknownInstruction):
        Machine().run(text)


CASES = [
    (opcode, is_fnuz)
    for opcode in sorted(matrix.OPCODES)
    for is_fnuz in ([False, True] if "fp8" in opcode else [False])
]


@pytest.mark.parametrize(("opcode", "is_fnuz"), CASES)
@pytest.mark.parametrize("addend", ["0", "1.0", "a[0:15]"])
def test_matrix_products_are_those_of_their_layouts(opcode, is_fnuz, addend):
    """Exact: the sums are of small integers."""
    size, _, depth = (int(part) for part in opcode.split("_")[3].split("x"))
    kind = opcode.split("_", 4)[4]
    width = 16 if "f16" in kind else 8
    per_word = 32 // width
    machine, rng = Machine(is_fnuz=is_fnuz), Random(opcode)
    a, b = ([[rng.randint(-4, 4) for _ in range(depth)] for _ in range(size)] for _ in "ab")
    per_lane = depth * size // 64
    for row, matrix_ in ((0, a), (8, b)):
        for lane in range(64):
            first = per_lane * (lane // size)
            for at, number in enumerate(matrix_[lane % size][first : first + per_lane]):
                if width == 8:
                    bits = int(codes_of(torch.tensor(float(number)), is_fnuz))
                else:
                    bits = packed(float(number), "bf" if kind == "bf16" else "f", 16).bits
                word, place = machine.wave.registers[row + at // per_word], at % per_word
                word[lane] = (int(word[lane]) if place else 0) | bits << width * place
    results = size * size // 64
    before = [[rng.randint(-9, 9) for _ in range(64)] for _ in range(results)]
    for row in range(results):
        machine.set(256 + row, before[row], np.float32)
    out = f"a[0:{results - 1}]"
    added = out if addend.startswith("a") else addend
    last = per_lane // per_word - 1
    machine.run("s_mov_b64 exec, 0")  # it does not matter
    machine.run(f"{opcode} {out}, v[0:{last}], v[8:{8 + last}], {added}")
    for row in range(results):
        found = machine.get(256 + row, np.float32)
        for lane in range(64):
            i = (8 * (row // 4) if size == 32 else 0) + 4 * (lane // size) + row % 4
            total = sum(x * y for x, y in zip(a[i], b[lane % size], strict=True))
            start = before[row][lane] if added == out else float(addend)
            assert found[lane] == total + start


def test_groups_of_lanes_are_swapped():
    machine = Machine()
    machine.set(1, [100 + lane for lane in range(64)])
    machine.set(0, 7)
    machine.run("s_mov_b64 exec, 0xfffffffffffffffe")
    machine.run("ds_swizzle_b32 v0, v1 offset:swizzle(SWAP,16)", "s_waitcnt lgkmcnt(0)")
    others = [*range(16, 32), *range(16), *range(48, 64), *range(32, 48)]
    expected = [100 + lane for lane in others]
    expected[0], expected[16] = 7, 0  # off: it keeps what it has, and gives nothing
    assert machine.get(0).tolist() == expected


@pytest.mark.parametrize(("bits", "kind"), [(16, np.uint16), (8, np.uint8)])
def test_elements_are_transposed_among_16_lanes(bits, kind):
    machine, count = Machine(), 64 // bits
    elements = [[[61 * block + 16 * row + column & 255 for column in range(16)]
                 for row in range(count)] for block in range(4)]  # fmt: skip
    flat = np.array(elements, kind).reshape(-1, 1)
    machine.wave.group.shared.store(np.arange(len(flat)) * bits // 8, flat)
    machine.set(2, [8 * lane for lane in range(64)])
    machine.run(f"ds_read_b64_tr_b{bits} v[0:1], v2", "s_waitcnt lgkmcnt(0)")
    for lane in range(64):
        column = [elements[lane // 16][row][lane % 16] for row in range(count)]
        words = [int(machine.get(word)[lane]) for word in (0, 1)]
        found = [word >> at & (1 << bits) - 1 for word in words for at in range(0, 32, bits)]
        assert found == column


def moved(row, control, by):
    """A row of 16 lanes as another order of them; None where there is no lane."""
    return {
        "row_shl": [*row[by:], *[None] * by],
        "row_shr": [*[None] * by, *row[: 16 - by]],
        "row_ror": [*row[-by:], *row[:-by]],
        "row_mirror": row[::-1],
        "row_half_mirror": [*row[7::-1], *row[:7:-1]],
        "row_newbcast": [row[by]] * 16,
    }[control]


@pytest.mark.parametrize(
    "text",
    [f"{name}:{by}" for name in ("row_shl", "row_shr", "row_ror") for by in (1, 7, 15)]
    + ["row_newbcast:5", "row_mirror", "row_half_mirror"],
)
@pytest.mark.parametrize("gives_zero", [False, True])
def test_lanes_read_others_of_their_row(text, gives_zero):
    machine, values = Machine(), [1000 + lane for lane in range(64)]
    machine.set(1, values)
    machine.set(0, 7)
    ending = " bound_ctrl:1" if gives_zero else ""
    machine.run(f"v_mov_b32_dpp v0, v1 {text} row_mask:0xb bank_mask:0xe{ending}")
    name, _, by = text.partition(":")
    found = machine.get(0).tolist()
    for row in range(4):
        for lane, value in enumerate(moved(values[16 * row : 16 * row + 16], name, int(by or 1))):
            is_masked = row == 2 or lane < 4
            missing = 0 if gives_zero else 7
            expected = 7 if is_masked else missing if value is None else value
            assert found[16 * row + lane] == expected


PARTS = {"BYTE_0": (0, 1), "BYTE_1": (1, 2), "BYTE_2": (2, 3), "BYTE_3": (3, 4), "WORD_0": (0, 2),
         "WORD_1": (2, 4), "DWORD": (0, 4)}  # fmt: skip


@pytest.mark.parametrize("first", PARTS)
@pytest.mark.parametrize("second", ["DWORD", "WORD_1"])
@pytest.mark.parametrize("to", ["DWORD", "WORD_1", "BYTE_2"])
def test_parts_of_registers_are_selected(first, second, to):
    a, b = 0xA1B2C3D4, 0x1F2E3D4C
    machine = Machine()
    machine.set(1, a)
    machine.set(2, b)
    machine.run(
        f"v_xor_b32_sdwa v0, v1, v2 dst_sel:{to} dst_unused:UNUSED_PAD "
        f"src0_sel:{first} src1_sel:{second}"
    )
    x, y = (
        int.from_bytes(word.to_bytes(4, "little")[slice(*PARTS[part])], "little")
        for word, part in ((a, first), (b, second))
    )
    begin, end = PARTS[to]
    result = (x ^ y).to_bytes(4, "little")[: end - begin]
    assert machine.get(0)[0] == int.from_bytes(bytes(begin) + result, "little")


@pytest.mark.parametrize(
    ("text", "result"),
    [("v_add_u32_e64 v0, v1, v2 clamp", 0xFFFFFFFF), ("v_sub_u32_e64 v0, v2, v1 clamp", 0),
     ("v_add_u32_e32 v0, v1, v2", 0), ("v_sub_u32_e32 v0, v2, v1", 3)],
)  # fmt: skip
def test_sums_clamp_where_they_are_told_to(text, result):
    machine = Machine()
    machine.set(1, 0xFFFFFFFE)
    machine.set(2, 2 if "add" in text else 1)
    machine.run(text)
    assert machine.get(0)[0] == result


@pytest.mark.parametrize(
    ("operands", "result"),
    [("-v1, v2", 5.0), ("|v1|, v2", 5.0), ("-|v1|, -v2", -5.0), ("v1, neg(0)", -2.0)],
)
def test_signs_of_operands(operands, result):
    machine = Machine()
    machine.set(1, -2.0, np.float32)
    machine.set(2, 3.0, np.float32)
    machine.run(f"v_add_f32_e64 v0, {operands}")
    assert machine.get(0, np.float32)[0] == result


def test_an_unknown_opcode_is_named():
    with pytest.raises(UnknownInstruction, match="v_frobnicate_b32 v0, v1"):
        Machine().run("v_frobnicate_b32 v0, v1")
