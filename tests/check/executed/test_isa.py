"""Every instruction that the executor knows, against the pseudo code of AMD's ISA document.

The pseudo code is that of the CDNA 4 document, as the package tinygrad has it. Its instructions
contain all of CDNA 3.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import product
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

from taxfree_check.executed import scalar, vector
from taxfree_check.executed.decode import instruction
from taxfree_check.executed.encoding import SCC, VCC
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.lds import SharedMemory
from taxfree_check.executed.program import build_step
from taxfree_check.executed.wave import Wave
from tests.check.executed.machine import Machine
from tests.check.executed.pseudocode import Document, Value, float_bits

MIX = """
a.f32 = OPSEL_HI[0] == 1'1U ? f16_to_f32(S0.u32[OPSEL[0] * 16 + 15 : OPSEL[0] * 16].f16) : S0.f32;
b.f32 = OPSEL_HI[1] == 1'1U ? f16_to_f32(S1.u32[OPSEL[1] * 16 + 15 : OPSEL[1] * 16].f16) : S1.f32;
c.f32 = OPSEL_HI[2] == 1'1U ? f16_to_f32(S2.u32[OPSEL[2] * 16 + 15 : OPSEL[2] * 16].f16) : S2.f32;
"""
#: what the document says in a table or in prose, or with an error
OURS = {
    "v_accvgpr_read_b32": "D0.b32 = S0.b32",
    "v_accvgpr_write_b32": "D0.b32 = S0.b32",
    "v_accvgpr_mov_b32": "D0.b32 = S0.b32",
    "v_mad_i32_i24": "D0.i32 = 32'I(S0.i24) * 32'I(S1.i24) + S2.i32",
    "v_fma_mix_f32": MIX + "D0.f32 = fma(a.f32, b.f32, c.f32)",
    "v_fma_mixlo_f16": MIX + "D0[15 : 0].f16 = f32_to_f16(fma(a.f32, b.f32, c.f32))",
    "v_fma_mixhi_f16": MIX + "D0[31 : 16].f16 = f32_to_f16(fma(a.f32, b.f32, c.f32))",
    # It selects halves of a "u32".
    "v_pk_mov_b32": """
        D0.u64[31 : 0] = S0.u64[OPSEL[0].i32 * 32 + 31 : OPSEL[0].i32 * 32];
        D0.u64[63 : 32] = S1.u64[OPSEL[1].i32 * 32 + 31 : OPSEL[1].i32 * 32]""",
    # It leaves the upper half open. LLVM relies on zeros there, before GFX10.
    "v_cvt_f16_f32": "D0.u32 = 0U; D0[15 : 0].f16 = f32_to_f16(S0.f32)",
    "v_lshlrev_b16": "D0.u32 = 0U; D0.u16 = S1.u16 << S0[3 : 0].u32",
    # It scales by 2**32, which undoes none of the scalings of V_DIV_SCALE_F32, by 2**64.
    # LLVM's division is that of IEEE only with this: see test_arithmetic.py.
    "v_div_fmas_f32": """
        if VCC.u64[laneId] then
        D0.f32 = ldexp(1.0F, exponent(S2.f32) > 127 ? 64 : -64) * fma(S0.f32, S1.f32, S2.f32)
        else
        D0.f32 = fma(S0.f32, S1.f32, S2.f32)
        endif""",
    # It adds 0.5 first, which rounds: 0.49999997 would become 1.
    "v_rndne_f32": "D0.f32 = rint(S0.f32)",
}


def flags(text: str) -> Value:
    """The bits of a modifier such as ``op_sel:[0,1,0]``."""
    return Value(int(text.replace(",", "")[::-1], 2), 4)


TEXTS = {re.sub("_e(32|64)$", "", key.name.lower()): text for key, text in PCODE.items()} | OURS
# VCC is that of a lane. S0 is left as it is where the text says nothing. The inverse of a float32
# is never subnormal as a float64.
TEXTS["v_div_scale_f32"] = "D0.f32 = S0.f32;" + (
    TEXTS["v_div_scale_f32"]
    .replace("VCC =", "VCC.u64[laneId] =")
    .replace("1.0 / 64'F(S1.f32) == DENORM.f64", "1.0F / S1.f32 == DENORM.f32")
)
for name in [name for name in TEXTS if name.startswith("v_") and "fp8" in name]:
    of_lane = TEXTS[name].replace("VGPR[laneId][VDST.u32]", "D0")
    TEXTS[name] = of_lane.replace("VGPR[laneId][SRC0.u32]", "S0")
DOCUMENT = Document(TEXTS)

SPECIAL_FLOATS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 0.49999997, math.inf, -math.inf, math.nan,
    3e38, -3e38,
    2.0**-149, -(2.0**-140), 2.0**-126, 2.0**23 + 1, 2.0**31, -(2.0**31), 2.0**32,
)  # fmt: skip
SPECIAL_WORDS = (0, 1, 2, 31, 32, 63, 64, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 1 << 31, 0xFFFFFFFF)
SPECIAL_HALVES = (0, 0x8000, 1, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00)
WIDE = ("u64", "i64", "f64", "pair")

#: these are approximate on a GPU, too
APPROXIMATE = {"v_exp_f32", "v_log_f32", "v_rsq_f32"}


class Form(NamedTuple):
    """An instruction to try.

    Args:
        text: with {0}, {1}, ... for its sources and {d} for its destination.
        out: kind of the destination: "pair" is two float32, "none" for a mask or nothing.
        kinds: of the sources.
        given: what else its pseudo code reads.
    """

    text: str
    out: str
    kinds: tuple[str, ...]
    given: Mapping[str, Any] = MappingProxyType({})

    @property
    def opcode(self) -> str:
        return instruction(self.text).opcode


def draw(rng: Random, kind: str) -> int:
    """Bits of an operand."""
    if kind in ("u64", "i64"):
        return rng.choice((rng.getrandbits(64), draw(rng, "u32") | draw(rng, "u32") << 32))
    if kind == "pair":
        return draw(rng, "f32") | draw(rng, "f32") << 32
    if kind == "halves":
        return draw(rng, "f16") | draw(rng, "f16") << 16
    if kind == "f16":
        return rng.choice((rng.choice(SPECIAL_HALVES), rng.getrandbits(16)))
    if kind == "f32":
        return rng.choice((
            float_bits(rng.choice(SPECIAL_FLOATS)), rng.getrandbits(32),
            float_bits(rng.uniform(-4, 4)), float_bits(rng.uniform(-1, 1) * 2.0**-126),
            float_bits(rng.uniform(-2, 2) * 2.0 ** rng.randint(-40, 40)),
        ))  # fmt: skip
    if kind == "f64":
        numbers = (rng.choice(SPECIAL_FLOATS), rng.uniform(-4, 4) * 2.0 ** rng.randint(-90, 90))
        return int.from_bytes(struct.pack("<d", rng.choice(numbers)), "little")
    if kind == "exponent":
        return rng.randint(-300, 300) & 0xFFFFFFFF
    return rng.choice((rng.choice(SPECIAL_WORDS), rng.getrandbits(32), rng.getrandbits(8)))


# -- vector instructions --------------------------------------------------------------------------

CONSTANT = 0x40490FDB
OPERANDS = {
    "v_fmamk_f32": f"{{d}}, {{0}}, {CONSTANT:#x}, {{1}}",
    "v_fmaak_f32": f"{{d}}, {{0}}, {{1}}, {CONSTANT:#x}",
    "v_accvgpr_read_b32": "{d}, a0",
    "v_accvgpr_write_b32": "a10, {0}",
    "v_accvgpr_mov_b32": "a10, a0",
}
KINDS = {
    "v_ldexp_f32": ("f32", "exponent"),
    "v_fmamk_f32": ("f32", "f32"),
    "v_fmaak_f32": ("f32", "f32"),
}
WORDS, FLOATS, PAIRS, HALVES = (tuple([kind] * 3) for kind in ("u32", "f32", "pair", "halves"))
IN_TWO = "{d}, {0}, {1}"
IN_THREE = "{d}, {0}, {1}, {2}"
WITH_CARRY = "{d}, vcc, {0}, {1}"
#: name and operands, kind of the destination, kinds of the sources
OF_SEVERAL = [
    (f"v_cndmask_b32 {IN_TWO}, vcc", "u32", WORDS[:2]),
    (f"v_add_co_u32 {WITH_CARRY}", "u32", WORDS[:2]),
    (f"v_sub_co_u32 {WITH_CARRY}", "u32", WORDS[:2]),
    (f"v_subrev_co_u32 {WITH_CARRY}", "u32", WORDS[:2]),
    (f"v_addc_co_u32 {WITH_CARRY}, vcc", "u32", WORDS[:2]),
    (f"v_subb_co_u32 {WITH_CARRY}, vcc", "u32", WORDS[:2]),
    (f"v_subbrev_co_u32 {WITH_CARRY}, vcc", "u32", WORDS[:2]),
    (f"v_mad_u64_u32 {WITH_CARRY}, {{2}}", "u64", ("u32", "u32", "u64")),
    (f"v_mad_i64_i32 {WITH_CARRY}, {{2}}", "i64", ("i32", "i32", "i64")),
    ("v_div_scale_f32 {d}, vcc, {1}, {1}, {2}", "f32", FLOATS),
    ("v_div_scale_f32 {d}, vcc, {2}, {1}, {2}", "f32", FLOATS),
    (f"v_div_fmas_f32 {IN_THREE}", "f32", FLOATS),
    (f"v_fmac_f32 {IN_TWO}", "f32", FLOATS[:2]),
    (f"v_fmac_f64 {IN_TWO}", "f64", ("f64", "f64")),
    (f"v_pk_add_f32 {IN_TWO}", "pair", PAIRS[:2]),
    (f"v_pk_mul_f32 {IN_TWO}", "pair", PAIRS[:2]),
    (f"v_pk_fma_f32 {IN_THREE}", "pair", PAIRS),
]


def _selections() -> Iterator[Form]:
    """Instructions whose modifiers select a function, or parts of operands."""
    for table in (0x96, 0x6C, 0xCA, 0xE8, 0x01):
        fields = {"OMOD": Value(table >> 6, 2), "ABS": Value(table >> 3, 3), "NEG": Value(table, 3)}
        for bits in (32, 16):
            text = f"v_bitop3_b{bits} {IN_THREE} bitop3:{table:#x}"
            yield Form(text, "u32", WORDS, {"INST": fields})
    for selected in ("0,0", "1,0", "0,1", "1,1"):
        text = f"v_pk_mov_b32 {IN_TWO} op_sel:[{selected}]"
        yield Form(text, "u64", ("u64", "u64"), {"OPSEL": flags(selected)})
    for name, out in (("mix_f32", "f32"), ("mixlo_f16", "halves"), ("mixhi_f16", "halves")):
        for low, half in (("0,1,0", "1,1,1"), ("0,0,0", "0,0,0"), ("1,0,1", "1,1,0")):
            text = f"v_fma_{name} {IN_THREE} op_sel:[{low}] op_sel_hi:[{half}]"
            yield Form(text, out, HALVES, {"OPSEL": flags(low), "OPSEL_HI": flags(half)})


def _conversions_of_fp8() -> Iterator[Form]:
    """In the format of the Open Compute Project; test_arithmetic.py has both, and clamps."""
    unscaled, parts = Value(float_bits(1.0), 64), ("BYTE_1", "BYTE_2", "BYTE_3", "WORD_1")
    codes = {name.replace("_", ""): Value(at, 3) for at, name in enumerate(parts, 1)}
    codes["WORD1"] = Value(5, 3)
    for name, selections in (("v_cvt_f32_fp8", parts[:3]), ("v_cvt_pk_f32_fp8", parts[3:])):
        out = "pair" if "_pk_" in name else "f32"
        given = {**codes, "SDWA_SRC0_SEL": Value(0, 3)}
        yield Form(f"{name} {{d}}, {{0}}", out, ("u32",), given)
        for part in selections:
            given = {**codes, "SDWA_SRC0_SEL": codes[part.replace("_", "")]}
            yield Form(f"{name}_sdwa {{d}}, {{0}} src0_sel:{part}", out, ("u32",), given)
    for half in "01":
        for name, ending in (("", " op_sel:[0,0,{}]"), ("scalef32_", ", 1.0 op_sel:[0,0,0,{}]")):
            text = f"v_cvt_{name}pk_fp8_f32 {IN_TWO}" + ending.format(half)
            given = {"S2": unscaled, "OPSEL": flags(f"0,0,0,{half}")}
            yield Form(text, "u32", FLOATS[:2], given)
        for kind in ("f16", "bf16"):
            text = f"v_cvt_scalef32_pk_{kind}_fp8 {{d}}, {{0}}, 1.0 op_sel:[{half},0,0]"
            given = {"S1": unscaled, "OPSEL": flags(half)}
            yield Form(text, "halves" if kind == "f16" else "bfloats", ("u32",), given)


def _vector_forms() -> Iterator[Form]:
    for name, (out, inputs) in vector.OPERATIONS.items():
        kinds = KINDS.get(name, tuple(inputs))
        places = ", ".join(f"{{{at}}}" for at in range(len(kinds)))
        operands = OPERANDS.get(name, f"{{d}}, {places}")
        yield Form(f"{name} {operands}", out, kinds, {"SIMM32": Value(CONSTANT, 32)})
    for name in sorted(vector.OPCODES):
        if name.startswith("v_cmp_"):
            yield Form(f"{name} vcc, {{0}}, {{1}}", "none", (name[-3:],) * 2)
    yield from (Form(*each) for each in OF_SEVERAL)
    yield from _selections()
    yield from _conversions_of_fp8()


def operand(row: int, kind: str) -> str:
    return f"v[{row}:{row + 1}]" if kind in WIDE else f"v{row}"


def numbers(bits: int, out: str) -> list[float]:
    if out == "pair":
        return numbers(bits & 0xFFFFFFFF, "f32") + numbers(bits >> 32, "f32")
    if out in ("halves", "bfloats"):
        kind = "f" if out == "halves" else "bf"
        return [Value(bits >> at & 0xFFFF, 16, kind).number for at in (0, 16)]
    return [Value(bits, int(out[1:]), out[0]).number]


def agree(found: int, expected: int, form: Form) -> bool:
    """Whether results are the same; NaNs are, whatever their bits."""
    if found == expected or form.out in ("u32", "i32", "u64", "i64", "none"):
        return found == expected
    slack = 2.0**-22 if form.opcode in APPROXIMATE else 0.0
    return all(
        (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        or abs(a - b) <= slack * abs(b)
        for a, b in zip(numbers(found, form.out), numbers(expected, form.out), strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("form", list(_vector_forms()), ids=lambda form: form.text)
def test_vector_instructions_do_what_their_pseudo_code_says(form):
    rng, machine = Random(form.text), Machine()
    wave, u = machine.wave, machine.wave.registers
    base = 256 if " a0" in form.text or ", a0" in form.text else 0
    out_row = 256 + 10 if " a10" in form.text else 10
    sources = [[draw(rng, kind) for _ in range(64)] for kind in form.kinds]
    if form.kinds[:2] == ("f32", "f32"):
        for lane, pair in enumerate(
            product((0.0, -0.0, 1.0, math.inf, -math.inf, math.nan), repeat=2)
        ):
            sources[0][lane], sources[1][lane] = (float_bits(number) for number in pair)
    for at, values in enumerate(sources):
        for lane, bits in enumerate(values):
            u[base + 2 * at][lane], u[base + 2 * at + 1][lane] = bits & 0xFFFFFFFF, bits >> 32
    before = [rng.getrandbits(64) for _ in range(64)]
    for lane, bits in enumerate(before):
        u[out_row][lane], u[out_row + 1][lane] = bits & 0xFFFFFFFF, bits >> 32
    vcc = rng.getrandbits(64)
    wave.s[106:108] = [vcc & 0xFFFFFFFF, vcc >> 32]
    given = [operand(2 * at, kind) for at, kind in enumerate(form.kinds)]
    machine.run(form.text.format(*given, d=operand(10, form.out)))
    width = 64 if form.out in WIDE else 32
    masks = wave.pair(VCC)
    for lane in range(64):
        registers: dict[str, Any] = {
            "D0": Value(before[lane], 64), "D1": Value(vcc >> lane & 1, 1), "VCC": Value(vcc, 64),
            "laneId": Value(lane, 32), "WAVE_MODE": {"IEEE": Value(0, 1)},
            "ROUND_MODE": Value(0, 2),
        }  # fmt: skip
        registers |= {"ROUND_NEAREST_EVEN": Value(0, 2), **form.given}
        for at, values in enumerate(sources):
            registers[f"S{at}"] = Value(values[lane], 64)
        if form.opcode == "v_div_scale_f32":
            registers["S0"] = registers["S1" if "vcc, {1}" in form.text else "S2"]
        after = DOCUMENT.run(form.opcode, registers)
        shown = [f"{values[lane]:#x}" for values in sources]
        if form.out == "none":
            assert masks >> lane & 1 == after["D0"].bits >> lane & 1, shown
            continue
        mask = (1 << width) - 1
        found = (int(u[out_row][lane]) | int(u[out_row + 1][lane]) << 32) & mask
        expected = after.get("D", after["D0"]).bits & mask
        assert agree(found, expected, form), (shown, f"{found:#x} != {expected:#x}")
        carry = after["D1"].bits if "v_mad_" in form.text else after["VCC"].bits >> lane & 1
        assert masks >> lane & 1 == carry, shown


# -- scalar instructions --------------------------------------------------------------------------


def _scalar_forms() -> Iterator[Form]:
    for name, (out, words) in scalar.OPERATIONS.items():
        places = ", ".join(f"{{{at}}}" for at in range(len(words)))
        yield Form(
            f"{name} {{d}}, {places}", f"u{32 * out}", tuple(f"u{32 * each}" for each in words)
        )
    for name in sorted(scalar.OPCODES):
        kind = name.split("_")[-1]
        if name.startswith("s_cmpk_"):
            for immediate in (0, 1, 0x7F, 0xFF80, 0x7FFF, 0x8000, 0xFFFF):
                yield Form(
                    f"{name} {{0}}, {immediate:#x}", "none", (kind,), {"S1": Value(immediate, 16)}
                )
        elif name.startswith("s_cmp_"):
            yield Form(f"{name} {{0}}, {{1}}", "none", (kind,) * 2)
        elif name.startswith("s_bitcmp"):
            yield Form(f"{name} {{0}}, {{1}}", "none", ("u32",) * 2)
        elif name.endswith("k_i32"):
            for immediate in (0, 1, 0x60, 0x7FFF, 0x8000, 0xFFFE):
                yield Form(f"{name} {{d}}, {immediate:#x}", "u32", (), {"S0": Value(immediate, 16)})
        elif "saveexec" in name:
            yield Form(f"{name} {{d}}, {{0}}", "u64", ("u64",))


@pytest.mark.parametrize("form", list(_scalar_forms()), ids=lambda form: form.text)
def test_scalar_instructions_do_what_their_pseudo_code_says(form):
    rng = Random(form.text)
    machine = Machine()
    wave = machine.wave
    pairs = [f"s[{at}:{at + 1}]" for at in (0, 2)]
    given = [pairs[at] if kind in WIDE else f"s{2 * at}" for at, kind in enumerate(form.kinds)]
    text = form.text.format(*given, d="s[10:11]" if form.out in WIDE else "s10")
    for _ in range(100):
        sources = [draw(rng, kind) for kind in form.kinds]
        before, execution, condition = rng.getrandbits(64), rng.getrandbits(64), rng.getrandbits(1)
        for at, bits in (
            (0, sources[0] if sources else 0),
            (2, sources[-1] if sources else 0),
            (10, before),
        ):
            wave.s[at : at + 2] = [bits & 0xFFFFFFFF, bits >> 32]
        wave.set_exec(execution)
        wave.s[SCC] = condition
        machine.run(text)
        after = DOCUMENT.run(form.opcode, {
            "D0": Value(before, 64), "EXEC": Value(execution, 64), "SCC": Value(condition, 1),
            **{f"S{at}": Value(bits, 64) for at, bits in enumerate(sources)}, **form.given,
        })  # fmt: skip
        shown = [f"{bits:#x}" for bits in sources]
        assert wave.s[SCC] == after["SCC"].bits, shown
        assert wave.exec == after["EXEC"].bits, shown
        if form.out != "none":
            mask = (1 << (64 if form.out in WIDE else 32)) - 1
            assert wave.pair(10) & mask == after["D0"].bits & mask, shown


@pytest.mark.parametrize("opcode", list(scalar.Condition.__members__))
def test_branches_go_where_their_pseudo_code_says(opcode):
    for vcc in (0, 1 << 40):
        for execution in (0, 1):
            for condition in (0, 1):
                wave = Machine().wave
                wave.set_exec(execution)
                wave.s[SCC], wave.s[106:108] = condition, [0, vcc >> 32]
                goes = build_step(instruction(f"{opcode} there"), {"there": 7})(wave)
                after = DOCUMENT.run(opcode, {
                    "PC": Value(0, 64), "SIMM16": Value(5, 16, "i"), "SCC": Value(condition, 1),
                    "EXECZ": Value(int(not execution), 1), "VCCZ": Value(int(not vcc), 1),
                })  # fmt: skip
                assert (goes == 7) == (after["PC"].bits == 24)
                assert goes in (7, None)


# -- between lanes, and memory --------------------------------------------------------------------

ON = (0, 3, 17, 63)
BETWEEN_LANES = [
    "v_readfirstlane_b32 s10, v1", "v_readlane_b32 s10, v1, s0", "v_writelane_b32 v0, s1, s0",
    "v_permlane16_swap_b32 v0, v1", "v_permlane32_swap_b32 v0, v1",
    "ds_bpermute_b32 v0, v2, v1 offset:8", "ds_permute_b32 v0, v2, v1 offset:8",
]  # fmt: skip


def set_lanes(wave: Wave, lanes: tuple[int, ...] = ON) -> Value:
    wave.set_exec(sum(1 << lane for lane in lanes))
    return Value(wave.exec, 64)


def _exchanges() -> Iterator[tuple[str, tuple[int, ...]]]:
    """What is on. Where lanes are off the executor refuses swaps: the document does not say."""
    for text in BETWEEN_LANES:
        yield text, tuple(range(64))
        if "swap" not in text:
            yield text, ON
            yield text, ()


@pytest.mark.parametrize(("text", "lanes"), list(_exchanges()))
def test_exchanges_between_lanes(text, lanes):
    rng, machine = Random(text), Machine()
    wave = machine.wave
    rows = [[rng.getrandbits(32) for _ in range(64)] for _ in range(3)]
    for row, values in enumerate(rows):
        machine.set(row, values)
    wave.s[:2] = 37 + 64, 0xCAFE
    registers = {
        "VGPR": {lane: {row: Value(rows[row][lane], 32) for row in range(3)} for lane in range(64)},
        "SRC0": Value(1, 32), "VDST": Value(0, 32), "ADDR": Value(2, 32), "DATA0": Value(1, 32),
        "OFFSET": Value(8, 16), "EXEC": set_lanes(wave, lanes), "tmp": {}, "D0": Value(0, 64),
        "S0": Value(0xCAFE, 32), "S1": Value(37 + 64, 32),
    }  # fmt: skip
    machine.run(text, "s_waitcnt lgkmcnt(0)")
    after = DOCUMENT.run(text.split()[0], registers)
    for row in range(3):
        assert machine.get(row).tolist() == [after["VGPR"][lane][row].bits for lane in range(64)]
    if " s10" in text:
        assert wave.s[10] == after["D0"].bits


#: part of a name -> registers of its data
WORDS_OF = {"b64": 2, "b96": 3, "b128": 4, "x2": 2, "x3": 3, "x4": 4}


class Bytes(dict[int, Value]):
    """Memory as the document sees it: what lies at an address, read with any type."""

    def __init__(self, contents: bytes) -> None:
        self.contents = bytearray(contents)

    def __getitem__(self, at: int) -> Value:
        return Value(int.from_bytes(self.contents[at : at + 8], "little"), 64)

    def get(self, at: int, default: Any = None) -> Value:
        return self[at]

    def __setitem__(self, at: int, value: Value) -> None:
        self.contents[at : at + 8] = value.bits.to_bytes(8, "little")


def memory_forms() -> Iterator[str]:
    """Of all that the document has, the instructions that the executor knows."""
    names = [
        name
        for name in TEXTS
        if re.match("ds_(read|write)|(global|buffer)_(load|store|atomic)", name)
    ]
    for name in names:
        words = next((words for end, words in WORDS_OF.items() if end in name), 1)
        data, second = (
            f"v[{row}:{row + words - 1}]" if words > 1 else f"v{row}" for row in (20, 24)
        )
        if name.startswith("ds_"):
            offset = "offset0:1 offset1:3" if "read2" in name or "write2" in name else "offset:24"
            two = f"v[20:{20 + 2 * words - 1}]"
            yield {
                "read2": f"{name} {two}, v2 {offset}",
                "write2": f"{name} v2, {data}, {second} {offset}",
                "read": f"{name} {data}, v2 {offset}", "write": f"{name} v2, {data} {offset}",
            }[name.split("_")[1].removesuffix("st64")]  # fmt: skip
        elif name.startswith("buffer"):
            yield f"{name} {data}, v4, s[4:7], s8 offen offset:24"
            if "atomic" in name:
                yield f"{name} {data}, v4, s[4:7], s8 offen offset:24 sc0"
        elif "atomic" in name:
            yield f"{name} {data}, v[2:3], {second}, off offset:24 sc0"
            yield f"{name} v4, {second}, s[2:3] offset:-8"
        elif "load" in name:
            yield f"{name} {data}, v[2:3], off offset:24"
            yield f"{name} {data}, v4, s[2:3] offset:-8"
        else:
            yield f"{name} v[2:3], {data}, off offset:24"
            yield f"{name} v4, {data}, s[2:3] offset:-8"


def known(text: str) -> bool:
    try:
        build_step(instruction(text), {})
    except UnknownInstruction:
        return False
    return True


@pytest.mark.parametrize("text", [text for text in memory_forms() if known(text)])
def test_memory_instructions_do_what_their_pseudo_code_says(text):
    rng, machine = Random(text), Machine()
    wave, opcode = machine.wave, instruction(text).opcode
    start = rng.randbytes(16384)
    tensor = machine.memory.empty(16384, torch.uint8)
    tensor.copy_(torch.frombuffer(bytearray(start), dtype=torch.uint8))
    machine.view.gpu.begin_launch()
    wave.group.shared = SharedMemory(16384)
    every, words = np.arange(4096)[:, None] * 4, np.frombuffer(start, np.uint32)[:, None]
    wave.group.shared.store(every[:, 0], words)
    base = 0 if opcode.startswith("ds_") else tensor.data_ptr()
    wave.s[2:9] = [
        base & 0xFFFFFFFF, base >> 32, base & 0xFFFFFFFF, base >> 32, 16384, 0x27000, 16,
    ]  # fmt: skip
    rows = [[rng.getrandbits(32) for _ in range(64)] for _ in range(28)]
    for number, lane in enumerate(ON):
        place = 2048 * (number + 1)
        rows[2][lane], rows[3][lane] = base + place & 0xFFFFFFFF, base + place >> 32
        rows[4][lane] = place
    for row, values in enumerate(rows):
        machine.set(row, values)
    set_lanes(wave)
    machine.run(text, "s_waitcnt vmcnt(0) lgkmcnt(0)")
    given = instruction(text)
    memory = Bytes(start)
    taken = {
        "RETURN_DATA": 20,
        "VDATA": 20,
        "DATA": 24 if opcode.startswith("global_atomic") else 20,
        "DATA2": 24,
    }
    for number, lane in enumerate(ON):
        place = 2048 * (number + 1) + given.number("offset")
        address = Value(place + (16 if opcode.startswith("buffer") else 0), 64)
        registers: dict[str, Any] = {"MEM": memory, "ADDR": address, "VADDR": address}
        registers |= dict.fromkeys(("SADDR", "SRSRC", "SOFFSET", "OFFSET"), Value(0, 64))
        for name in ("OFFSET0", "OFFSET1"):
            registers[name] = Value(given.number(name.lower()), 64)
        for name, row in taken.items():
            bits = sum(rows[row + at][lane] << 32 * at for at in range(4))
            registers[name] = Value(bits, 128)
        after = DOCUMENT.run(opcode, registers)
        returned = after["VDATA" if "load" in opcode else "RETURN_DATA"]
        if "store" in opcode or "write" in opcode or ("atomic" in opcode and "sc0" not in text):
            returned = registers["VDATA"]
        found = sum(int(wave.registers[20 + at][lane]) << 32 * at for at in range(4))
        # where the document gives the whole register a value, it says nothing of the next ones
        assert found & (1 << returned.width) - 1 == returned.bits
    if opcode.startswith("ds_"):
        assert wave.group.shared.load(every[:, 0], 4).tobytes() == bytes(memory.contents)
    else:
        machine.run("buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)")
        assert bytes(tensor.numpy()) == bytes(memory.contents)


def test_every_instruction_has_a_test():
    tried = {form.opcode for form in (*_vector_forms(), *_scalar_forms())}
    tried |= {text.split()[0] for text in BETWEEN_LANES} | set(scalar.Condition.__members__)
    waits = {
        "s_waitcnt",
        "s_endpgm",
        "s_barrier",
        "s_getreg_b32",
        "s_setreg_imm32_b32",
    }  # in test_arithmetic.py, test_memory.py and in whole kernels
    without_effect = {"s_nop", "s_sleep", "s_setprio"}
    assert (vector.OPCODES | scalar.OPCODES) - tried == waits | without_effect
