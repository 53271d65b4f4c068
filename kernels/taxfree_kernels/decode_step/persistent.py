"""All layers of a decoder for one token, in one launch: a persistent kernel in Gluon for Hopper.

Time between kernels, and time in which memory idles at the end of each, is what a step of separate
kernels loses. Here one warp of each program streams all weights, keys and values through a ring in
shared memory, in the order of the phases, and waits for nothing but room in the ring. Eight warps
multiply, as activations allow.

Phases of a layer: products of q, k and v; attention, with the norms and the rotary embedding of q
and k; o; gate and up; down. RMSNorm: each program has the whole residual. It adds the sums of o or
down (see ``sums``), multiplies by the weight of the norm, and the products by the reciprocal of the
root of the mean square.

Slabs of rows and blocks of sums are loops: all code runs once a layer, and what does not stay in
instruction caches is read again while everybody waits (docs/lab/decode_step.md).

Programs hand other activations on by counting done units in one word, which all wait for. A program
also counts itself in each such phase: so no buffer is written again that another program still
reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from taxfree_kernels.decode_step import chunks, rows, scaled, sums, tape
from taxfree_kernels.decode_step.attend import attend, groups, room_of, rows_of_heads, stored_heads
from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import NO_CHANNEL, Peers
from taxfree_kernels.device.specialized import reinterpreted
from taxfree_kernels.device.sync import abort, before_tma_loads, cycles, is_aborted

_EVENTS = gl.constexpr(len(tape.EVENTS))
_LEAST = gl.constexpr(-(1 << 63))


class Buffers(NamedTuple):
    """Memory of a step.

    Args:
        lines, vectors: tables, see ``tape``.
        table: int32 [BATCH, n], of the cache's pages, where it has some.
        embedding: [vocab, HIDDEN], all ranks' rows.
        inv_freq: float32 [HEAD_DIM / 2].
        logits: float32 [BATCH, VOCAB].
        qkv: float32 [BATCH, rows of q, k, v].
        parts, softmax: float32, of splits: sums; the largest logit, and the total relative to it.
        attended: [BATCH, HEADS * HEAD_DIM].
        activated: [BATCH, INTERMEDIATE].
        x: [BATCH, HIDDEN], the residual times the weight of a norm; of several sequences.
        squares: float32 [BATCH, owners], sums of squares of the residual; see ``rows``.
        scales: int64 [layers, 7], addresses of the scales of weights in fp8; else None.
        x_tops, attended_tops, activated_tops: float32 [BATCH, owners], [BATCH, KV_HEADS] and
            [BATCH, units], largest magnitudes of parts of x, attended and activated; of several
            sequences, if weights have scales of channels; else None.
        best: int64 [BATCH], the largest logit so far, and its token.
        counters: int32, zeros between launches.
        inbox: int32, the pool's first slot of Lamport words.
        times: int64 [programs, layers + 1, EVENTS], in cycles of a program's unit.
        control_ptr, heap_bases: of the fabric.
    """

    lines: Any
    vectors: Any
    table: Any
    embedding: Any
    inv_freq: Any
    logits: Any
    qkv: Any
    parts: Any
    softmax: Any
    attended: Any
    activated: Any
    x: Any
    squares: Any
    scales: Any
    x_tops: Any
    attended_tops: Any
    activated_tops: Any
    best: Any
    counters: Any
    inbox: Any
    times: Any
    control_ptr: Any
    heap_bases: Any


class Inputs(NamedTuple):
    """Descriptors of what several sequences' products read; `head`: see ``chunks.Weights``."""

    hidden: Any
    attended: Any
    activated: Any
    head: Any


class Step(NamedTuple):
    """What the phases read: see ``Buffers``."""

    lines: Any
    vectors: Any
    origin: Any
    inv_freq: Any
    rope_scale: Any
    positions: Any
    qkv: Any
    parts: Any
    softmax: Any
    attended: Any
    tops: Any
    counters: Any
    heads: Any
    stride_key: Any
    pages: Any


@gluon.jit
def _vector_at(vectors, row, column, element: gl.constexpr):
    """A pointer to a norm or bias, from the table of addresses."""
    address = gl.load(vectors + row * tape.VECTORS + column)
    return tl.cast(gl.multiple_of(address, 16), gl.pointer_type(element))


