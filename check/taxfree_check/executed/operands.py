"""Operands of instructions: from their text to what executes them.

A kind says how bits are read: "u32", "i32", "f32", "f16" (the low half), "u64", "i64" or "f64".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from taxfree_check.executed.encoding import (
    EXEC,
    INSTRUCTION,
    M0,
    SCALARS,
    VCC,
    Form,
    Kind,
    Row,
)
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.lanes import ALL, WORD

ACCUMULATORS = 256  # row of a0 among the vector registers

_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "m0": (M0, 1),
}  # fmt: skip
_REGISTER = re.compile(r"([sva])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_INVERSE_2PI = {"0.15915494", "0.15915494309189532"}
WIDE = ("u64", "i64", "f64")
_SIGN = {"f32": 1 << 31, "f16": 1 << 15}


class Register(NamedTuple):
    """A register operand: a row of vector registers, or a scalar register; and how many."""

    is_vector: bool
    row: int
    words: int

    @property
    def word(self) -> int:
        """Its word of a wave's state, of lane 0."""
        return 64 * self.row if self.is_vector else SCALARS + self.row


def register(text: str) -> Register | None:
    """The register that an operand names; None for a constant."""
    if text in _NAMED:
        return Register(False, *_NAMED[text])
    match = _REGISTER.fullmatch(text)
    if match is None:
        return None
    first = int(match[2] or match[3])
    last = int(match[4] or first)
    base = ACCUMULATORS if match[1] == "a" else 0
    if last >= (VCC if match[1] == "s" else ACCUMULATORS):
        raise UnknownInstruction(f"there is no register {text}")
    return Register(match[1] != "s", base + first, last - first + 1)


def row_of(text: str) -> int:
    """The row of a vector register, the first of several."""
    operand = register(text)
    if operand is None or not operand.is_vector:
        raise UnknownInstruction(f"{text} is no vector register")
    return operand.row


def scalar_of(text: str) -> int:
    """The number of a scalar register, the first of several."""
    operand = register(text)
    if operand is None or operand.is_vector:
        raise UnknownInstruction(f"{text} is no scalar register")
    return operand.row


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
    if kind in WIDE:
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


class Source(NamedTuple):
    """A source operand, as :data:`taxfree_check.executed.encoding.SOURCE` has it."""

    kind: Kind = Kind.CONSTANT
    at: int = 0
    shift: int = 0
    mask: int = -1
    flip: int = 0
    is_half: bool = False


def literal(value: int) -> Source:
    """A number of up to 64 bits."""
    value &= ALL
    return Source(at=value - (value >> 63 << 64))


def source(text: str, kind: str, part: tuple[int, int] | None = None, which: int = 0) -> Source:
    """A source of a vector instruction: 64 lanes, or one number for all.

    Args:
        part: bits to the right of those that are read, and a mask of these.
        which: of two words.
    """
    text, is_negated, is_positive = signs(text)
    shift, mask = part or (0, 0xFFFF if kind == "f16" else -1)
    if (is_negated or is_positive) and kind not in _SIGN:
        raise UnknownInstruction(f"{text} has a sign, but is no float")
    if is_positive:
        mask &= ~_SIGN[kind]
    flip = _SIGN[kind] if is_negated else 0
    operand = register(text)
    if operand is None:
        bits = constant(text, kind)
        index = literal(bits if kind in WIDE else bits & WORD).at
        return Source(Kind.CONSTANT, index, shift, mask, flip)
    kinds = (
        (Kind.VECTOR, Kind.VECTOR_PAIR) if operand.is_vector else (Kind.SCALAR, Kind.SCALAR_PAIR)
    )
    word = operand.word + which * (64 if operand.is_vector else 1)
    return Source(kinds[kind in WIDE], word, shift, mask, flip)


def scalar_source(text: str, words: int = 1) -> Source:
    """A source of a scalar instruction, an unsigned integer of 1 or 2 words."""
    if register(text) is None:
        return literal(constant(text, "u32") & (WORD if words == 1 else ALL))
    return Source(Kind.SCALAR if words == 1 else Kind.SCALAR_PAIR, SCALARS + scalar_of(text))


class OperandPart(NamedTuple):
    """A result and its sources, as :data:`taxfree_check.executed.encoding.PART` has them."""

    sources: Sequence[Source] = ()
    out: int = -1
    is_wide: bool = False
    mask: int = -1
    shift: int = 0
    bits: int = -1


def row(form: Form, operation: int = 0, *parts: OperandPart, **fields: int) -> Row:
    """An instruction as a record."""
    made: Any = np.zeros((), INSTRUCTION)
    made["form"], made["operation"], made["count"], made["on"] = form, operation, len(parts), -1
    for name, value in fields.items():
        made[name] = value
    for index, (sources, *rest) in enumerate(parts):
        filled = [*sources, *[literal(0)] * (4 - len(sources))]
        made["parts"][index] = (*rest, filled)
    return made
