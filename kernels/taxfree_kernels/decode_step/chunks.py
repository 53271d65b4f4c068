"""Device functions of the persistent step: the ring of chunks, claims, and counts of units.

One warp loads. It claims units from one counter, tells the other warps which, and streams their
weights, keys and values, which nobody writes during a step: it waits for no activation. A chunk is
8 rows of a weight and 1024 of K; with several sequences 16 rows and 512 of K; or as many keys as
take the same 16 KiB. Weights in fp8 are streamed as 16-bit words of two elements: a chunk has twice
as much of K, and all that is said of K in loads is said of words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from taxfree_kernels.decode_step import tape
from taxfree_kernels.device.peers import ABORT, LIMIT
from taxfree_kernels.device.specialized import load_box, reinterpreted

WARPS = gl.constexpr(8)
GROUPS = gl.constexpr(2)  # of 16 rows of a unit, with several sequences
#: of rows' lengths; keys have none
OF_HIDDEN, OF_HEADS, OF_INTERMEDIATE, OF_KEYS = map(gl.constexpr, range(4))
_QUEUE = gl.constexpr(8)  # claimed units that the other warps have yet to begin
CHUNK_BYTES = gl.constexpr(8 * 1024 * 2)
NOBODY = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))

#: words of the counters, in cache lines of their own
DONE, LEFT, CLAIMED, FAILED, SPLITS_DONE = map(gl.constexpr, (0, 32, 64, 96, 128))

# ---- layouts --------------------------------------------------------------------------------

#: of a chunk with one sequence, [8, 16, 64]: rows, then K
TILE = gl.constexpr(gl.BlockedLayout([4, 1, 8], [1, 4, 8], [2, 4, 1], [2, 1, 0]))
X = gl.constexpr(gl.SliceLayout(0, TILE))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, TILE)))


class Pipe(NamedTuple):
    """Shared memory between the loader and the others.

    Args:
        rows: chunks as [boxes, box of rows], which TMA fills.
        tiles: the same as [STAGES, 8, 16, 64]: [row, K / 64, 64], or with several sequences
            [K / 64, row, 64].
        keys: the same as [boxes, box of keys], which TMA fills.
        states: the same as [STAGES, groups, 16, HEAD_DIM]; see ``attend``.
        full, empty: barriers of stages.
        ids: numbers of claimed units, with barriers as stages have.
    """

    rows: Any
    tiles: Any
    keys: Any
    states: Any
    full: Any
    empty: Any
    ids: Any
    id_full: Any
    id_empty: Any


class Weights(NamedTuple):
    """Descriptors of rows of each length, of keys and values, and the table of lines.

    ``head`` is of the head's rows beside weights in fp8; else None.
    """

    hidden: Any
    heads: Any
    intermediate: Any
    cache: Any
    lines: Any
    head: Any


class Pages(NamedTuple):
    """The block table, int32 [BATCH, n], and the elements from a row to the next."""

    table: Any
    stride: Any


class Counts(NamedTuple):
    """Units of each phase of a layer, and splits of the keys of each pair."""

    qkv: Any
    attention: Any
    o: Any
    gate: Any
    down: Any
    layer: Any
    splits: Any


@gluon.jit
def counts_of(positions, widest, MODEL: gl.constexpr):
    """The units of this step, which depend on how many keys there are."""
    KEYS: gl.constexpr = MODEL.KEYS
    last = gl.load(positions).to(gl.int32)
    for each in gl.static_range(1, MODEL.BATCH):
        last = gl.maximum(last, gl.load(positions + each).to(gl.int32))
    chunks = gl.minimum(last + 1, widest + KEYS - 1) // KEYS + 1
    each_split = gl.cdiv(chunks * MODEL.PAIRS, gl.num_programs(0) * MODEL.SPLITS)
    splits = gl.cdiv(chunks, each_split)
    ROWS: gl.constexpr = rows_of_unit(MODEL.BATCH)
    qkv = gl.to_tensor(MODEL.QKV_ROWS // ROWS)
    o = gl.to_tensor(MODEL.HIDDEN // ROWS)
    gate = gl.to_tensor(2 * MODEL.INTERMEDIATE // ROWS)
    attention = splits * MODEL.PAIRS
    down = o * MODEL.DOWN_PARTS
    return Counts(qkv, attention, o, gate, down, qkv + attention + o + gate + down, splits)


@gluon.jit
def chunks_of_split(split, splits, layer, position, lines, MODEL: gl.constexpr):
    """The chunks of keys [begin, end) of a split, and the first key that attention sees."""
    KEYS: gl.constexpr = MODEL.KEYS
    window = gl.load(lines + layer * tape.LINES + tape.WINDOW).to(gl.int32)
    oldest = gl.maximum(position + 1 - window, 0)
    first = oldest // KEYS
    chunks = position // KEYS + 1 - first
    each = gl.cdiv(chunks, splits)
    begin = gl.minimum(split * each, chunks)
    return first + begin, first + gl.minimum(begin + each, chunks), oldest


@gluon.jit
def weight_of_row(row, MODEL: gl.constexpr):
    """Which of q, k and v has a row of them all, 0 to 2, and its number there."""
    Q: gl.constexpr = MODEL.HEADS * MODEL.HEAD_DIM
    K: gl.constexpr = MODEL.KV_HEADS * MODEL.HEAD_DIM
    which = (row >= Q).to(gl.int32) + (row >= Q + K).to(gl.int32)
    return which, row - gl.where(which > 0, Q, 0) - gl.where(which > 1, K, 0)


@gluon.constexpr_function
def rows_of_unit(batch):
    """Rows of a unit; of the gate and the up projection it has half as many each."""
    return 8 if batch == 1 else 32


@gluon.constexpr_function
def head_units(batch, vocab):
    """Units of the head; the last of several sequences may be half a unit."""
    return -(-vocab // (8 if batch == 1 else 32))


@gluon.constexpr_function
def sequences(batch):
    """N, of which products are: the batch, or more."""
    return 1 if batch == 1 else 8 if batch <= 8 else 16


@gluon.constexpr_function
def words_in(k, scales):
    """16-bit words in k elements of a layer's weights."""
    return k if scales == "none" else k // 2