@gluon.jit
def _note(buffers, layer, layers, event: gl.constexpr, MODEL: gl.constexpr):
    """Store the time of an event."""
    if MODEL.TRACE:
        at = (gl.program_id(0) * (layers + 1) + layer) * _EVENTS + event
        gl.store(buffers.times + at, cycles("cuda"))


# ---- what differs between one sequence and several ------------------------------------------


@gluon.jit
def _norm_at(vectors, row, column, element: gl.constexpr, MODEL: gl.constexpr, GROUP: gl.constexpr):
    """The weight of a norm, as ``_next_x`` takes it: loaded before the sum is waited for."""
    ptr = _vector_at(vectors, row, column, element)
    if MODEL.BATCH == 1:
        weight = ptr
    else:
        weight = rows.owned_norm(ptr, sums.sources_of(GROUP, MODEL), MODEL)
    return weight


@gluon.jit
def _next_x(
    residual, weight, area, COUNT: gl.constexpr, before, buffers, inbox, staging,
    MODEL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Add a sum of so many sources to the residual: all of it, or this program's columns.

    Returns:
        The residual; what products with normalised inputs read, and the norm's factor; what was
        counted before. With several sequences x is in memory, behind a barrier; what is kept is in
        `staging`.
    """
    if MODEL.BATCH == 1:
        rstd = sums.add_and_norm(residual, weight, area, COUNT, inbox, staging, MODEL, GROUP)
        residual, x = (), ()
    else:
        SOURCES: gl.constexpr = sums.sources_of(GROUP, MODEL)
        if COUNT:
            residual = rows.add_owned(residual, area, COUNT, SOURCES, inbox, MODEL, GROUP)
        rows.publish(residual, weight, buffers.x, buffers.squares, buffers.x_tops, SOURCES, MODEL)
        chunks.count_units(buffers.counters, 0)
        before += gl.num_programs(0)
        chunks.wait_for_units(buffers.counters, before, buffers.control_ptr)
        before_tma_loads(GROUP)
        if MODEL.SCALES == "channel":
            x = scaled.largest_of_tokens(buffers.x_tops, rows.owners(MODEL), MODEL)
        else:
            x = ()
        rstd = rows.factors(buffers.squares, MODEL)[None, :]
    return residual, x, rstd, before


@gluon.jit
def _inputs_of(
    ptr, K: gl.constexpr, tops, TOPS: gl.constexpr, staging,
    MODEL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What products with inputs from memory read, behind their barrier.

    Args:
        tops: so many largest magnitudes of each token; see ``Buffers``.
    """
    if MODEL.BATCH == 1:
        slabs = chunks.slabs_of(ptr, K)
        for slab in gl.static_range(len(slabs)):
            staging.slabs.index(slab).store(slabs[slab])
        x = _quantised((), staging, K, MODEL)
    else:
        before_tma_loads(GROUP)
        if MODEL.SCALES == "channel":
            x = scaled.largest_of_tokens(tops, TOPS, MODEL)
        else:
            x = ()
    return x


@gluon.jit
def _quantised(x, staging, K: gl.constexpr, MODEL: gl.constexpr):
    """See ``scaled.quantise_staged``; in 16 bits, and with several sequences, `x` as it is."""
    if MODEL.SCALES == "none" or MODEL.BATCH > 1:
        scale = x
    else:
        scale = scaled.quantise_staged(staging, K, MODEL)
    return scale


@gluon.jit
def _multiply(
    x, scales, inputs, K: gl.constexpr, first, end, n, pieces, staging, pipe, MODEL: gl.constexpr
):
    """The products of a unit, of each group of rows, with x, or with inputs in memory.

    Args:
        x: scales of what is quantised, see ``_inputs_of``.
        scales: those of the unit's rows, see ``scaled.Scales``.
        first, end: slabs.
    """
    if MODEL.SCALES == "none":
        products, n, pieces = _multiply_plain(inputs, first, end, n, pieces, staging, pipe, MODEL)
    elif MODEL.BATCH == 1:
        one, n = scaled.multiply_words(x, scales, K, first, end, n, staging, pipe, MODEL)
        products = (one,)
    else:
        products, n, pieces = scaled.multiply_words_of_rows(
            x, scales, inputs, K, first, end, n, pieces, staging, pipe, MODEL
        )
    return products, n, pieces


@gluon.jit
def _multiply_plain(inputs, first, end, n, pieces, staging, pipe, MODEL: gl.constexpr):
    """The same of weights in 16 bits, with slabs of x."""
    if MODEL.BATCH == 1:
        one, n = chunks.multiply(staging.slabs, first, end, n, pipe, MODEL)
        products = (one,)
    else:
        products, n, pieces = rows.multiply_rows(
            inputs, first, end, n, pieces, staging, pipe, MODEL
        )
    return products, n, pieces


@gluon.jit
def _send_down(products, targets, at, inbox, MODEL: gl.constexpr, GROUP: gl.constexpr):
    """Send the products of a unit of down by its number in the phase."""
    ROWS: gl.constexpr = chunks.rows_of_unit(MODEL.BATCH)
    PARTS: gl.constexpr = MODEL.DOWN_PARTS
    row, sequence, mask = _places(MODEL)
    to = at % PARTS * (GROUP.WORLD * MODEL.BATCH * MODEL.HIDDEN) + at // PARTS * ROWS
    to += sequence * MODEL.HIDDEN + row
    for group in gl.static_range(len(products)):
        sums.send(
            targets, to + group * (ROWS // len(products)), products[group], mask, inbox, GROUP
        )


@gluon.jit
def _places(MODEL: gl.constexpr):
    """Rows of a group, and sequences, that products are of; and a mask of those that there are."""
    if MODEL.BATCH == 1:
        row = gl.arange(0, 8, chunks.OF_ROWS)
        sequence = gl.to_tensor(0)
    else:
        row, sequence = rows.places_of_products(MODEL)
    return row, sequence, (row >= 0) & (sequence < MODEL.BATCH)


@gluon.jit
def _gate_and_up(products, rstd, MODEL: gl.constexpr):
    """A unit's products of gate and of up; rows, sequences and mask of them."""
    if MODEL.BATCH == 1:
        PAIR: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [chunks.WARPS, 1], [1, 0])
        both = (products[0] * rstd).reshape([2, 4]).permute((1, 0))
        gate, up = gl.split(gl.convert_layout(both, PAIR))
        row = gl.arange(0, 4, gate.type.layout)
        sequence = gl.to_tensor(0)
    else:
        gate, up = products[0] * rstd, products[1] * rstd
        row, sequence = rows.places_of_products(MODEL)
    return gate, up, row, sequence, (row >= 0) & (sequence < MODEL.BATCH)


# ---- the phases -----------------------------------------------------------------------------


@gluon.jit
def _compute(
    tokens, buffers, step, inputs, layers, widest, rank, vocab_start, inbox, shared, staging, pipe,
    GROUP: gl.constexpr, MODEL: gl.constexpr,
):  # fmt: skip
    """All phases of all layers, then the head: the life of the warps that compute."""
    BATCH: gl.constexpr = MODEL.BATCH
    HIDDEN: gl.constexpr = MODEL.HIDDEN
    WIDTH: gl.constexpr = MODEL.HEADS * MODEL.HEAD_DIM
    WIDE: gl.constexpr = MODEL.INTERMEDIATE
    PARTS: gl.constexpr = MODEL.DOWN_PARTS
    AREA: gl.constexpr = GROUP.WORLD * PARTS * HIDDEN
    ROWS: gl.constexpr = chunks.rows_of_unit(BATCH)
    UNITS: gl.constexpr = 2 * WIDE // ROWS  # of gate and up
    OF_HIDDEN: gl.constexpr = chunks.slabs_in(chunks.words_in(HIDDEN, MODEL.SCALES), BATCH)
    OF_WIDTH: gl.constexpr = chunks.slabs_in(chunks.words_in(WIDTH, MODEL.SCALES), BATCH)
    PRODUCTS: gl.constexpr = 1 if BATCH == 1 else chunks.GROUPS
    OF_GROUP: gl.constexpr = ROWS // PRODUCTS
    SOURCES: gl.constexpr = sums.sources_of(GROUP, MODEL)
    element: gl.constexpr = buffers.attended.dtype.element_ty
    programs = gl.num_programs(0)
    counters, vectors, control = buffers.counters, buffers.vectors, buffers.control_ptr
    row, sequence, mask = _places(MODEL)
    n, claims, pieces = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    counts = chunks.counts_of(step.positions, widest, MODEL)
    if BATCH == 1:
        residual = buffers.embedding + gl.maximum(gl.load(tokens), 0).to(gl.int64) * HIDDEN
    else:
        residual = rows.owned_embedding(buffers.embedding, tokens, SOURCES, MODEL)
    before = gl.to_tensor(0)  # units and programs of the counted phases before
    weight = _norm_at(vectors, 0, tape.INPUT_NORM, element, MODEL, GROUP)
    residual, x, rstd, before = _next_x(
        residual, weight, inbox.slot, 0, before, buffers, inbox, staging, MODEL, GROUP
    )
    unit, claims = chunks.next_unit(claims, pipe)
    first = gl.to_tensor(0)  # unit of the phase
    for layer in range(layers):
        _note(buffers, layer, layers, 0, MODEL)
        of_hidden = _quantised(x, staging, HIDDEN, MODEL)
        done = gl.to_tensor(0)
        end = first + counts.qkv
        while unit < end:
            at = (unit - first) * ROWS
            which, within = chunks.weight_of_row(at, MODEL)
            scales = scaled.scales_of(
                buffers.scales, layer, which, within, which, within + ROWS // 2, HIDDEN, MODEL
            )
            products, n, pieces = _multiply(
                of_hidden, scales, inputs.hidden, HIDDEN, 0, OF_HIDDEN, n, pieces, staging, pipe,
                MODEL,
            )  # fmt: skip
            for group in gl.static_range(PRODUCTS):
                to = at + group * OF_GROUP + row
                values = products[group] * rstd
                if MODEL.HAS_BIAS:
                    ptr = _vector_at(vectors, layer, tape.Q_BIAS + which, element)
                    values += gl.load(ptr + within + group * OF_GROUP + row).to(gl.float32)
                gl.store(buffers.qkv + sequence * MODEL.QKV_ROWS + to, values, mask=mask)
            done += 1
            unit, claims = chunks.next_unit(claims, pipe)
        _note(buffers, layer, layers, 1, MODEL)
        chunks.count_units(counters, done)
        before += counts.qkv + programs
        _note(buffers, layer, layers, 2, MODEL)
        first = end

        end = first + counts.attention
        done = gl.to_tensor(0)
        chunks.wait_for_units(counters, before, control)
        _note(buffers, layer, layers, 3, MODEL)
        if BATCH == 1:
            sums.empty_area(
                sums.area_of(inbox, 2 * layer + 2, MODEL, GROUP), AREA
            )  # of the last down
        while unit < end:
            n = attend(unit - first, layer, counts, n, step, pipe, shared, MODEL)
            done += 1
            unit, claims = chunks.next_unit(claims, pipe)
        _note(buffers, layer, layers, 4, MODEL)
        chunks.count_units(counters, done)
        before += counts.attention + programs
        _note(buffers, layer, layers, 5, MODEL)
        first = end

        end = first + counts.o
        area = sums.area_of(inbox, 2 * layer, MODEL, GROUP)
        targets = sums.targets_of(area, inbox, MODEL, GROUP)
        chunks.wait_for_units(counters, before, control)
        attended = _inputs_of(
            buffers.attended, WIDTH, buffers.attended_tops, MODEL.KV_HEADS, staging, MODEL, GROUP
        )
        _note(buffers, layer, layers, 6, MODEL)
        while unit < end:
            at = (unit - first) * ROWS
            scales = scaled.scales_of(buffers.scales, layer, 3, at, 3, at + ROWS // 2, WIDTH, MODEL)
            products, n, pieces = _multiply(
                attended, scales, inputs.attended, WIDTH, 0, OF_WIDTH, n, pieces, staging, pipe,
                MODEL,
            )  # fmt: skip
            for group in gl.static_range(PRODUCTS):
                to = (unit - first) * ROWS + group * OF_GROUP + row
                sums.send(targets, sequence * HIDDEN + to, products[group], mask, inbox, GROUP)
            unit, claims = chunks.next_unit(claims, pipe)
        _note(buffers, layer, layers, 7, MODEL)
        first = end

        weight = _norm_at(vectors, layer, tape.POST_NORM, element, MODEL, GROUP)
        residual, x, rstd, before = _next_x(
            residual, weight, area, GROUP.WORLD, before, buffers, inbox, staging, MODEL, GROUP
        )
        _note(buffers, layer, layers, 8, MODEL)
        of_hidden = _quantised(x, staging, HIDDEN, MODEL)
        done = gl.to_tensor(0)
        end = first + counts.gate
        while unit < end:
            half = (unit - first) * (ROWS // 2)
            scales = scaled.scales_of(buffers.scales, layer, 4, half, 5, half, HIDDEN, MODEL)
            products, n, pieces = _multiply(
                of_hidden, scales, inputs.hidden, HIDDEN, 0, OF_HIDDEN, n, pieces, staging, pipe,
                MODEL,
            )  # fmt: skip
            gate, up, at, of, there = _gate_and_up(products, rstd, MODEL)
            to = of * WIDE + (unit - first) * (ROWS // 2) + at
            activated = gate / (1 + gl.exp(-gate)) * up
            gl.store(buffers.activated + to, activated.to(element), mask=there)
            if buffers.activated_tops is not None:
                value = gl.where(there, activated.to(element).to(gl.float32), 0.0)
                largest = gl.max(gl.maximum(value, -value), 0)
                number = gl.arange(0, chunks.sequences(BATCH), largest.type.layout)
                to = buffers.activated_tops + number * UNITS + unit - first
                gl.store(to, largest, mask=number < BATCH)
            done += 1
            unit, claims = chunks.next_unit(claims, pipe)
        _note(buffers, layer, layers, 9, MODEL)
        chunks.count_units(counters, done)
        _note(buffers, layer, layers, 10, MODEL)
        before += counts.gate + programs
        first = end

        end = first + counts.down
        chunks.wait_for_units(counters, before, control)
        _note(buffers, layer, layers, 11, MODEL)
        if BATCH == 1:
            sums.empty_area(area, AREA)
        area = sums.area_of(inbox, 2 * layer + 1, MODEL, GROUP)
        targets = sums.targets_of(area, inbox, MODEL, GROUP)
        wide = _inputs_of(
            buffers.activated, WIDE, buffers.activated_tops, UNITS, staging, MODEL, GROUP
        )
        while unit < end:
            at = unit - first
            begin, last = chunks.part_of_slabs(
                at % PARTS, chunks.words_in(WIDE, MODEL.SCALES), MODEL
            )
            row_of = at // PARTS * ROWS
            scales = scaled.scales_of(
                buffers.scales, layer, 6, row_of, 6, row_of + ROWS // 2, WIDE, MODEL
            )
            products, n, pieces = _multiply(
                wide, scales, inputs.activated, WIDE, begin, last, n, pieces, staging, pipe, MODEL
            )
            _send_down(products, targets, at, inbox, MODEL, GROUP)
            unit, claims = chunks.next_unit(claims, pipe)
        _note(buffers, layer, layers, 12, MODEL)
        first = end

        # in the row behind the last layer it is the last norm
        weight = _norm_at(vectors, layer + 1, tape.INPUT_NORM, element, MODEL, GROUP)
        residual, x, rstd, before = _next_x(
            residual, weight, area, GROUP.WORLD * PARTS, before, buffers, inbox, staging, MODEL,
            GROUP,
        )  # fmt: skip

    _note(buffers, layers, layers, 0, MODEL)
    of_head = staging
    if MODEL.SCALES != "none" and BATCH > 1:
        of_head = staging.plain
    best = row * 0.0 + sequence * 0.0 - float("inf")
    chosen = (row + sequence) * 0
    while unit < first + chunks.head_units(BATCH, MODEL.VOCAB):
        products, n, pieces = _multiply_plain(
            inputs.head, 0, chunks.slabs_in(HIDDEN, BATCH), n, pieces, of_head, pipe, MODEL
        )
        for group in gl.static_range(PRODUCTS):
            at = (unit - first) * ROWS + group * OF_GROUP + row + sequence * 0
            values = products[group] * rstd
            is_there = at < MODEL.VOCAB
            if MODEL.LOGITS:
                to = buffers.logits + sequence * MODEL.VOCAB + at
                gl.store(to, values, mask=is_there & mask)
            better = ((values > best) | (values != values)) & is_there
            best = gl.where(better, values, best)
            chosen = gl.where(better, at, chosen)
        unit, claims = chunks.next_unit(claims, pipe)
    _note(buffers, layers, layers, 1, MODEL)
    best = gl.max(_ordered(best, chosen + vocab_start), 0)
    if BATCH == 1:
        gl.atomic_max(buffers.best, best, sem="relaxed", scope="gpu")
    else:
        number = gl.arange(0, chunks.sequences(BATCH), best.type.layout)
        to = buffers.best + number
        gl.atomic_max(to, best, mask=number < BATCH, sem="relaxed", scope="gpu")


@gluon.jit
def _ordered(value, token):
    """int64 that are ordered as values are, and of equal ones as tokens, the lowest first.

    Neither half is -1, which -0.0 would be: they are sent as Lamport words.
    """
    bits = value.to(gl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = gl.where(bits == -1, 0, bits)
    return (bits.to(gl.int64) << 32) | (0x7FFFFFFF - token).to(gl.int64)


@gluon.jit
def _leave(next_tokens, buffers, rank, inbox, GROUP: gl.constexpr, MODEL: gl.constexpr):
    """The last program writes the tokens, and leaves all counters at zero."""
    counters, control = buffers.counters, buffers.control_ptr
    tl.debug_barrier()
    left = gl.atomic_add(counters + chunks.LEFT, 1, sem="acq_rel", scope="gpu")
    if left == gl.num_programs(0) - 1:
        sequence = gl.arange(0, 32, sums.OF_BEST)
        mask = sequence < MODEL.BATCH
        best = gl.load(buffers.best + sequence, mask=mask, other=0, cache_modifier=".cg")
        if GROUP.WORLD > 1:
            best = sums.best_of_ranks(best, inbox, MODEL, GROUP)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        failed = gl.atomic_xchg(counters + chunks.FAILED, 0, sem="relaxed", scope="gpu") != 0
        if failed | is_aborted(control):
            none = tl.cast(0, tl.int64)
            abort(inbox.peers, NO_CHANNEL, none + rank, none, GROUP)
            token = token * 0 - 1
        gl.store(next_tokens + sequence, token, mask=mask)
        least = gl.full([32], _LEAST, gl.int64, sums.OF_BEST)
        gl.store(buffers.best + sequence, least, mask=mask)
        gl.store(counters + chunks.DONE, 0)
        gl.store(counters + chunks.CLAIMED, 0)
        gl.store(counters + chunks.LEFT, 0)
    packets.leave_turn(control)
    sync.leave(control)


@gluon.jit
def _compute_and_leave(
    tokens, next_tokens, buffers, step, inputs, layers, widest, rank, vocab_start, stride_slot,
    used, shared, staging, pipe, GROUP: gl.constexpr, MODEL: gl.constexpr,
):  # fmt: skip
    control = buffers.control_ptr
    generation, turn = sync.running_generation(control), packets.running_turn(control)
    peers = Peers(control, buffers.heap_bases, rank, generation)
    slot = gl.multiple_of(buffers.inbox + turn % 3 * stride_slot, 16)
    inbox = sums.Inbox(slot, peers, buffers.counters + chunks.FAILED)
    sums.empty_last_turn(control, buffers.inbox, stride_slot, turn, used)
    _compute(
        tokens, buffers, step, inputs, layers, widest, rank, vocab_start, inbox, shared, staging,
        pipe, GROUP, MODEL,
    )  # fmt: skip
    _leave(next_tokens, buffers, rank, inbox, GROUP, MODEL)


@gluon.jit(
    do_not_specialize=[
        "layers", "widest", "rank", "vocab_start", "head_lines", "sequence_lines", "stride_table",
        "stride_slot", "used",
    ],
    do_not_specialize_on_alignment=["tokens", "positions", "next_tokens"],
)  # fmt: skip
def decode_step(
    tokens, positions, next_tokens, hidden_desc, heads_desc, intermediate_desc, cache_desc, x_desc,
    attended_desc, activated_desc, head_desc, head_x_desc, buffers, origin, rope_scale, stride_key,
    layers, widest, sequence_lines, head_lines, stride_table, rank, vocab_start, stride_slot, used,
    GROUP: gl.constexpr, MODEL: gl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        tokens, positions: integers [BATCH], of any width.
        next_tokens: int64 [BATCH]; -1 if a wait failed.
        hidden_desc, heads_desc, intermediate_desc: of rows of HIDDEN, HEADS * HEAD_DIM and
            INTERMEDIATE elements; boxes of 4 rows, with several sequences of 16.
        cache_desc: of keys and values; boxes of keys of a chunk, with 64 of their elements.
        x_desc, attended_desc, activated_desc: of these buffers, as [K / 64, BATCH, 64]; boxes of
            [8, N, 64].
        head_desc, head_x_desc: of the head's rows, and of x; None, if they are those of HIDDEN. In
            fp8, the others are of 16-bit words; x_desc, attended_desc and activated_desc are of
            [K / 128, 2, BATCH, 64], with boxes of [8, 1, N, 64].
        origin: of lines, int64, an address.
        stride_key: elements from a key to the next.
        widest: of the layers' windows.
        sequence_lines, head_lines: from one sequence or page, or KV head, of the cache to the next.
        stride_table: elements from a row of the block table to the next.
        stride_slot, used: words from one slot of Lamport words to the next; of a slot that a step
            uses.
    """
    DIM: gl.constexpr = MODEL.HEAD_DIM
    QUERIES: gl.constexpr = MODEL.HEADS // MODEL.KV_HEADS
    KEY_GROUPS: gl.constexpr = groups(DIM)
    element: gl.constexpr = hidden_desc.dtype
    heads = (sequence_lines, head_lines)
    pages = chunks.Pages(buffers.table, stride_table)
    weights = chunks.Weights(
        hidden_desc, heads_desc, intermediate_desc, cache_desc, buffers.lines, head_desc
    )
    pipe = chunks.make_pipe(weights, MODEL)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    DEEP: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    SHAPE: gl.constexpr = [rows_of_heads(QUERIES), KEY_GROUPS]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ATTENDED: gl.constexpr = [KEY_GROUPS, stored_heads(QUERIES), DIM]
    room = gl.allocate_shared_memory(gl.float32, [room_of(QUERIES, MODEL.BATCH)], FLAT)
    shared = (
        reinterpreted(room, ATTENDED, DEEP),
        gl.allocate_shared_memory(gl.float32, SHAPE, PLAIN),
        gl.allocate_shared_memory(gl.float32, SHAPE, PLAIN),
    )
    if MODEL.BATCH == 1:
        staging = sums.make_staging(element, MODEL, GROUP)
    elif MODEL.SCALES == "none":
        staging = rows.make_row_staging(element, room, MODEL)
    else:
        staging = scaled.make_wide_staging(element, room, pipe, MODEL)
    if MODEL.SCALES == "none":
        inputs = Inputs(x_desc, attended_desc, activated_desc, x_desc)
    else:
        inputs = Inputs(x_desc, attended_desc, activated_desc, head_x_desc)
    cache = tl.cast(gl.multiple_of(origin, 16), gl.pointer_type(element))
    step = Step(
        buffers.lines, buffers.vectors, cache, buffers.inv_freq, rope_scale, positions, buffers.qkv,
        buffers.parts, buffers.softmax, buffers.attended, buffers.attended_tops, buffers.counters,
        heads, stride_key, pages,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_compute_and_leave, (
                tokens, next_tokens, buffers, step, inputs, layers, widest, rank, vocab_start,
                stride_slot, used, shared, staging, pipe, GROUP, MODEL,
            )),
            (chunks.load, (
                weights, positions, pages, heads, buffers.counters, layers, widest, pipe, MODEL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
