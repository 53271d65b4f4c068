"""Sums of products over all ranks in the persistent step, as Lamport words.

Whoever has products of o or of down stores them, in float32, to the memory of every rank; each
program of each rank polls all of them, and adds them in the order of their sources: all ranks get
the same bits. A word shows its own arrival, so there is no barrier and no release.

Sums of a step take turns in three areas. Programs empty an area behind the barrier that follows
its last read, and count themselves in the next barrier before the second sum from there is sent. A
peer that sends the third has read all of the second, so the area is empty by then. What the last
sum leaves, the next call with Lamport words empties, as of every call (``fabric.heap.Pool``).

With several sequences one program alone reads a word, see ``rows``. It empties what it has read
before it counts itself in the barrier that follows. Programs of this rank send the next sum behind
that barrier, and a peer that has read all of it knows that the area is empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taxfree_kernels.decode_step.chunks import WARPS, rolled
from taxfree_kernels.device import packets
from taxfree_kernels.device.peers import (
    ABORT,
    EMPTY,
    LAMPORT_SLOT_BYTES,
    LIMIT,
    NO_CHANNEL,
    USED,
    translate,
)
from taxfree_kernels.device.specialized import reinterpreted
from taxfree_kernels.device.sync import abort

HEADER = gl.constexpr(256)  # words; of 8 ranks and 16 sequences

#: of columns of the residual: 16 bytes of words of a thread at a time
COLUMNS = gl.constexpr(gl.BlockedLayout([4], [32], [WARPS.value], [0]))
_ANY = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))
_EMPTIED = gl.constexpr(256)
#: of the largest logits, [sequence, rank]
BEST = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [WARPS.value, 1], [1, 0]))
OF_BEST = gl.constexpr(gl.SliceLayout(1, BEST))


class Inbox(NamedTuple):
    """Where sums arrive.

    Args:
        slot: int32, of the running turn: [rank, BATCH, 2] of the arg-max; from HEADER on areas
            [source, BATCH, HIDDEN].
        peers: of the fabric.
        failed: int32, one of the step's counters: a wait of this launch has exceeded its bound.
    """

    slot: Any
    peers: Any
    failed: Any


@gluon.constexpr_function
def sources_of(group, model):
    """A power of two, at least the sources of a sum."""
    return triton.next_power_of_2(group.WORLD * model.DOWN_PARTS)


# On the host, Triton 3.6 calls such functions with numbers alone.


@gluon.constexpr_function
def _area_words(world, parts, batch, hidden):
    return world * parts * batch * hidden


@gluon.constexpr_function
def width_of(hidden, sources):
    """Columns that are polled at a time: at most 64 words of a thread.

    And a slab at least, all of which products read: what lies behind short rows is zeros there.
    """
    return min(max(1024, triton.next_power_of_2(hidden)), 16384 // triton.next_power_of_2(sources))


def words_of(model: Any, parts: int, world: int) -> tuple[int, int]:
    """Words of a slot with so many parts of down, and those of them that the next call empties."""
    words = HEADER.value + 3 * _area_words(world, parts, model.BATCH, model.HIDDEN)
    # owners of columns of several sequences empty what they have read
    left = words if model.BATCH == 1 else HEADER.value
    # what is polled behind the last row is never sent
    return words + width_of(model.HIDDEN, world * parts), left


def most_parts(model: Any, world: int) -> int:
    """The most parts of down whose words fit a slot."""
    parts = 1
    while 4 * words_of(model, parts + 1, world)[0] <= LAMPORT_SLOT_BYTES:
        parts += 1
    return parts


@gluon.constexpr_function
def _blocks(hidden, sources):
    return -(-hidden // width_of(hidden, sources))


@gluon.constexpr_function
def _polled(sources):
    """The layout of words, [sources, columns]: a thread has all words that it adds."""
    return gl.BlockedLayout([sources, 4], [1, 32], [1, WARPS.value], [1, 0])


@gluon.jit
def area_of(inbox, number, MODEL: gl.constexpr, GROUP: gl.constexpr):
    """The area of a sum, by its number in the step."""
    size: gl.constexpr = _area_words(GROUP.WORLD, MODEL.DOWN_PARTS, MODEL.BATCH, MODEL.HIDDEN)
    return inbox.slot + HEADER + number % 3 * size


@gluon.jit
def targets_of(area, inbox, MODEL: gl.constexpr, GROUP: gl.constexpr):
    """Where this rank's products go, on each rank, its own last."""
    own = area + inbox.peers.rank * (MODEL.BATCH * MODEL.HIDDEN)
    targets = ()
    for step in gl.static_range(1, GROUP.WORLD + 1):
        targets = targets + (translate(own, inbox.peers, (inbox.peers.rank + step) % GROUP.WORLD),)
    return targets


