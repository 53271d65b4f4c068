"""Loads, stores and atomics of vectors: global and buffer addresses."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from taxfree_check.executed.caches import Scope, scope_of
from taxfree_check.executed.decode import Instruction
from taxfree_check.executed.encoding import M0
from taxfree_check.executed.errors import UnknownInstruction
from taxfree_check.executed.flight import InFlight
from taxfree_check.executed.lanes import LANES, Lanes
from taxfree_check.executed.operands import register, row_of, scalar_source
from taxfree_check.executed.wave import ASLEEP, Step, Wave

#: type -> bytes of an element, and how many
_SHAPES = {
    "dword": (4, 1), "dwordx2": (4, 2), "dwordx3": (4, 3), "dwordx4": (4, 4),
    "ushort": (2, 1), "sshort": (2, 1), "ubyte": (1, 1), "short": (2, 1), "byte": (1, 1),
}  # fmt: skip


def _float_sum(old: int, new: int) -> int:
    """The bits of a sum of float32."""
    terms = np.array([old, new], np.uint32).view(np.float32)
    return (terms[:1] + terms[1:]).view(np.uint32).item()


_ATOMICS: dict[str, Callable[[int, int], int]] = {
    "swap": lambda old, new: new,
    "add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "umax": max, "umin": min, "add_f32": _float_sum,
}  # fmt: skip

_NAME = re.compile(r"(global|buffer)_(load|store)_(lds_)?([a-z]+(?:x\d)?)(_d16_hi)?")
_ATOMIC = re.compile(r"(?:global|buffer)_atomic_([a-z]+(?:_f32)?)(_x2)?")
_KNOWN = {"offset", "offen", "sc0", "sc1", "nt", "lds"}

#: wave -> addresses of the lanes that touch memory, and which lanes these are; None for all
Addresses = Callable[[Wave], tuple[Lanes, Lanes | None]]


def build(instruction: Instruction) -> Step:
    """Make the step of a vector memory instruction.

    Raises:
        UnknownInstruction: it is not among those that this module knows.
    """
    if instruction.opcode in ("buffer_inv", "buffer_wbl2"):
        return _cache_control(instruction)
    if not _KNOWN.issuperset(instruction.modifiers):
        raise UnknownInstruction(f"unknown modifier of {instruction.text}")
    if match := _ATOMIC.fullmatch(instruction.opcode):
        if match[1] in _ATOMICS:
            return _atomic(instruction, _ATOMICS[match[1]], 8 if match[2] else 4)
    elif (match := _NAME.fullmatch(instruction.opcode)) and match[4] in _SHAPES:
        size, count = _SHAPES[match[4]]
        if match[3] or "lds" in instruction.modifiers:
            return _load_into_shared(instruction, size * count)
        if match[2] == "load" and not match[5]:
            return _load(instruction, size, count, is_signed=match[4] == "sshort")
        if match[2] == "store":
            return _store(instruction, size, count, upper=bool(match[5]))
    raise UnknownInstruction(f"unknown instruction {instruction.text}")


def _cache_control(instruction: Instruction) -> Step:
    scope = scope_of(instruction.modifiers)
    if instruction.opcode == "buffer_inv":

        def invalidate(wave: Wave) -> None:
            wave.view.invalidate(scope)
            wave.vector_queue.append(_done())

        return invalidate

    def write_back(wave: Wave) -> None:
        view = wave.view
        operation = InFlight(lambda: view.write_back(scope), (0, 0), is_last=True)
        wave.timing.issue(wave.vector_queue, operation)

    return write_back


def _done() -> InFlight:
    operation = InFlight(lambda: None)
    operation.is_done = True
    return operation


def touched(instruction: Instruction) -> Callable[[Wave], Lanes]:
    """Wave -> the words of memory that an instruction touches, by number."""
    if match := _ATOMIC.fullmatch(instruction.opcode):
        index, size = _atomic_address(instruction), 8 if match[2] else 4
    else:
        match = _NAME.fullmatch(instruction.opcode)
        assert match is not None
        to_shared = match[3] or "lds" in instruction.modifiers
        index = 0 if to_shared or instruction.opcode.startswith("global_store") else 1
        element, count = _SHAPES[match[4]]
        size = element * count
    addresses, first = _addresses(instruction, index, size), np.arange(0, size, 4)
    return lambda wave: (
        (wave.view.memory.places(addresses(wave)[0], size)[0][:, None] + first).ravel() >> 2
    )


# -- addresses ------------------------------------------------------------------------------------


def _addresses(instruction: Instruction, index: int, size: int) -> Addresses:
    """From the operands that begin at number `index`; `size` bytes are accessed."""
    if instruction.opcode.startswith("buffer"):
        return _buffer_addresses(instruction, index, size)
    vector, base = instruction.operands[index], instruction.operands[-1]
    offset = instruction.number("offset")
    if base == "off":
        low, fixed = row_of(vector), np.uint64(offset & (1 << 64) - 1)

        def wide(wave: Wave) -> Lanes:
            high = np.left_shift(wave.registers[low + 1], 32, dtype=np.uint64)
            return wave.registers[low] + high + fixed

        return lambda wave: _of_lanes_on(wave, wide(wave))
    row, scalar = row_of(vector), scalar_source(base, 2)
    return lambda wave: _of_lanes_on(
        wave, wave.registers[row] + np.uint64(wave.scalar(scalar) + offset)
    )


def _of_lanes_on(wave: Wave, every: Lanes) -> tuple[Lanes, Lanes | None]:
    return (every, None) if wave.is_full else (every[wave.mask], wave.mask)


def _buffer_addresses(instruction: Instruction, index: int, size: int) -> Addresses:
    """Offsets into a buffer: what lies beyond its end is read as 0, and not written."""
    texts = instruction.operands[index:]
    moves = row_of(texts[0]) if "offen" in instruction.modifiers else None
    resource, scalar = register(texts[-2]), scalar_source(texts[-1])
    if resource is None or resource.is_vector or resource.words != 4:
        raise UnknownInstruction(f"unknown form of {instruction.text}")
    first, fixed = resource.row, instruction.number("offset")

    def addresses(wave: Wave) -> tuple[Lanes, Lanes | None]:
        low, high, records = wave.s[first : first + 3].tolist()
        if high >> 16 & 0x3FFF:
            raise UnknownInstruction("buffers of structures")
        offset = np.full(64, fixed + wave.scalar(scalar), np.uint64)
        if moves is not None:
            offset += wave.registers[moves]
        every = offset + np.uint64(low | (high & 0xFFFF) << 32)
        is_inside = wave.mask & (offset + np.uint64(size) <= np.uint64(records))
        return (every, None) if is_inside.all() else (every[is_inside], is_inside)

    return addresses


# -- accesses -------------------------------------------------------------------------------------


def _gather(wave: Wave, places: Lanes, size: int, count: int, scope: Scope) -> Lanes:
    """Elements [lane, count]."""
    if size > 1 and np.bitwise_or.reduce(places) & (size - 1):
        apart = (places[:, None] + np.arange(size * count)).ravel()
        loaded = wave.view.load(apart, 1, scope).reshape(len(places), -1)
        return np.ascontiguousarray(loaded).view(f"u{size}")
    if count > 1:
        places = (places[:, None] + np.arange(0, size * count, size)).ravel()
    return wave.view.load(places, size, scope).reshape(-1, count)


def _scatter(wave: Wave, places: Lanes, values: Lanes, scope: Scope) -> None:
    """Store elements [lane, count]."""
    size, count = values.itemsize, values.shape[1]
    if size > 1 and np.bitwise_or.reduce(places) & (size - 1):
        values = np.ascontiguousarray(values).view(np.uint8)
        size, count = 1, size * count
    if count > 1:
        places = (places[:, None] + np.arange(0, size * count, size)).ravel()
    wave.view.store(places, size, values.ravel(), scope)


def _spread(loaded: Lanes, inside: Lanes | None) -> Lanes:
    """Words of some lanes [lane, count] as [count, 64]; 0 in others."""
    if inside is None:
        return loaded.T
    every = np.zeros((loaded.shape[1], 64), np.uint32)
    every[:, inside] = loaded.T
    return every


def _taken(wave: Wave, row: int, count: int, inside: Lanes | None) -> Lanes:
    """Words of the lanes that store them [lane, count]."""
    words = wave.registers[row : row + count]
    return words.T if inside is None else words[:, inside].T


def _load(instruction: Instruction, size: int, count: int, *, is_signed: bool) -> Step:
    row, scope = row_of(instruction.operands[0]), scope_of(instruction.modifiers)
    addresses = _addresses(instruction, 1, size * count)

    def step(wave: Wave) -> int | None:
        lane_addresses, inside = addresses(wave)
        is_on = wave.mask
        places, span = wave.view.memory.places(lane_addresses, size * count)
        if scope and wave.polls_in_vain(step, places):
            return ASLEEP
        wave.poison(row, count)

        def effect() -> None:
            loaded: Any = _gather(wave, places, size, count, scope)
            if is_signed:
                loaded = loaded.view(np.int16).astype(np.int32).view(np.uint32)
            np.copyto(wave.registers[row : row + count], _spread(loaded, inside), where=is_on)

        wave.timing.issue(wave.vector_queue, InFlight(effect, span, (row, row + count)))
        return None

    return step


def _store(instruction: Instruction, size: int, count: int, *, upper: bool) -> Step:
    is_buffer = instruction.opcode.startswith("buffer")
    row, scope = (
        row_of(instruction.operands[0 if is_buffer else 1]),
        scope_of(instruction.modifiers),
    )
    addresses = _addresses(instruction, 1 if is_buffer else 0, size * count)
    shift = np.uint32(16 if upper else 0)

    def step(wave: Wave) -> None:
        lane_addresses, inside = addresses(wave)
        places, span = wave.view.memory.places(lane_addresses, size * count)
        words = _taken(wave, row, count, inside)
        values = (words >> shift if upper else words).astype(f"u{size}", "C")

        def effect() -> None:
            _scatter(wave, places, values, scope)

        wave.timing.issue(wave.vector_queue, InFlight(effect, span))

    return step


def _atomic_address(instruction: Instruction) -> int:
    """Which operand of an atomic is the address: a buffer's result takes the place of its value."""
    return int(instruction.opcode.startswith("buffer") or "sc0" in instruction.modifiers)