@gluon.constexpr_function
def slabs_in(k, batch):
    """Slabs in a row: of as many elements of K as a chunk has."""
    return -(-k // (1024 if batch == 1 else 512))


@gluon.jit
def rolled(end):
    """The end of a loop that stays a loop: unrolled, a layer's code exceeds instruction caches."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(end)], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def part_of_slabs(part, K: gl.constexpr, MODEL: gl.constexpr):
    """The first slab of a part of down's rows, and the one behind its last."""
    SLABS: gl.constexpr = slabs_in(K, MODEL.BATCH)
    MOST: gl.constexpr = triton.cdiv(SLABS, MODEL.DOWN_PARTS)
    first = part * MOST
    return first, gl.minimum(first + MOST, SLABS)


# ---- the loader -----------------------------------------------------------------------------


@gluon.jit
def _next_stage(n, pipe, MODEL: gl.constexpr):
    """Wait for an empty stage, and until few enough chunks are on their way."""
    stage = n % MODEL.STAGES
    mbarrier.wait(pipe.empty.index(stage), n // MODEL.STAGES & 1 ^ 1)
    before = gl.maximum(n - MODEL.LIMIT, 0)
    parity = before // MODEL.STAGES & 1
    mbarrier.wait(pipe.full.index(before % MODEL.STAGES), parity, pred=n >= MODEL.LIMIT)
    mbarrier.expect(pipe.full.index(stage), CHUNK_BYTES)
    return stage


@gluon.jit
def _load_box(desc, line, second, third, full, to):
    """Load a box of the matrix that begins at a line; see ``tape.Lines``."""
    if len(desc.block_shape) > 4:  # it has spans
        span = (line >> tape.SPAN_BITS).to(gl.int32)
        within = (line & ((1 << tape.SPAN_BITS) - 1)).to(gl.int32)
        load_box(desc, [span, within, second, third, 0], full, to)
    else:
        load_box(desc, [line.to(gl.int32), second, third, 0], full, to)


@gluon.jit
def _load_rows(desc, rows, first, end, n, pipe, MODEL: gl.constexpr):
    """Load so many slabs of both halves of a unit's rows, from the first one on."""
    if MODEL.BATCH == 1:
        for slab in range(first, rolled(end)):
            stage = _next_stage(n, pipe, MODEL)
            full = pipe.full.index(stage)
            _load_box(desc, rows.line, rows.row, slab * 16, full, pipe.rows.index(2 * stage))
            to = pipe.rows.index(2 * stage + 1)
            _load_box(desc, rows.other, rows.other_row, slab * 16, full, to)
            n += 1
    else:
        for slab in range(first, end):
            for group in gl.static_range(GROUPS):
                stage = _next_stage(n, pipe, MODEL)
                full, to = pipe.full.index(stage), pipe.rows.index(stage)
                line, row = (rows.other, rows.other_row) if group else (rows.line, rows.row)
                _load_box(desc, line, slab * 8, row, full, to)
                n += 1
    return n


@gluon.jit
def page_of(pages, sequence, key, MODEL: gl.constexpr):
    """The page that has a key of a sequence; without pages the sequence itself."""
    if MODEL.PAGE:
        page = gl.load(pages.table + sequence * pages.stride + key // MODEL.PAGE)
    else:
        page = sequence
    return page.to(gl.int64)


@gluon.constexpr_function
def keys_of_box(keys, page):
    """Keys that are loaded at once, of a chunk."""
    return min(keys, page) if page else keys


@gluon.jit
def _pages_of_chunk(pages, sequence, chunk, oldest, position, MODEL: gl.constexpr):
    """The page of each box of a chunk; of one that attention does not see, that of another."""
    BOX: gl.constexpr = keys_of_box(MODEL.KEYS, MODEL.PAGE)
    found = ()
    for box in gl.static_range(MODEL.KEYS // BOX):
        key = chunk * MODEL.KEYS + box * BOX
        key = gl.maximum(gl.minimum(key, position), oldest)
        found = found + (page_of(pages, sequence, key, MODEL),)
    return found


@gluon.jit
def _load_keys(weights, unit, layer, positions, pages, heads, counts, n, pipe, MODEL: gl.constexpr):
    """Load the chunks of a split, of keys and of values in turn.

    Args:
        heads: lines from one page or sequence of the cache to the next, and from one KV head to
            the next.
    """
    BOX: gl.constexpr = keys_of_box(MODEL.KEYS, MODEL.PAGE)
    BOXES: gl.constexpr = MODEL.KEYS // BOX
    PARTS: gl.constexpr = MODEL.HEAD_DIM // 64
    pair, split = unit % MODEL.PAIRS, unit // MODEL.PAIRS
    sequence, head = pair // MODEL.KV_HEADS, pair % MODEL.KV_HEADS
    position = gl.load(positions + sequence).to(gl.int32)
    lines = weights.lines
    begin, end, oldest = chunks_of_split(split, counts.splits, layer, position, lines, MODEL)
    keys = gl.load(lines + layer * tape.LINES + tape.LINE_KEYS) + head * heads[1]
    values = gl.load(lines + layer * tape.LINES + tape.LINE_VALUES) + head * heads[1]
    found = _pages_of_chunk(pages, sequence, begin, oldest, position, MODEL)
    for chunk in range(begin, end):
        # asked for now, used in the next turn
        following = _pages_of_chunk(pages, sequence, chunk + 1, oldest, position, MODEL)
        for which in gl.static_range(2):
            stage = _next_stage(n, pipe, MODEL)
            start = values if which else keys
            for box in gl.static_range(BOXES):
                first = chunk * MODEL.KEYS
                if MODEL.PAGE:
                    first = (first + box * BOX) % MODEL.PAGE
                line = start + found[box] * heads[0]
                for part in gl.static_range(PARTS):
                    to = pipe.keys.index((stage * PARTS + part) * BOXES + box)
                    _load_box(weights.cache, line, part, first, pipe.full.index(stage), to)
            n += 1
        found = following
    return n


@gluon.jit
def _publish(unit, claims, pipe):
    slot = claims % _QUEUE
    mbarrier.wait(pipe.id_empty.index(slot), claims // _QUEUE & 1 ^ 1)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pipe.ids.index(slot).store(gl.full([1], unit, gl.int32, ONE))
    mbarrier.arrive(pipe.id_full.index(slot), count=1)


class Rows(NamedTuple):
    """Where the halves of a unit's rows begin.

    Args:
        kind: of K: OF_HIDDEN, OF_HEADS or OF_INTERMEDIATE; or OF_KEYS, which have no rows.
        line, row: of the first half, and the second half's.
        part: of K.
    """

    kind: Any
    line: Any
    row: Any
    other: Any
    other_row: Any
    part: Any


@gluon.jit
def rows_of(unit, layers, lines, counts, MODEL: gl.constexpr):
    """The rows of a unit, its layer, and its number there."""
    ROWS: gl.constexpr = rows_of_unit(MODEL.BATCH)
    HALF: gl.constexpr = ROWS // 2
    layer = gl.minimum(unit // counts.layer, layers)
    at = unit - layer * counts.layer
    zero = at * 0
    kind, first, second, part = zero + OF_HIDDEN, zero, zero, zero
    row = at * ROWS
    other_row = row + HALF
    o = at - counts.qkv - counts.attention
    gate = o - counts.o
    down = gate - counts.gate
    if layer == layers:
        other_row = gl.minimum(other_row, MODEL.VOCAB - HALF)  # read twice behind the last row
    elif at < counts.qkv:
        first, row = weight_of_row(row, MODEL)
        second, other_row = first, row + HALF
    elif o < 0:
        kind = zero + OF_KEYS
    elif gate < 0:
        kind, first, second = zero + OF_HEADS, zero + tape.LINE_O, zero + tape.LINE_O
        row, other_row = o * ROWS, o * ROWS + HALF
    elif down < 0:
        first, second = zero + tape.LINE_GATE, zero + tape.LINE_UP
        row, other_row = gate * HALF, gate * HALF
    else:
        kind, first, second = zero + OF_INTERMEDIATE, zero + tape.LINE_DOWN, zero + tape.LINE_DOWN
        row = down // MODEL.DOWN_PARTS * ROWS
        other_row, part = row + HALF, down % MODEL.DOWN_PARTS
    table = lines + layer * tape.LINES
    line, other = gl.load(table + first), gl.load(table + second)
    return Rows(kind, line, row, other, other_row, part), layer, at


@gluon.jit
def load(weights, positions, pages, heads, counters, layers, widest, pipe, MODEL: gl.constexpr):
    """Claim units until there are no more, and load what they read; the loader's whole life."""
    BATCH: gl.constexpr = MODEL.BATCH
    HIDDEN: gl.constexpr = words_in(MODEL.HIDDEN, MODEL.SCALES)
    WIDTH: gl.constexpr = words_in(MODEL.HEADS * MODEL.HEAD_DIM, MODEL.SCALES)
    WIDE: gl.constexpr = words_in(MODEL.INTERMEDIATE, MODEL.SCALES)
    counts = counts_of(positions, widest, MODEL)
    end = layers * counts.layer + head_units(BATCH, MODEL.VOCAB)
    n, claims = gl.to_tensor(0), gl.to_tensor(0)
    unit = gl.atomic_add(counters + CLAIMED, 1, sem="relaxed", scope="gpu")
    while unit < end:
        _publish(unit, claims, pipe)
        claims += 1
        rows, layer, at = rows_of(unit, layers, weights.lines, counts, MODEL)
        if rows.kind == OF_HIDDEN:
            if MODEL.SCALES == "none" or layer < layers:
                SLABS: gl.constexpr = slabs_in(HIDDEN, BATCH)
                n = _load_rows(weights.hidden, rows, 0, SLABS, n, pipe, MODEL)
            else:
                HEAD_SLABS: gl.constexpr = slabs_in(MODEL.HIDDEN, BATCH)
                n = _load_rows(weights.head, rows, 0, HEAD_SLABS, n, pipe, MODEL)
        elif rows.kind == OF_HEADS:
            n = _load_rows(weights.heads, rows, 0, slabs_in(WIDTH, BATCH), n, pipe, MODEL)
        elif rows.kind == OF_INTERMEDIATE:
            first, last = part_of_slabs(rows.part, WIDE, MODEL)
            n = _load_rows(weights.intermediate, rows, first, last, n, pipe, MODEL)
        else:
            n = _load_keys(
                weights, at - counts.qkv, layer, positions, pages, heads, counts, n, pipe, MODEL
            )
        unit = gl.atomic_add(counters + CLAIMED, 1, sem="relaxed", scope="gpu")
    _publish(unit, claims, pipe)


# ---- the others -----------------------------------------------------------------------------


@gluon.jit
def next_unit(claims, pipe):
    """The next unit that the loader has claimed, and the number of those before the next."""
    slot = claims % _QUEUE
    mbarrier.wait(pipe.id_full.index(slot), claims // _QUEUE & 1)
    unit = gl.max(pipe.ids.index(slot).load(NOBODY), 0)
    mbarrier.arrive(pipe.id_empty.index(slot), count=1)
    return unit, claims + 1


@gluon.jit
def fence_stage():
    """Let TMA write what the caller has loaded into registers, behind an arrival.

    An arrival alone does not order these loads before writes of the async proxy.
    """
    gl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta;\n\tmov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def hand_back(stage, pipe):
    """Let TMA write a stage again, which the caller has loaded into registers."""
    fence_stage()
    mbarrier.arrive(pipe.empty.index(stage), count=1)


@gluon.jit
def multiply(x, first, end, n, pipe, MODEL: gl.constexpr):
    """float32 [8]: the products of a unit's rows with slabs of x, which is in shared memory."""
    acc = gl.zeros([8, 16, 64], gl.float32, TILE)
    for slab in range(first, rolled(end)):
        stage = n % MODEL.STAGES
        mbarrier.wait(pipe.full.index(stage), n // MODEL.STAGES & 1)
        rows = pipe.tiles.index(stage).load(TILE)
        hand_back(stage, pipe)
        acc += rows.to(gl.float32) * x.index(slab).load(X).to(gl.float32)[None, :, :]
        n += 1
    return gl.sum(gl.sum(acc, 2), 1), n


@gluon.jit
def slabs_of(ptr, K: gl.constexpr):
    """K elements, in slabs of 1024, with zeros behind the last; past L1, which sees no stores."""
    part = gl.arange(0, 16, gl.SliceLayout(1, X))
    element = gl.arange(0, 64, gl.SliceLayout(0, X))
    at = part[:, None] * 64 + element[None, :]
    found = ()
    for slab in gl.static_range((K + 1023) // 1024):
        if slab * 1024 + 1024 <= K:
            found = found + (gl.load(ptr + slab * 1024 + at, cache_modifier=".cg"),)
        else:
            mask = slab * 1024 + at < K
            values = gl.load(ptr + slab * 1024 + at, mask=mask, other=0.0, cache_modifier=".cg")
            found = found + (values,)
    return found


@gluon.jit
def wait_for_units(counters, count, control_ptr):
    """Wait until so many units and programs of this launch are done; bounded.

    Whoever waits too long says so in FAILED, which ends all later waits early, as the abort of the
    pool does. A wait for units is in vain only if others wait for words, half as long. One warp
    polls.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred p, q, w;
        .reg .u32 v, t;
        .reg .s32 d;
        .reg .u64 n, m;
        mov.u32 t, %tid.x;
        setp.ge.u32 w, t, 32;
        mov.u32 v, 0;
        mov.u64 n, 0;
        @w bra DONE;
        LOOP:
        ld.acquire.gpu.global.u32 v, [$1];
        sub.s32 d, v, $2;
        setp.ge.s32 p, d, 0;
        @p bra DONE;
        add.u64 n, n, 1;
        and.b64 m, n, 255;
        setp.ne.u64 q, m, 0;
        @q bra LOOP;
        ld.relaxed.sys.global.u64 m, [$5];
        setp.ne.u64 q, m, 0;
        @q bra DONE;
        ld.relaxed.gpu.global.u32 t, [$3];
        setp.ne.u32 q, t, 0;
        @q bra DONE;
        setp.lt.u64 q, n, $4;
        @q bra LOOP;
        mov.u32 t, 1;
        st.relaxed.gpu.global.u32 [$3], t;
        DONE:
        mov.u32 $0, v;
        }""",
        "=r,l,r,l,l,l",
        [
            counters + DONE, count, counters + FAILED, 2 * gl.load(control_ptr + LIMIT),
            (control_ptr + ABORT).to(gl.int64),  # Triton 3.6 refuses pointers of two types
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@gluon.jit
def count_units(counters, done):
    """Count units of a phase, and this program, which has read what the phase reads."""
    tl.debug_barrier()
    gl.atomic_add(counters + DONE, done + 1, sem="release", scope="gpu")


@gluon.jit
def make_pipe(weights, MODEL: gl.constexpr):
    """Allocate the ring, and make its barriers."""
    STAGES: gl.constexpr = MODEL.STAGES
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    element: gl.constexpr = weights.hidden.dtype
    DIM: gl.constexpr = MODEL.HEAD_DIM
    KEY_GROUPS: gl.constexpr = MODEL.KEYS // 16
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 16, 64], element)
    states: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEY_GROUPS, 16, DIM], element)
    ring = gl.allocate_shared_memory(element, [STAGES, 8, 16, 64], tile)
    BOXES: gl.constexpr = 2 * STAGES if MODEL.BATCH == 1 else STAGES
    KEY_BOXES: gl.constexpr = CHUNK_BYTES // (128 * keys_of_box(MODEL.KEYS, MODEL.PAGE))
    pipe = Pipe(
        reinterpreted(ring, [BOXES] + weights.hidden.block_shape, weights.hidden.layout),
        ring,
        reinterpreted(ring, [STAGES * KEY_BOXES] + weights.cache.block_shape, weights.cache.layout),
        reinterpreted(ring, [STAGES, KEY_GROUPS, 16, DIM], states),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int32, [_QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [_QUEUE, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [_QUEUE, 1], barrier),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(pipe.full.index(stage), count=1)
        mbarrier.init(pipe.empty.index(stage), count=1)
    for slot in gl.static_range(_QUEUE):
        mbarrier.init(pipe.id_full.index(slot), count=1)
        mbarrier.init(pipe.id_empty.index(slot), count=1)
    return pipe
