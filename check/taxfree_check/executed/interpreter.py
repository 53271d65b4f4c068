"""The loop that executes a wave's instructions, compiled."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from taxfree_check.executed import scalar, vector
from taxfree_check.executed.arithmetic import Word, from_half
from taxfree_check.executed.dpp import lane_read
from taxfree_check.executed.encoding import (
    EXEC,
    INSTRUCTION,
    SCALARS,
    SCC,
    Form,
    Kind,
    Row,
    compiled,
)
from taxfree_check.executed.wave import AGAIN, Step, Wave

Words = Any  # uint32 [words]


@compiled
def _pair(words: Words, index: int) -> Word:
    """A scalar pair; `index` is the word of the first."""
    return np.int64(words[index]) | np.int64(words[index + 1]) << 32


@compiled
def _put_pair(words: Words, index: int, value: Word) -> None:
    words[index], words[index + 1] = value, value >> 32


@compiled
def _word(source: Any, words: Words, lane: int) -> Word:
    """What is where a source is, in one lane."""
    if source.kind == Kind.VECTOR:
        return np.int64(words[source.at + lane])
    if source.kind == Kind.VECTOR_PAIR:
        return np.int64(words[source.at + lane]) | np.int64(words[source.at + 64 + lane]) << 32
    if source.kind == Kind.SCALAR:
        return np.int64(words[source.at])
    if source.kind == Kind.SCALAR_PAIR:
        return _pair(words, source.at)
    return source.at


@compiled
def _fetch(source: Any, words: Words, lanes: Any) -> None:
    """Read a source in all lanes."""
    if source.kind == Kind.VECTOR:
        for lane in range(64):
            lanes[lane] = words[source.at + lane]
    elif source.kind == Kind.VECTOR_PAIR:
        for lane in range(64):
            lanes[lane] = _word(source, words, lane)
    else:
        lanes[:] = _word(source, words, 0)
    if source.shift or source.flip or source.mask != -1:
        for lane in range(64):
            lanes[lane] = (lanes[lane] >> source.shift & source.mask) ^ source.flip
    if source.is_half:
        for lane in range(64):
            lanes[lane] = from_half(lanes[lane])


@compiled
def _move(row: Row, lanes_on: Word, lanes: Any, spare: Any) -> Word:
    """Give lanes what others have (DPP); returns those that get nothing, which have 0."""
    spare[:] = lanes
    without = 0
    for lane in range(64):
        reads = lane_read(row.lanes, row.by, lane)
        if reads >= 0 and lanes_on >> reads & 1:
            lanes[lane] = spare[reads]
        else:
            lanes[lane] = 0
            without |= 1 << lane
    return without


@compiled
def _vector(row: Row, words: Words, scratch: Any) -> None:
    lanes_on = _pair(words, SCALARS + EXEC)
    writes, bits = lanes_on & row.on, 0
    a, b, c, d = scratch[0], scratch[1], scratch[2], scratch[3]
    for number in range(row.count):
        part, results = row.parts[number], scratch[4 + number]
        _fetch(part.sources[0], words, a)
        _fetch(part.sources[1], words, b)
        _fetch(part.sources[2], words, c)
        _fetch(part.sources[3], words, d)
        if row.lanes:
            without = _move(row, lanes_on, a, scratch[5])
            if not row.gives_zero:
                writes &= ~without
        if part.out >= 0:
            for lane in range(64):
                if writes >> lane & 1:
                    results[lane] = vector.value(
                        row.operation, a[lane], b[lane], c[lane], d[lane], lane
                    )
        if part.bits >= 0:
            for lane in range(64):
                if writes >> lane & 1 and vector.flag(
                    row.operation, a[lane], b[lane], c[lane], d[lane], lane
                ):
                    bits |= 1 << lane
    for number in range(row.count):  # all has been read
        part, results = row.parts[number], scratch[4 + number]
        if part.bits >= 0:
            _put_pair(words, part.bits, bits)
        if part.out < 0:
            continue
        for lane in range(64):
            if writes >> lane & 1:
                value = (results[lane] & part.mask) << part.shift
                words[part.out + lane] = value
                if part.is_wide:
                    words[part.out + 64 + lane] = value >> 32


@compiled
def _lane(row: Row, words: Words) -> None:
    part, o = row.parts[0], vector.Operation
    lane = _word(part.sources[1], words, 0) & 63
    if row.operation == o.v_readfirstlane_b32:
        lanes_on, lane = _pair(words, SCALARS + EXEC), 0
        while lanes_on and not lanes_on >> lane & 1:
            lane += 1
    if row.operation == o.v_writelane_b32:
        words[part.out + lane] = _word(part.sources[0], words, 0)
    else:
        words[part.out] = _word(part.sources[0], words, lane)


@compiled
def _scalar(row: Row, words: Words) -> None:
    part = row.parts[0]
    a, b = _word(part.sources[0], words, 0), _word(part.sources[1], words, 0)
    c, before = _word(part.sources[2], words, 0), np.int64(words[SCALARS + SCC])
    value, scc = scalar.result(row.operation, a, b, c, before, 64 if part.is_wide else 32)
    words[SCALARS + SCC] = scc
    if row.form == Form.SAVE_EXEC:
        _put_pair(words, part.out, _pair(words, SCALARS + EXEC))
        _put_pair(words, SCALARS + EXEC, value)
    elif part.is_wide:
        _put_pair(words, part.out, value)
    elif part.out >= 0:
        words[part.out] = value


def _interpreter(version: int) -> Any:
    @compiled(cache=True)
    def execute(
        rows: Any, words: Words, hits: Any, index: int, budget: int, memory: int, shared: int
    ) -> tuple[int, int]:
        """Execute instructions until one comes that Python executes, or a wait that may last.

        Args:
            rows: the instructions.
            words: the state of the wave; changes.
            hits: for each instruction, whether it was executed; changes.
            index: the index of the first one.
            budget: how many at most.
            memory, shared: operations on them in flight.

        Returns:
            the index of the next instruction, and what is left of the budget.
        """
        assert version, "what the function refers to is part of the key of its cache"
        scratch = np.empty((6, 64), np.int64)
        while budget:
            row = rows[index]
            form = row.form
            if form == Form.PYTHON:
                break
            if form == Form.WAIT and (memory > row.vector or shared > row.local):
                break
            hits[index] = 1
            index += 1
            budget -= 1
            if form == Form.VECTOR:
                _vector(row, words, scratch)
            elif form == Form.SCALAR or form == Form.SAVE_EXEC:
                _scalar(row, words)
            elif form == Form.LANE:
                _lane(row, words)
            elif form == Form.BRANCH and scalar.goes(row.operation, words):
                index = row.target
        return index, budget

    return execute


def _version() -> int:
    """A hash of all that is compiled: Numba's cache notices only changes of this file."""
    folder = Path(__file__).parent
    names = ("arithmetic", "dpp", "encoding", "scalar", "vector")
    sources = b"".join((folder / f"{name}.py").read_bytes() for name in names)
    return 1 + zlib.crc32(sources)


execute = _interpreter(_version())


def alone(row: Row) -> Step:
    """The function that executes one instruction."""
    rows, hits = np.zeros(2, INSTRUCTION), np.zeros(2, np.uint8)
    rows[0] = row

    def step(wave: Wave) -> int | None:
        # counted from the end, so that what a branch goes to is told from the next one
        index, _ = execute(rows, wave.words, hits, -2, 1, 0, 0)
        return index if index >= 0 else None

    return step


def run(wave: Wave, budget: int) -> int:
    """Let a wave execute up to `budget` instructions; returns what stopped it, or 0."""
    program, index, left = wave.program, wave.pc, budget
    rows, steps, hits = program.rows, program.steps, program.hits
    seen = np.frombuffer(hits, np.uint8)
    try:
        while left:
            step = steps[index]
            if step is None:
                pending = len(wave.vector_queue), len(wave.local_queue)
                index, left = execute(rows, wave.words, seen, index, left, *pending)
                continue
            hits[index] = 1
            left -= 1
            goes_to = step(wave)
            if goes_to is None:
                index += 1
            elif goes_to >= 0:
                index = goes_to
            else:
                index += goes_to > AGAIN
                return goes_to
    finally:
        wave.pc = index
        wave.executed += budget - left
    return 0
