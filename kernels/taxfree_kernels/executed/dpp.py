"""Operands that come from other lanes of the wave (data-parallel primitives, DPP)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from taxfree_kernels.executed.decode import Instruction
from taxfree_kernels.executed.errors import UnknownInstruction
from taxfree_kernels.executed.lanes import LANES, Lanes
from taxfree_kernels.executed.operands import Source, source
from taxfree_kernels.executed.wave import Wave

_ROW, _IN_ROW = LANES & ~15, LANES & 15
_EVERY = np.ones(64, bool)

#: control -> the lane that each lane reads, and whether there is one
_CONTROLS: dict[str, Callable[[int], tuple[Lanes, Lanes]]] = {
    "row_shl": lambda by: (LANES + by, _IN_ROW + by < 16),
    "row_shr": lambda by: (LANES - by, by <= _IN_ROW),
    "row_ror": lambda by: (_ROW + (_IN_ROW - by & 15), _EVERY),
    "wave_shl": lambda by: (LANES + 1, LANES < 63),
    "wave_shr": lambda by: (LANES - 1, LANES > 0),
    "wave_rol": lambda by: (LANES + 1 & 63, _EVERY),
    "wave_ror": lambda by: (LANES - 1 & 63, _EVERY),
    "row_mirror": lambda by: (_ROW + 15 - _IN_ROW, _EVERY),
    "row_half_mirror": lambda by: ((LANES & ~7) + 7 - (LANES & 7), _EVERY),
    "row_newbcast": lambda by: (_ROW + by, _EVERY),
    "row_bcast": lambda by: (_ROW - 1, LANES >= 16) if by == 15 else (_EVERY * 31, LANES >= 32),
}


def lanes_read(given: Instruction) -> tuple[Lanes, Lanes]:
    """The lane that each lane reads, and whether there is one."""
    modifiers = given.modifiers
    if "quad_perm" in modifiers:
        order = np.array(given.flags("quad_perm", []))
        return (LANES & ~3) + order[LANES & 3], _EVERY
    for name, lanes in _CONTROLS.items():
        if name in modifiers:
            reads, exists = lanes(given.number(name))
            return np.clip(reads, 0, 63), exists
    raise UnknownInstruction(f"unknown lanes of {given.text}")


def dpp_source(given: Instruction, kind: str) -> tuple[Source, Callable[[Wave], Lanes]]:
    """The first source operand, and in which lanes the destination is written.

    A lane that reads none, or one that is off, gets 0 if ``bound_ctrl`` is set. Otherwise its
    destination keeps what it has, as it does in rows and banks that are masked off.
    """
    reads, exists = lanes_read(given)
    rows, banks = given.number("row_mask", 15), given.number("bank_mask", 15)
    is_on = (rows >> (LANES >> 4) & banks >> (LANES >> 2 & 3) & 1).astype(bool)
    gives_zero = given.number("bound_ctrl") == 1
    get = source(given.operands[1], kind)

    def first(wave: Wave) -> Lanes:
        value = get(wave)
        found = exists & wave.mask[reads]
        return np.where(found, value[reads], value.dtype.type(0))

    def writes(wave: Wave) -> Lanes:
        if gives_zero:
            return wave.mask & is_on
        return wave.mask & is_on & exists & wave.mask[reads]

    return first, writes
