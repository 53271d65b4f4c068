"""Operands that come from other lanes of the wave (data-parallel primitives, DPP)."""

from __future__ import annotations

from enum import IntEnum

from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.encoding import compiled
from taxfree_check.executed.errors import UnknownInstruction


class DppControl(IntEnum):
    """Which lane each one reads; 0 for its own. Rows have 16 lanes."""

    quad_perm = 1
    row_shl = 2
    row_shr = 3
    row_ror = 4
    wave_shl = 5
    wave_shr = 6
    wave_rol = 7
    wave_ror = 8
    row_mirror = 9
    row_half_mirror = 10
    row_newbcast = 11
    row_bcast = 12


@compiled
def lane_read(lanes: int, by: int, lane: int) -> int:
    """The lane that one reads, or -1.

    Args:
        lanes: see :class:`DppControl`.
        by: the control's number; of ``quad_perm``, 4 numbers of 2 bits.
        lane: which reads.
    """
    row, column = lane & ~15, lane & 15
    if lanes == DppControl.quad_perm:
        return lane & ~3 | by >> 2 * (lane & 3) & 3
    if lanes == DppControl.row_shl:
        return lane + by if column + by < 16 else -1
    if lanes == DppControl.row_shr:
        return lane - by if by <= column else -1
    if lanes == DppControl.row_ror:
        return row | column - by & 15
    if lanes == DppControl.wave_shl:
        return lane + 1 if lane < 63 else -1
    if lanes == DppControl.wave_shr:
        return lane - 1
    if lanes == DppControl.wave_rol:
        return lane + 1 & 63
    if lanes == DppControl.wave_ror:
        return lane - 1 & 63
    if lanes == DppControl.row_mirror:
        return row | 15 - column
    if lanes == DppControl.row_half_mirror:
        return lane & ~7 | 7 - (lane & 7)
    if lanes == DppControl.row_newbcast:
        return row | by
    if by == 15:  # the last lane of the row before
        return row - 1
    return 31 if lane >= 32 else -1


def fields(instruction: Instruction) -> dict[str, int]:
    """What an instruction's record says of lanes.

    A lane that reads none, or one that is off, gets 0 if ``bound_ctrl`` is set. Otherwise its
    destination keeps what it has, as it does in rows and banks that are masked off.

    Raises:
        UnknownInstruction: the control is unknown.
    """
    name = next((name for name in DppControl.__members__ if name in instruction.modifiers), None)
    if name is None:
        raise UnknownInstruction(f"unknown lanes of {instruction.text}")
    if name == "quad_perm":
        by = sum(lane << 2 * index for index, lane in enumerate(instruction.flags(name, [])))
    else:
        by = instruction.number(name)
    rows, banks = instruction.number("row_mask", 15), instruction.number("bank_mask", 15)
    on = sum((rows >> (lane >> 4) & banks >> (lane >> 2 & 3) & 1) << lane for lane in range(64))
    return {
        "lanes": DppControl[name],
        "by": by,
        "on": on - (on >> 63 << 64),
        "gives_zero": int(instruction.number("bound_ctrl") == 1),
    }