@gluon.jit
def send(targets, at, products, mask, inbox, GROUP: gl.constexpr):
    """Send float32 products to offsets `at` on every rank."""
    words = products.to(gl.int32, bitcast=True)
    for step in gl.static_range(GROUP.WORLD):
        peer = (inbox.peers.rank + step + 1) % GROUP.WORLD
        packets.send(inbox.peers, targets[step] + at, words, peer, mask)


@gluon.constexpr_function
def _poll(pack):
    """PTX that polls so many words in a row until none of them is EMPTY; bounded."""
    own = [f"${each}" for each in range(pack)]
    moves = "".join(f"mov.b32 {to}, ${pack + each};" for each, to in enumerate(own))
    late = "".join(f"setp.eq.or.b32 p, {each}, -1, p;" for each in own)
    words, vector = (own[0], "") if pack == 1 else ("{" + ", ".join(own) + "}", f".v{pack}")
    address, limit, aborted, failed = (f"${each * pack}" for each in (2, 3, 4, 5))
    return f"""{{
        .reg .pred p, q;
        .reg .u64 n, m;
        {moves}
        mov.u64 n, 0;
        AGAIN:
        setp.ne.u64 p, n, n;
        {late}
        @!p bra DONE;
        ld.volatile.global{vector}.b32 {words}, [{address}];
        add.u64 n, n, 1;
        and.b64 m, n, 255;
        setp.ne.u64 q, m, 0;
        @q bra AGAIN;
        ld.relaxed.sys.global.u64 m, [{aborted}];
        setp.ne.u64 q, m, 0;
        @q bra DONE;
        ld.relaxed.gpu.global.u32 m, [{failed}];
        setp.ne.u64 q, m, 0;
        @q bra DONE;
        setp.lt.u64 q, n, {limit};
        @q bra AGAIN;
        st.relaxed.gpu.global.u32 [{failed}], 1;
        DONE:
        }}"""


@gluon.constexpr_function
def _poll_constraints(pack):
    return ",".join(["=&r"] * pack + ["r"] * pack + ["l"] * 4 * pack)


