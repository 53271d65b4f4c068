"""Instructions on LDS."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.flight import InFlight
from taxfree_check.executed.lanes import LANES, Lanes
from taxfree_check.executed.operands import row_of
from taxfree_check.executed.wave import Step, Wave

_NAME = re.compile(r"ds_(read|write)(2?)(st64)?_[bu](8|16|32|64|96|128)(_d16_hi)?")


def build(instruction: Instruction) -> Step:
    """Make the step of an instruction on LDS.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    if instruction.opcode in ("ds_bpermute_b32", "ds_permute_b32"):
        return _permute(instruction)
    if instruction.opcode == "ds_swizzle_b32":
        return _swap(instruction)
    if instruction.opcode in ("ds_read_b64_tr_b16", "ds_read_b64_tr_b8"):
        return _read_transposed(instruction)
    match = _NAME.fullmatch(instruction.opcode)
    if match is None or not {"offset", "offset0", "offset1"}.issuperset(instruction.modifiers):
        raise UnknownInstruction(f"unknown instruction {instruction.text}")
    size, offsets = _pieces(instruction)
    if match[1] == "read":
        if match[5]:
            raise UnknownInstruction(f"unknown instruction {instruction.text}")
        return _read(instruction, size, offsets)
    return _write(instruction, size, offsets, upper=bool(match[5]))


def _pieces(instruction: Instruction) -> tuple[int, list[int]]:
    """Bytes of each access of a lane, and their offsets from its address."""
    match = _NAME.fullmatch(instruction.opcode)
    if match is None:  # transposed
        return 8, [instruction.number("offset")]
    size = int(match[4]) // 8
    if not match[2]:
        return size, [instruction.number("offset")]
    unit = size * (64 if match[3] else 1)
    return size, [unit * instruction.number("offset0"), unit * instruction.number("offset1")]


def touched(instruction: Instruction) -> Callable[[Wave], Lanes]:
    """Wave -> the words of LDS that a read or write touches, by number."""
    size, offsets = _pieces(instruction)
    base = row_of(instruction.operands[0 if "write" in instruction.opcode else 1])
    first = np.add.outer(offsets, np.arange(0, size, 4)).ravel()
    return lambda wave: (
        (wave.registers[base][_lanes_on(wave)].astype(np.int64)[:, None] + first).ravel() >> 2
    )


def _lanes_on(wave: Wave) -> Any:
    """An index of the lanes that are on; of all, one that costs nothing."""
    return slice(None) if wave.is_full else wave.mask


def _issue(wave: Wave, effect: Callable[[], Any], row: int = 0, count: int = 0) -> None:
    wave.timing.issue(wave.local_queue, InFlight(effect, rows=(row, row + count)))


def _read(instruction: Instruction, size: int, offsets: list[int]) -> Step:
    row, base = row_of(instruction.operands[0]), row_of(instruction.operands[1])
    words = max(size // 4, 1)

    def step(wave: Wave) -> None:
        is_on, shared = _lanes_on(wave), wave.group.shared
        places = wave.registers[base][is_on].astype(np.int64)
        wave.poison(row, words * len(offsets))

        def effect() -> None:
            for number, offset in enumerate(offsets):
                to = row + words * number
                wave.registers[to : to + words, is_on] = shared.load(places + offset, size)

        _issue(wave, effect, row, words * len(offsets))

    return step


def _write(instruction: Instruction, size: int, offsets: list[int], *, upper: bool) -> Step:
    base, rows = (
        row_of(instruction.operands[0]),
        [row_of(text) for text in instruction.operands[1:]],
    )
    words, shift = max(size // 4, 1), np.uint32(16 if upper else 0)

    def step(wave: Wave) -> None:
        is_on, shared = _lanes_on(wave), wave.group.shared
        places = wave.registers[base][is_on].astype(np.int64)
        taken = [wave.registers[row : row + words, is_on].T >> shift for row in rows]
        values = [words.astype(f"u{min(size, 4)}") for words in taken]

        def effect() -> None:
            for offset, value in zip(offsets, values, strict=True):
                shared.store(places + offset, value)

        _issue(wave, effect)

    return step


def _permute(instruction: Instruction) -> Step:
    """Exchange between lanes: pull from (``bpermute``) or push to the lane of a byte address."""
    row, fixed = row_of(instruction.operands[0]), np.uint32(instruction.number("offset"))
    address, value = (row_of(text) for text in instruction.operands[1:])
    pulls = instruction.opcode == "ds_bpermute_b32"

    def step(wave: Wave) -> None:
        is_on = wave.mask
        lanes = (wave.registers[address] + fixed >> np.uint32(2) & np.uint32(63)).astype(np.intp)
        values = wave.registers[value]
        result = np.zeros(64, np.uint32)
        if pulls:
            result = np.where(is_on[lanes], values[lanes], result)
        else:
            result[lanes[is_on]] = values[is_on]
        wave.poison(row, 1)
        _issue(wave, lambda: np.copyto(wave.registers[row], result, where=is_on), row, 1)

    return step


def _swap(instruction: Instruction) -> Step:
    """Exchange neighbouring groups of lanes."""
    match = re.fullmatch(r"swizzle\(SWAP,(\d+)\)", instruction.modifiers.get("offset", ""))
    if match is None:
        raise UnknownInstruction(f"unknown form of {instruction.text}")
    row, value = row_of(instruction.operands[0]), row_of(instruction.operands[1])
    partners = LANES ^ int(match[1])

    def step(wave: Wave) -> None:
        is_on, values = wave.mask, wave.registers[value]
        result = np.where(is_on[partners], values[partners], np.uint32(0))
        wave.poison(row, 1)
        _issue(wave, lambda: np.copyto(wave.registers[row], result, where=is_on), row, 1)

    return step


def _read_transposed(instruction: Instruction) -> Step:
    """Transpose 4 x 16 halves, or 8 x 16 bytes: 16 lanes read rows, and each receives a column."""
    row, base = row_of(instruction.operands[0]), row_of(instruction.operands[1])
    fixed = instruction.number("offset")
    element = np.uint8 if instruction.opcode.endswith("b8") else np.uint16
    count = 8 // element().itemsize  # of a lane
    lane, number = LANES[:, None], np.arange(count)
    giver = (lane & ~15) + 16 // count * number + (lane & 15) // count

    def step(wave: Wave) -> None:
        if not wave.is_full:
            raise UnknownInstruction(f"{instruction.opcode} with lanes off")
        shared, places = wave.group.shared, wave.registers[base].astype(np.int64) + fixed
        wave.poison(row, 2)

        def effect() -> None:
            elements = shared.load(places, 8).T.copy().view(element)  # lane, count
            words = np.ascontiguousarray(elements[giver, lane % count]).view(np.uint32)
            wave.registers[row][:], wave.registers[row + 1][:] = words[:, 0], words[:, 1]

        _issue(wave, effect, row, 2)

    return step
