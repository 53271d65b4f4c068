"""Matrix products (MFMA) of inputs in 16 bits or fp8, with float32 accumulators."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from taxfree_check.executed.arithmetic import from_fp8
from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.lanes import LANES, Lanes
from taxfree_check.executed.operands import constant, register, row_of
from taxfree_check.executed.wave import Step, Wave

_NAME = re.compile(r"v_mfma_f32_(16x16|32x32)x(\d+)_(b?f16|fp8_fp8|f8f6f4)")

#: all that this module knows; the deeper shapes of 16 bits are those of gfx950, and so is f8f6f4,
#: which multiplies fp8 where no modifier says otherwise
OPCODES = frozenset(
    f"v_mfma_f32_{shape}_{kind}"
    for shape, kinds in (
        *((shape, ("f16", "bf16")) for shape in ("16x16x16", "32x32x8")),
        *((shape, ("f16", "bf16", "fp8_fp8")) for shape in ("16x16x32", "32x32x16")),
        *((shape, ("f8f6f4",)) for shape in ("16x16x128", "32x32x64")),
    )
    for kind in kinds
)


class MatrixLayout(NamedTuple):
    """Where the elements of a product of square tiles are.

    Args:
        size: rows, and columns, of the result.
        depth: of the sum.
        per_lane: neighbours along the sum that a lane has of each input.
        rows: [registers, 64] the row of the result that a register of a lane holds. Its column is
            the lane's number modulo `size`.
    """

    size: int
    depth: int
    per_lane: int
    rows: Lanes


def layout(size: int, depth: int) -> MatrixLayout:
    """Blocks of 4 rows go round the groups of `size` lanes.

    The depths of a lane are neighbours here; in fp8 of gfx950 they are two halves. That is the same
    sum, as those of both inputs are.
    """
    groups = 64 // size
    registers = np.arange(size * size // 64)[:, None]
    rows = 4 * groups * (registers // 4) + 4 * (LANES // size) + registers % 4
    return MatrixLayout(size, depth, depth // groups, rows)


def build(instruction: Instruction) -> Step:
    """Make the step of a matrix instruction: which lanes are on does not matter to it.

    Raises:
        UnknownInstruction: of another shape or type.
    """
    match = _NAME.fullmatch(instruction.opcode)
    if match is None or instruction.opcode not in OPCODES or instruction.modifiers:
        raise UnknownInstruction(f"unknown instruction {instruction.text}")
    shape = layout(int(match[1][:2]), int(match[2]))
    floats_of = {"f16": _of_half, "bf16": _of_bfloat16}.get(match[3], _of_fp8(instruction.is_fnuz))
    per_word = 2 if "f16" in match[3] else 4
    out, first, second = (row_of(text) for text in instruction.operands[:3])
    addend = register(instruction.operands[3])
    initial = 0.0
    if addend is None:
        initial = float(np.uint32(constant(instruction.operands[3], "f32")).view(np.float32))
    count = len(shape.rows)
    columns = np.broadcast_to(LANES % shape.size, shape.rows.shape)

    def step(wave: Wave) -> None:
        a, b = (_tile(wave, row, shape, per_word, floats_of) for row in (first, second))
        result = (a @ b.T)[shape.rows, columns]
        floats = wave.registers.view(np.float32)
        if addend is None:
            floats[out : out + count] = result + np.float32(initial)
        else:
            floats[out : out + count] = result + floats[addend.row : addend.row + count]

    return step


def _of_half(words: Lanes) -> Lanes:
    return words.view(np.float16).astype(np.float32)


def _of_bfloat16(words: Lanes) -> Lanes:
    return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


@cache
def _of_fp8(is_fnuz: bool) -> Callable[[Lanes], Lanes]:
    codes = [from_fp8(code, is_fnuz) for code in range(1 << 8)]
    numbers = np.array(codes, np.uint32).view(np.float32)
    return lambda words: numbers[words.view(np.uint8)]


def _tile(
    wave: Wave, row: int, shape: MatrixLayout, per_word: int, floats_of: Callable[[Lanes], Lanes]
) -> Lanes:
    """An input: float32 [size, depth]."""
    words = wave.registers[row : row + shape.per_lane // per_word]
    values = floats_of(np.ascontiguousarray(words.T))  # lane, neighbour
    by_group = values.reshape(64 // shape.size, shape.size, shape.per_lane)
    return by_group.transpose(1, 0, 2).reshape(shape.size, shape.depth)
