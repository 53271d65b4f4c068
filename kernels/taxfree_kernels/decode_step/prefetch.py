"""Rows of weights on their way to the L2 cache before they are claimed, by a warp of its own.

While a layer waits for its attention, rings are full and memory would idle for longer than rings
last. So a warp of each program brings rows of the units after those that are claimed into the L2
cache, piece by piece at about the rate of memory: a longer queue would delay what all wait for.
Nobody waits for it, and what it brings, nobody writes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taxfree_kernels.decode_step.chunks import (
    CHUNK_BYTES,
    CLAIMED,
    OF_HEADS,
    OF_INTERMEDIATE,
    OF_KEYS,
    counts_of,
    first_slab,
    head_units,
    rows_of,
    rows_of_unit,
)
from taxfree_kernels.device.sync import cycles

_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def prefetch(
    origin, lines, positions, counters, layers, widest, finished,
    MODEL: gl.constexpr, WORK: gl.constexpr,
):  # fmt: skip
    """Bring this program's share of rows, until all units are claimed; the warp's whole life.

    Args:
        origin: of lines, int64, an address.
        finished: a barrier, behind which nobody polls the counters.
    """
    ROWS: gl.constexpr = rows_of_unit(MODEL.BATCH)
    PIECE: gl.constexpr = CHUNK_BYTES // ROWS  # of a row
    programs = gl.num_programs(0)
    counts = counts_of(positions, widest, MODEL, WORK)
    end = layers * counts.layer + head_units(MODEL.BATCH, MODEL.VOCAB) if WORK.PREFETCH else 0
    window = WORK.PREFETCH * programs * 8 // ROWS
    unit = gl.program_id(0)
    last = cycles("cuda")
    while unit < end:
        claimed = gl.load(counters + CLAIMED, volatile=True)
        if unit < claimed:
            unit += gl.cdiv(claimed - unit, programs) * programs
        elif unit < claimed + window:
            addresses, size = _rows_at(unit, layers, origin, lines, counts, MODEL, WORK)
            for begin in range(0, size, PIECE):
                rest = gl.minimum(size - begin, PIECE)
                bring(addresses + begin, gl.where(gl.arange(0, 32, _LANES) < ROWS, rest, 0))
                last = pause(last + WORK.PACE)
            unit += programs
        else:
            last = pause(last + WORK.PACE)
    mbarrier.arrive(finished, count=1)


@gluon.jit
def _rows_at(unit, layers, origin, lines, counts, MODEL: gl.constexpr, WORK: gl.constexpr):
    """Addresses of a unit's rows, one a lane, and how many bytes of each it reads.

    Rows are taken to follow each other; where they do not, others of the weight come.
    """
    ROWS: gl.constexpr = rows_of_unit(MODEL.BATCH)
    HALF: gl.constexpr = ROWS // 2
    WIDE: gl.constexpr = 2 * MODEL.INTERMEDIATE
    SLAB: gl.constexpr = 2048 if MODEL.BATCH == 1 else 1024
    OF_PART: gl.constexpr = SLAB * first_slab(MODEL.INTERMEDIATE, 1, WORK.DOWN_PARTS, MODEL.BATCH)
    rows, _, _ = rows_of(unit, layers, lines, counts, MODEL, WORK)
    pitch = gl.where(rows.kind == OF_HEADS, 2 * MODEL.HEADS * MODEL.HEAD_DIM, 2 * MODEL.HIDDEN)
    pitch = gl.where(rows.kind == OF_INTERMEDIATE, WIDE, pitch)
    begin = gl.minimum(rows.part * OF_PART, WIDE)
    size = gl.where(rows.kind == OF_INTERMEDIATE, gl.minimum(WIDE - begin, OF_PART), pitch)
    size = gl.where(rows.kind == OF_KEYS, 0, size)
    row = gl.arange(0, 32, _LANES)
    is_first = row < HALF
    line = gl.where(is_first, rows.line, rows.other)
    at = gl.where(is_first, rows.row, rows.other_row - HALF) + row
    address = origin + line * WORK.LINE + at.to(gl.int64) * pitch + begin
    return address, size


@gluon.jit
def bring(address, size):
    """Bring so many bytes into the L2 cache, if they are more than none."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.gt.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pause(until):
    """Wait until a cycle; returns the present one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        AGAIN:
        mov.u64 $0, %clock64;
        setp.ge.u64 p, $0, $1;
        @p bra DONE;
        nanosleep.u32 100;
        bra AGAIN;
        DONE:
        }""",
        "=&l,l", [until], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip
