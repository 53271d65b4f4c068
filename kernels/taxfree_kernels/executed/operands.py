"""Operands as functions on a wave: made once for each instruction, called each time it runs.

A kind says how bits are read: "u32", "i32", "f32", "f16" (the low half), "u64" or "i64".
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from taxfree_kernels.executed.errors import UnknownInstruction
from taxfree_kernels.executed.lanes import ALL, WORD, Lanes
from taxfree_kernels.executed.wave import EXEC, M0, VCC, Wave

Source = Callable[[Wave], Any]
Destination = Callable[[Wave, Any], None]
ScalarSource = Callable[[Wave], int]
ScalarDestination = Callable[[Wave, int], None]

ACCUMULATORS = 256  # row of a0 among the vector registers

_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "m0": (M0, 1),
}  # fmt: skip
_REGISTER = re.compile(r"([sva])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_INVERSE_2PI = {"0.15915494", "0.15915494309189532"}
_DTYPES: dict[str, Any] = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "f16": np.float16, "u64": np.uint64, "i64": np.int64,
}  # fmt: skip


class Register(NamedTuple):
    """A register operand: a row of vector registers, or a scalar register; and how many."""

    is_vector: bool
    row: int
    words: int


def register(text: str) -> Register | None:
    """The register that an operand names; None for a constant."""
    if text in _NAMED:
        return Register(False, *_NAMED[text])
    found = _REGISTER.fullmatch(text)
    if found is None:
        return None
    first = int(found[2] or found[3])
    last = int(found[4] or first)
    base = ACCUMULATORS if found[1] == "a" else 0
    return Register(found[1] != "s", base + first, last - first + 1)


def row_of(text: str) -> int:
    """The row of a vector register, the first of several."""
    found = register(text)
    if found is None or not found.is_vector:
        raise UnknownInstruction(f"{text} is no vector register")
    return found.row


def bits_of_float(value: float) -> int:
    """A float32's bits."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def constant(text: str, kind: str) -> int:
    """The bits of an inline constant or a literal.

    Integers are bits, whatever the kind. Floats have the width of the operand.
    """
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return int(text, 0)
    try:
        value = float(text)
    except ValueError:
        raise UnknownInstruction(f"unknown operand {text}") from None
    if kind == "f16":
        return 0x3118 if text in _INVERSE_2PI else int(np.float16(value).view(np.uint16))
    if kind in ("u64", "i64"):
        return int(np.float64(value).view(np.uint64))
    return 0x3E22F983 if text in _INVERSE_2PI else bits_of_float(value)


def signs(text: str) -> tuple[str, bool, bool]:
    """An operand without its sign modifiers; whether it is negated, and made positive first."""
    is_negated = is_positive = False
    if text.startswith("neg("):
        text, is_negated = text[4:-1], True
    elif re.match(r"-[vsa|]", text):
        text, is_negated = text[1:], True
    if text.startswith("|"):
        text, is_positive = text[1:-1], True
    elif text.startswith("abs("):
        text, is_positive = text[4:-1], True
    return text, is_negated, is_positive


def source(text: str, kind: str) -> Source:
    """Read an operand of a vector instruction: 64 lanes, or one number for all."""
    text, is_negated, is_positive = signs(text)
    get = _plain(text, kind)
    if is_positive and is_negated:
        return lambda wave: -np.abs(get(wave))
    if is_positive:
        return lambda wave: np.abs(get(wave))
    if is_negated:
        return lambda wave: -get(wave)
    return get


def _plain(text: str, kind: str) -> Source:
    found = register(text)
    if found is None:
        return _constant_lanes(constant(text, kind), kind)
    at = found.row
    if found.is_vector:
        return _vector(at, kind)
    if kind in ("u64", "i64"):
        dtype = _DTYPES[kind]
        return lambda wave: np.uint64(wave.s[at] | wave.s[at + 1] << 32).view(dtype)
    if kind == "u32":
        return lambda wave: np.uint32(wave.s[at])
    if kind == "f16":
        return lambda wave: np.uint16(wave.s[at] & 0xFFFF).view(np.float16)
    dtype = _DTYPES[kind]
    return lambda wave: np.uint32(wave.s[at]).view(dtype)


def _constant_lanes(bits: int, kind: str) -> Source:
    if kind in ("u64", "i64"):
        raw: Any = np.uint64(bits & ALL)
    else:
        raw = np.uint16(bits & 0xFFFF) if kind == "f16" else np.uint32(bits & WORD)
    lanes = np.full(64, raw).view(_DTYPES[kind])
    lanes.flags.writeable = False
    return lambda wave: lanes


def _vector(row: int, kind: str) -> Source:
    if kind == "u32":
        return lambda wave: wave.u[row]
    if kind == "i32":
        return lambda wave: wave.i[row]
    if kind == "f32":
        return lambda wave: wave.f[row]
    if kind == "f16":
        return lambda wave: wave.u[row].astype(np.uint16).view(np.float16)
    dtype = _DTYPES[kind]

    def pair(wave: Wave) -> Lanes:
        both = np.empty((64, 2), np.uint32)
        both[:, 0], both[:, 1] = wave.u[row], wave.u[row + 1]
        lanes: Lanes = both.view(dtype)[:, 0]
        return lanes

    return pair


def destination(text: str, kind: str) -> Destination:
    """Write an operand of a vector instruction, in the lanes that are on."""
    row = row_of(text)
    if kind in ("u64", "i64"):

        def put_pair(wave: Wave, value: Any) -> None:
            both = np.empty(64, np.uint64)
            both[:] = value if kind == "u64" else value.view(np.uint64)
            wave.put(row, 2, both.view(np.uint32).reshape(64, 2).T)

        return put_pair
    if kind == "f16":  # clears the upper half of the register

        def put_half(wave: Wave, value: Any) -> None:
            np.copyto(wave.u[row], np.asarray(value).view(np.uint16), where=wave.mask)

        return put_half
    rows = operator.attrgetter({"u32": "u", "i32": "i", "f32": "f"}[kind])

    def put(wave: Wave, value: Any) -> None:
        if wave.is_full:
            rows(wave)[row][:] = value
        else:
            np.copyto(rows(wave)[row], value, where=wave.mask)

    return put


def scalar_source(text: str, words: int = 1) -> ScalarSource:
    """Read an operand of a scalar instruction, as an unsigned integer of 1 or 2 words."""
    found = register(text)
    if found is None:
        bits = constant(text, "u32") & (WORD if words == 1 else ALL)
        return lambda wave: bits
    if found.is_vector:
        raise UnknownInstruction(f"{text} is no scalar register")
    at = found.row
    if words == 1:
        return lambda wave: wave.s[at]
    return lambda wave: wave.s[at] | wave.s[at + 1] << 32


def scalar_destination(text: str, words: int = 1) -> ScalarDestination:
    """Write an operand of a scalar instruction: 1 or 2 words."""
    found = register(text)
    if found is None or found.is_vector:
        raise UnknownInstruction(f"{text} is no scalar register")
    at = found.row
    if at >= EXEC:
        return _exec(at, words)

    def put(wave: Wave, value: int) -> None:
        wave.s[at] = value & WORD

    def put_pair(wave: Wave, value: int) -> None:
        wave.s[at] = value & WORD
        wave.s[at + 1] = value >> 32 & WORD

    return put if words == 1 else put_pair


def _exec(at: int, words: int) -> ScalarDestination:
    def put(wave: Wave, value: int) -> None:
        wave.s[at] = value
        wave.set_exec(wave.s[EXEC] | wave.s[EXEC + 1] << 32)

    return put if words == 1 else lambda wave, value: wave.set_exec(value)