def _atomic(instruction: Instruction, function: Callable[[int, int], int], size: int) -> Step:
    returns = "sc0" in instruction.modifiers
    scope = Scope.SYSTEM if "sc1" in instruction.modifiers else Scope.AGENT
    first, is_buffer = _atomic_address(instruction), instruction.opcode.startswith("buffer")
    row = row_of(instruction.operands[0]) if returns else 0
    value_row = row_of(instruction.operands[0 if is_buffer else first + 1])
    addresses, words = _addresses(instruction, first, size), size // 4

    def step(wave: Wave) -> int | None:
        lane_addresses, inside = addresses(wave)
        places, span = wave.view.memory.places(lane_addresses, size)
        if returns and wave.polls_in_vain(step, places, by_atomics=True):
            return ASLEEP
        taken = _taken(wave, value_row, words, inside)
        operands = taken.copy("C").view(f"u{size}")[:, 0]
        if returns:
            wave.poison(row, words)

        def effect() -> None:
            before = wave.view.update(places, size, operands, function, scope)
            if returns:
                halves = before.view(np.uint32).reshape(-1, words)
                wave.registers[row : row + words, slice(None) if inside is None else inside] = (
                    halves.T
                )

        rows = (row, row + words) if returns else (0, 0)
        wave.timing.issue(wave.vector_queue, InFlight(effect, span, rows))
        return None

    return step


def _load_into_shared(instruction: Instruction, size: int) -> Step:
    """A load that goes to LDS, at M0, one lane behind the other."""
    scope, fixed = scope_of(instruction.modifiers), instruction.number("offset")
    addresses = _addresses(instruction, 0, size)
    words = size // 4

    def step(wave: Wave) -> None:
        lane_addresses, inside = addresses(wave)
        is_on = wave.mask
        places, span = wave.view.memory.places(lane_addresses, size)
        targets = (wave.s.item(M0) & 0xFFFF) + fixed + LANES * size

        def effect() -> None:
            lanes = _spread(_gather(wave, places, 4, words, scope), inside)
            wave.group.shared.store(targets[is_on], lanes.T[is_on])

        wave.timing.issue(wave.vector_queue, InFlight(effect, span))

    return step