@gluon.jit
def receive(words, source, mask, inbox, PACK: gl.constexpr, GROUP: gl.constexpr):
    """Words that are not EMPTY, where `mask` is set; bounded.

    Each thread polls what it lacks, so many words in a row at a time: polls of all would take as
    much of the L2 cache's rate as the weights do.
    """
    peers = inbox.peers
    limit = gl.load(peers.control_ptr + LIMIT)
    aborted, failed = peers.control_ptr + ABORT, inbox.failed
    seen = gl.where(mask, gl.load(words, volatile=True), 0)
    seen = gl.inline_asm_elementwise(
        _poll(PACK), _poll_constraints(PACK),
        [seen, words.to(gl.int64), limit, aborted.to(gl.int64), failed.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=PACK,
    )  # fmt: skip
    is_late = seen == EMPTY
    of = gl.reshape(gl.where(is_late, source + 1, 0), [is_late.numel])
    late = gl.max(of, 0)
    if late > 0:
        abort(peers, NO_CHANNEL, late.to(gl.int64) - 1, peers.generation - 1, GROUP)
    return seen


# ---- the residual -------------------------------------------------------------------------------


@gluon.jit
def _sum_of_block(
    first, WIDTH: gl.constexpr, area, COUNT: gl.constexpr, inbox,
    MODEL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """float32 [WIDTH]: the sum of so many sources from a column on, once it has arrived."""
    HIDDEN: gl.constexpr = MODEL.HIDDEN
    POLLED: gl.constexpr = _polled(triton.next_power_of_2(COUNT))
    number = gl.arange(0, triton.next_power_of_2(COUNT), gl.SliceLayout(1, POLLED))[:, None]
    source = gl.minimum(number, COUNT - 1)
    at = first + gl.arange(0, WIDTH, gl.SliceLayout(0, POLLED))[None, :]
    mask = (at < HIDDEN) & (number < COUNT)
    words = receive(area + source * HIDDEN + at, source % GROUP.WORLD, mask, inbox, 4, GROUP)
    values = gl.where(mask, words.to(gl.float32, bitcast=True), 0.0)
    return gl.convert_layout(gl.sum(values, 0), COLUMNS, assert_trivial=True)


@gluon.jit
def add_and_norm(
    row, norm, area, COUNT: gl.constexpr, inbox, staging, MODEL: gl.constexpr, GROUP: gl.constexpr
):
    """Wait for all of a sum, and add it to the residual, which is NaN where words are missing.

    What products read is the residual times the weight of the norm; returned is the norm's factor.
    Blocks are a loop, and slabs of products are: code that does not fit the instruction cache is
    read again in each layer.

    Args:
        row: the residual without a COUNT.
        norm: its weight, a pointer.
        COUNT: of sources.
    """
    x, residual = staging.blocks, staging.residual
    WIDTH: gl.constexpr = width_of(MODEL.HIDDEN, GROUP.WORLD * MODEL.DOWN_PARTS)
    squares = gl.zeros([WIDTH], gl.float32, COLUMNS)
    for block in range(rolled(_blocks(MODEL.HIDDEN, GROUP.WORLD * MODEL.DOWN_PARTS))):
        at = block * WIDTH + gl.arange(0, WIDTH, COLUMNS)
        weight = gl.load(norm + at, mask=at < MODEL.HIDDEN, other=0.0)
        if COUNT:
            added = _sum_of_block(block * WIDTH, WIDTH, area, COUNT, inbox, MODEL, GROUP)
            new = (residual.index(block).load(COLUMNS).to(gl.float32) + added).to(x.dtype)
        else:
            new = gl.load(row + at, mask=at < MODEL.HIDDEN, other=0.0)
        residual.index(block).store(new)
        value = new.to(gl.float32)
        squares += value * value
        x.index(block).store((value * weight.to(gl.float32)).to(x.dtype))
    mean = gl.sum(squares, 0) * (1.0 / MODEL.HIDDEN)
    return gl.rsqrt(mean + MODEL.EPS)


class Staging(NamedTuple):
    """Shared memory of one sequence.

    Args:
        slabs: what products read, [n, 16, 64].
        blocks: the same memory, [blocks, WIDTH].
        residual: [blocks, WIDTH].
        pairs, words: the same memory as slabs, int32 [n / 2, 16, 64] and int16 [n, 16, 64], of two
            elements in 16 bits and in fp8.
        scales: float32 [n / 2, 16], of groups of 128.
    """

    slabs: Any
    blocks: Any
    residual: Any
    pairs: Any
    words: Any
    scales: Any


@gluon.jit
def make_staging(element: gl.constexpr, MODEL: gl.constexpr, GROUP: gl.constexpr):
    """Allocate it."""
    WIDTH: gl.constexpr = width_of(MODEL.HIDDEN, GROUP.WORLD * MODEL.DOWN_PARTS)
    ELEMENTS: gl.constexpr = staged_elements(
        MODEL.HIDDEN, MODEL.HEADS * MODEL.HEAD_DIM, MODEL.INTERMEDIATE, WIDTH
    )
    SLABS: gl.constexpr = 2 * ((ELEMENTS + 2047) // 2048)
    BLOCKS: gl.constexpr = _blocks(MODEL.HIDDEN, GROUP.WORLD * MODEL.DOWN_PARTS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slabs = gl.allocate_shared_memory(element, [SLABS, 16, 64], plain)
    blocks = reinterpreted(slabs, [SLABS * 1024 // WIDTH, WIDTH], flat)
    residual = gl.allocate_shared_memory(element, [BLOCKS, WIDTH], flat)
    if MODEL.SCALES == "none":
        pairs, words, scales = (), (), ()
    else:
        pairs = reinterpreted(slabs, [SLABS // 2, 16, 64], plain, gl.int32)
        words = reinterpreted(slabs, [SLABS, 16, 64], plain, gl.int16)
        scales = gl.allocate_shared_memory(gl.float32, [SLABS // 2, 16], flat)
    return Staging(slabs, blocks, residual, pairs, words, scales)


@gluon.constexpr_function
def staged_elements(hidden, of_heads, wide, width):
    """Of the longest row that products read, in whole blocks."""
    return -(-max(hidden, of_heads, wide) // width) * width


@gluon.jit
def empty_area(area, WORDS: gl.constexpr):
    """This program's share of an area."""
    at = gl.arange(0, _EMPTIED, _ANY)
    first = gl.program_id(0) * _EMPTIED
    while first < WORDS:
        words = gl.full([_EMPTIED], EMPTY, gl.int32, _ANY)
        gl.store(area + first + at, words, mask=first + at < WORDS, cache_modifier=".wt")
        first += gl.num_programs(0) * _EMPTIED


@gluon.jit
def empty_last_turn(control_ptr, slots_ptr, stride_slot, turn, used):
    """See ``packets.empty_last_turn``."""
    if gl.program_id(0) == 0:
        gl.store(control_ptr + USED + turn % 2, used)
    last = gl.load(control_ptr + USED + (turn + 1) % 2)
    slot = slots_ptr + (turn + 2) % 3 * stride_slot
    at = gl.arange(0, _EMPTIED, _ANY)
    for first in range(gl.program_id(0) * _EMPTIED, last, gl.num_programs(0) * _EMPTIED):
        words = gl.full([_EMPTIED], EMPTY, gl.int32, _ANY)
        gl.store(slot + first + at, words, mask=first + at < last, cache_modifier=".wt")


@gluon.jit
def best_of_ranks(best, inbox, MODEL: gl.constexpr, GROUP: gl.constexpr):
    """The largest of all ranks' `best`, int64 [32] OF_BEST, of each sequence; collective.

    Halves of them are never EMPTY.
    """
    sequence = gl.arange(0, 32, OF_BEST)
    own = inbox.slot + inbox.peers.rank * (2 * MODEL.BATCH)
    for step in gl.static_range(1, GROUP.WORLD + 1):
        peer = (inbox.peers.rank + step) % GROUP.WORLD
        target = translate(own, inbox.peers, peer) + 2 * sequence
        mask = sequence < MODEL.BATCH
        packets.send(inbox.peers, target, (best >> 32).to(gl.int32), peer, mask)
        packets.send(inbox.peers, target + 1, (best & 0xFFFFFFFF).to(gl.int32), peer, mask)
    SOURCES: gl.constexpr = triton.next_power_of_2(GROUP.WORLD)
    source = gl.arange(0, SOURCES, gl.SliceLayout(0, BEST))[None, :]
    row = gl.minimum(sequence, MODEL.BATCH - 1)[:, None]
    there = (sequence < MODEL.BATCH)[:, None] & (source < GROUP.WORLD)
    rank = gl.minimum(source, GROUP.WORLD - 1)
    place = inbox.slot + rank * (2 * MODEL.BATCH) + 2 * row
    high = receive(place, rank, there, inbox, 1, GROUP).to(gl.int64)
    low = receive(place + 1, rank, there, inbox, 1, GROUP).to(gl.int64)
    least = gl.full(there.shape, -(1 << 63), gl.int64, BEST)
    return gl.max(gl.where(there, (high << 32) | (low & 0xFFFFFFFF), least), 1)
