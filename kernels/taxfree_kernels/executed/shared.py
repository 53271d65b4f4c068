"""LDS, the memory that a workgroup shares, and the instructions on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from taxfree_kernels.executed.decode import Instruction
from taxfree_kernels.executed.errors import BadAccess, UnknownInstruction
from taxfree_kernels.executed.flight import InFlight
from taxfree_kernels.executed.operands import row_of, source
from taxfree_kernels.executed.wave import LANES, POISON, Lanes, Step, Wave

_NAME = re.compile(r"ds_(read|write)(2?)(st64)?_[bu](8|16|32|64|96|128)(_d16_hi)?")


class Shared:
    """The LDS of a workgroup; undefined until it is written.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._words = np.full(size // 4 + 1, POISON, np.uint32)
        self._of: dict[int, Lanes] = {
            1: self._words.view(np.uint8),
            2: self._words.view(np.uint16),
            4: self._words,
        }

    def _check(self, places: Lanes, size: int) -> None:
        if places.size and int(places.max()) + size > self.size:
            raise BadAccess(f"access of {size} bytes at {int(places.max())} of {self.size} of LDS")
        if places.size and (places & (min(size, 4) - 1)).any():
            raise BadAccess(f"an access of {size} bytes to LDS is not aligned")

    def load(self, places: Lanes, size: int) -> Lanes:
        """uint32 [lane, words] of `size` bytes each."""
        self._check(places, size)
        if size < 4:
            return self._of[size][places // size].astype(np.uint32)[:, None]
        return self._words[(places >> 2)[:, None] + np.arange(size // 4)]

    def store(self, places: Lanes, values: Lanes) -> None:
        """Values [lane, elements] of uint32, or of fewer bytes."""
        size = values.itemsize
        self._check(places, size * values.shape[1])
        self._of[size][(places // size)[:, None] + np.arange(values.shape[1])] = values


def build(given: Instruction) -> Step:
    """Make the step of an instruction on LDS.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    if given.opcode in ("ds_bpermute_b32", "ds_permute_b32"):
        return _permute(given)
    if given.opcode == "ds_read_b64_tr_b16":
        return _read_transposed(given)
    found = _NAME.fullmatch(given.opcode)
    if found is None or not {"offset", "offset0", "offset1"}.issuperset(given.modifiers):
        raise UnknownInstruction(f"unknown instruction {given.text}")
    size = int(found[4]) // 8
    if found[2]:
        unit = size * (64 if found[3] else 1)
        offsets = [unit * given.number("offset0"), unit * given.number("offset1")]
    else:
        offsets = [given.number("offset")]
    if found[1] == "read":
        if found[5]:
            raise UnknownInstruction(f"unknown instruction {given.text}")
        return _read(given, size, offsets)
    return _write(given, size, offsets, upper=bool(found[5]))


def _issue(wave: Wave, effect: Callable[[], Any]) -> None:
    wave.timing.issue(wave.local_queue, InFlight(effect))


def _read(given: Instruction, size: int, offsets: list[int]) -> Step:
    row, base = row_of(given.operands[0]), source(given.operands[1], "u32")
    words = max(size // 4, 1)

    def step(wave: Wave) -> None:
        is_on, shared = wave.mask, wave.group.shared
        places = base(wave)[is_on].astype(np.int64)
        wave.poison(row, words * len(offsets))

        def effect() -> None:
            to = row
            for offset in offsets:
                loaded = shared.load(places + offset, size)
                for number in range(words):
                    wave.u[to][is_on] = loaded[:, number]
                    to += 1

        _issue(wave, effect)

    return step


def _write(given: Instruction, size: int, offsets: list[int], *, upper: bool) -> Step:
    base, rows = source(given.operands[0], "u32"), [row_of(text) for text in given.operands[1:]]
    words, shift = max(size // 4, 1), np.uint32(16 if upper else 0)

    def step(wave: Wave) -> None:
        is_on, shared = wave.mask, wave.group.shared
        places = base(wave)[is_on].astype(np.int64)
        taken = [wave.registers[row : row + words, is_on].T >> shift for row in rows]
        values = [each.astype(f"u{min(size, 4)}") for each in taken]

        def effect() -> None:
            for offset, value in zip(offsets, values, strict=True):
                shared.store(places + offset, value)

        _issue(wave, effect)

    return step


def _permute(given: Instruction) -> Step:
    """Exchange between lanes: pull from (``bpermute``) or push to the lane of a byte address."""
    row, fixed = row_of(given.operands[0]), np.uint32(given.number("offset"))
    address, value = (source(text, "u32") for text in given.operands[1:])
    pulls = given.opcode == "ds_bpermute_b32"

    def step(wave: Wave) -> None:
        is_on = wave.mask
        lanes = (address(wave) + fixed >> np.uint32(2) & np.uint32(63)).astype(np.intp)
        lanes, values = np.broadcast_to(lanes, 64), np.broadcast_to(value(wave), 64)
        result = np.zeros(64, np.uint32)
        if pulls:
            result = np.where(is_on[lanes], values[lanes], result)
        else:
            result[lanes[is_on]] = values[is_on]
        wave.poison(row, 1)
        _issue(wave, lambda: np.copyto(wave.u[row], result, where=is_on))

    return step


def _read_transposed(given: Instruction) -> Step:
    """Transpose 4 x 16 halves: 16 lanes read them by rows, and each receives a column."""
    row, base = row_of(given.operands[0]), source(given.operands[1], "u32")
    fixed = given.number("offset")
    lane, number = LANES[:, None], np.arange(4)
    giver = (lane & ~15) + 4 * number + (lane & 15) // 4

    def step(wave: Wave) -> None:
        if not wave.is_full:
            raise UnknownInstruction(f"{given.opcode} with lanes off")
        shared, places = wave.group.shared, base(wave).astype(np.int64) + fixed
        wave.poison(row, 2)

        def effect() -> None:
            halves = shared.load(places, 8).view(np.uint16)  # lane, 4
            words = np.ascontiguousarray(halves[giver, lane % 4]).view(np.uint32)
            wave.u[row][:], wave.u[row + 1][:] = words[:, 0], words[:, 1]

        _issue(wave, effect)

    return step
