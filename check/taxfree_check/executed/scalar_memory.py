"""Scalar loads."""

from __future__ import annotations

import numpy as np

from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.flight import InFlight
from taxfree_check.executed.operands import register, scalar_source
from taxfree_check.executed.wave import Step, Wave

_COUNTS = {
    "s_load_dword": 1, "s_load_dwordx2": 2, "s_load_dwordx4": 4,
    "s_load_dwordx8": 8, "s_load_dwordx16": 16,
}  # fmt: skip


def build(instruction: Instruction) -> Step:
    """Make the step of a scalar load.

    It reads through the L2, as does the scalar cache, which no instruction keeps coherent.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    count, target = _COUNTS.get(instruction.opcode), register(instruction.operands[0])
    if count is None or target is None:
        raise UnknownInstruction(f"unknown instruction {instruction.text}")
    base, moves = scalar_source(instruction.operands[1], 2), scalar_source(instruction.operands[2])
    fixed, first = instruction.number("offset"), target.row

    def step(wave: Wave) -> None:
        address = wave.scalar(base) + wave.scalar(moves) + fixed & ~3
        wave.s[first : first + count] = wave.timing.poison

        def effect() -> None:
            start = np.array([address], np.uint64)
            word = wave.view.memory.places(start, 4 * count)[0].item() // 4
            wave.s[first : first + count] = wave.view.levels[1].of[4][word : word + count]

        wave.timing.issue(
            wave.local_queue, InFlight(effect, rows=(first, first + count), is_scalar=True)
        )

    return step
