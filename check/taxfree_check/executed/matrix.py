"""Matrix products (MFMA) of 16-bit inputs with float32 accumulators."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.lanes import LANES, Lanes
from taxfree_check.executed.operands import constant, register, row_of
from taxfree_check.executed.wave import Step, Wave

_NAME = re.compile(r"v_mfma_f32_(16x16|32x32)x(\d+)_(b?f16)")

#: all that this module knows; the deeper two shapes are those of gfx950
OPCODES = frozenset(
    f"v_mfma_f32_{shape}_{kind}"
    for shape in ("16x16x16", "32x32x8", "16x16x32", "32x32x16")
    for kind in ("f16", "bf16")
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
    """Blocks of 4 rows go round the groups of `size` lanes."""
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
    is_bfloat16 = match[3] == "bf16"
    out, first, second = (row_of(text) for text in instruction.operands[:3])
    addend = register(instruction.operands[3])
    initial = 0.0
    if addend is None:
        initial = float(np.uint32(constant(instruction.operands[3], "f32")).view(np.float32))
    count = len(shape.rows)
    columns = np.broadcast_to(LANES % shape.size, shape.rows.shape)

    def step(wave: Wave) -> None:
        a, b = (_tile(wave, row, shape, is_bfloat16) for row in (first, second))
        result = (a @ b.T)[shape.rows, columns]
        floats = wave.registers.view(np.float32)
        if addend is None:
            floats[out : out + count] = result + np.float32(initial)
        else:
            floats[out : out + count] = result + floats[addend.row : addend.row + count]

    return step


def _tile(wave: Wave, row: int, shape: MatrixLayout, is_bfloat16: bool) -> Lanes:
    """An input: float32 [size, depth]."""
    words = wave.registers[row : row + shape.per_lane // 2]
    halves = np.ascontiguousarray(words.T).view(np.uint16)  # lane, neighbour
    if is_bfloat16:
        values = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = halves.view(np.float16).astype(np.float32)
    by_group = values.reshape(64 // shape.size, shape.size, shape.per_lane)
    return by_group.transpose(1, 0, 2).reshape(shape.size, shape.depth)
