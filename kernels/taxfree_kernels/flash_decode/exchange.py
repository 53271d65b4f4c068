"""Device functions that merge and exchange parts: each rank's inbox holds one of every rank.

Parts are those of a sequence's splits, which a rank merges, and then those of all ranks. A chunk of
rows has a channel of its own. A rank sends to itself, too, so that its own part is waited for like
the others.

Words need no signal. An LL packet carries one float32; for packed rows, a Lamport word carries two
16-bit integers. The values of all rows come first, then each row's log-sum-exp. For packed rows,
log-sum-exp and unit follow, twice, to fill the 16 bytes that receivers load at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import translate
from taxfree_kernels.device.sync import signal_by_chiplet, wait_for_channels
from taxfree_kernels.device.tiles import copy


class Merge(NamedTuple):
    """The constants of merging a rank's splits: ``MERGE: tl.constexpr``.

    Args:
        Q_HEADS, V_DIM: of the problem.
        PARTS: number of parts of each row; 0 if kernels read it from the parts' runs.
        PARTS_BLOCK: parts loaded at a time.
        ROWS: rows merged at a time.
    """

    Q_HEADS: int
    PARTS: int
    PARTS_BLOCK: int
    V_DIM: int
    ROWS: int


@triton.jit
def merge_splits(row, row_mask, parts, MERGE: tl.constexpr):
    """Merge the parts of this rank's splits, as ``attend`` writes them, for some rows.

    Args:
        row: int32 [ROWS] of batch * Q_HEADS.

    Returns:
        out float32 [ROWS, next_power_of_2(V_DIM)] and lse float32 [ROWS].
    """
    parts_ptr = parts.ptr
    head = row % MERGE.Q_HEADS
    count = tl.where(row_mask, MERGE.PARTS, 0)
    if MERGE.PARTS == 0:
        first = tl.load(parts.runs_ptr + 2 * row, mask=row_mask, other=0).to(tl.int64)
        parts_ptr += first * parts.stride_slot
        count = tl.load(parts.runs_ptr + 2 * row + 1, mask=row_mask, other=0)
    return _merge(
        parts_ptr + head * MERGE.V_DIM, parts_ptr + MERGE.Q_HEADS * MERGE.V_DIM + head,
        parts.stride_slot, count, MERGE.PARTS, MERGE.PARTS_BLOCK, MERGE.V_DIM,
    )  # fmt: skip


@triton.jit
def merge_ranks(
    row, row_mask, parts_ptr, part_elements, rows, GROUP: tl.constexpr, SOURCES_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
):  # fmt: skip
    """Merge some of the `rows` of the parts of all ranks; returns out and lse as for splits."""
    return _merge(
        parts_ptr + row * V_DIM, parts_ptr + rows * V_DIM + row, part_elements,
        tl.where(row_mask, GROUP.WORLD, 0), GROUP.WORLD, SOURCES_BLOCK, V_DIM,
    )  # fmt: skip


@triton.jit
def _merge(
    out_ptrs, lse_ptrs, part_elements, count,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """Merge `count` parts of each row, always in the same order.

    Args:
        out_ptrs, lse_ptrs: [ROWS], addresses of each row in its first part.
        count: int32 [ROWS]; at most PARTS unless that is 0.
    """
    top = tl.full(count.shape, float("-inf"), tl.float32)
    total = tl.zeros(count.shape, tl.float32)
    out = tl.zeros((count.shape[0], triton.next_power_of_2(V_DIM)), tl.float32)
    if PARTS > 0 and PARTS <= 4 * PARTS_BLOCK:  # unrolled, all loads are in flight together
        for first in tl.static_range(0, PARTS, PARTS_BLOCK):
            out, total, top = _add_parts(
                out, total, top, first, out_ptrs, lse_ptrs, part_elements, count, PARTS_BLOCK, V_DIM
            )
    else:
        for first in range(0, tl.max(count, 0), PARTS_BLOCK):
            out, total, top = _add_parts(
                out, total, top, first, out_ptrs, lse_ptrs, part_elements, count, PARTS_BLOCK, V_DIM
            )
    divisor = tl.where(total > 0, total, 1.0)
    return out / divisor[:, None], tl.where(total > 0, top + tl.log2(divisor), float("-inf"))


@triton.jit
def _add_parts(
    out, total, top, first, out_ptrs, lse_ptrs, part_elements, count,
    PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """Add PARTS_BLOCK parts; their outputs and log-sum-exps are loaded concurrently."""
    part = first + tl.arange(0, PARTS_BLOCK)
    is_part = part[:, None] < count[None, :]
    offset = part.to(tl.int64) * part_elements
    dv = tl.arange(0, out.shape[1])
    tile = tl.load(
        out_ptrs[None, :, None] + offset[:, None, None] + dv[None, None, :],
        mask=is_part[:, :, None] & (dv < V_DIM)[None, None, :], other=0.0,
    )  # fmt: skip
    lse = tl.load(lse_ptrs[None, :] + offset[:, None], mask=is_part, other=float("-inf"))
    new_top = tl.maximum(top, tl.max(lse, 0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no keys so far: all weights are 0
    weight, kept = tl.exp2(lse - base[None, :]), tl.exp2(top - base)
    out = out * kept[:, None] + tl.sum(tile * weight[:, :, None], 0)
    return out, total * kept + tl.sum(weight, 0), new_top


@triton.jit
def store_output(out_ptr, out, row, row_mask, V_DIM: tl.constexpr):
    """Write rows of out [., V_DIM], in its own type."""
    dv = tl.arange(0, out.shape[1])
    tl.store(
        out_ptr + row[:, None] * V_DIM + dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (dv < V_DIM)[None, :],
    )


@triton.jit
def every_rank(rank, GROUP: tl.constexpr):
    """A block of all ranks and its mask; each rank starts with the next one, to spread targets."""
    lanes: tl.constexpr = triton.next_power_of_2(GROUP.WORLD)
    lane = tl.arange(0, lanes)
    return (rank + 1 + lane) % GROUP.WORLD, lane < GROUP.WORLD


@triton.jit
def at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH: tl.constexpr):
    """Pointers, values and mask to store rows of one [., WIDTH] at several addresses at once.

    Args:
        peer_ptrs, peer_mask: address of row 0 for each of a block of peers.
        tile: [ROWS, next_power_of_2(WIDTH)]; row, row_mask: [ROWS].
    """
    column = tl.arange(0, tile.shape[1])
    offsets = row[:, None] * WIDTH + column[None, :]
    mask = row_mask[:, None] & (column < WIDTH)[None, :]
    peers: tl.constexpr = peer_ptrs.shape[0]
    tile = tl.broadcast_to(tile[None, :, :], (peers, tile.shape[0], tile.shape[1]))
    return (
        peer_ptrs[:, None, None] + offsets[None, :, :],
        tile,
        peer_mask[:, None, None] & mask[None, :, :],
    )


@triton.jit
def store_at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH: tl.constexpr):
    """Store rows at several peers; arguments as of :func:`at_peers`."""
    ptrs, tile, mask = at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH)
    tl.store(ptrs, tile.to(peer_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def merge_into_words(
    chunk, peer, peer_mask, parts, slot_ptr, part_elements, rows, peers,
    EXCHANGE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Like :func:`merge_into_inboxes`, but stores words."""
    V_DIM: tl.constexpr = MERGE.V_DIM
    ROWS: tl.constexpr = MERGE.ROWS
    end = min((chunk + 1) * EXCHANGE.CHUNK_ROWS, rows)
    own_ptr = slot_ptr + peers.rank.to(tl.int64) * part_elements
    out_ptrs = translate(own_ptr + peer * 0, peers, peer)
    to = peer[:, None, None]
    for first in range(chunk * EXCHANGE.CHUNK_ROWS, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = row < end
        out, lse = merge_splits(row, mask, parts, MERGE)
        if EXCHANGE.PACKED:
            words, unit = _packed(out)
            _send_to_peers(out_ptrs, peer_mask, words, row, mask, peers, to, V_DIM // 2)
            twice = tl.broadcast_to(tl.join(lse, unit)[:, None, :], (ROWS, 2, 2))
            _send_to_peers(
                out_ptrs + rows * (V_DIM // 2), peer_mask, tl.reshape(twice, (ROWS, 4)), row, mask,
                peers, to, 4,
            )  # fmt: skip
        else:
            _send_to_peers(out_ptrs, peer_mask, out, row, mask, peers, to, V_DIM)
            _send_to_peers(
                out_ptrs + rows * V_DIM, peer_mask, lse[:, None], row, mask, peers, to, 1
            )


@triton.jit
def _send_to_peers(peer_ptrs, peer_mask, tile, row, row_mask, peers, peer, WIDTH: tl.constexpr):
    """Store rows of 32 bits each at several peers as words."""
    ptrs, tile, mask = at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH)
    payload = tile.to(tl.int32, bitcast=True)
    packets.send(peers, ptrs, payload, peer, mask=mask)


@triton.jit
def _packed(rows):
    """Quantise rows to 16-bit integers, two per word; the unit is a row's max magnitude / 32767.

    Args:
        rows: float32 [ROWS, WIDTH]. A row with an infinity or a NaN becomes all NaN; one whose
            largest magnitude is below 1e-30 becomes 0.

    Returns:
        int32 [ROWS, WIDTH / 2], and the unit of each row, float32 [ROWS].
    """
    largest = tl.max(tl.abs(rows), 1)
    is_zero = largest < 1e-30  # the reciprocal of a smaller value may be infinite
    per_unit = 32767 / tl.where(is_zero, 1.0, largest)
    integers = tl.floor(rows * per_unit[:, None] + 0.5).to(tl.int32)
    integers += 32767  # from 0 to 65534: no two of them are an EMPTY word
    low, high = tl.split(tl.reshape(integers, (rows.shape[0], rows.shape[1] // 2, 2)))
    unit = tl.where(is_zero, 0.0, largest / 32767) + tl.sum(rows * 0.0, 1)
    return (low & 0xFFFF) | (high << 16), unit


@triton.jit
def received_rows(
    row, slot_ptr, part_elements, rows, peers, GROUP: tl.constexpr, V_DIM: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Wait for all ranks' words of some rows, and merge them.

    A single wait covers a row's values and its log-sum-exp, which is loaded once per value, so that
    both are in one lane. Packed rows load a quarter as much, because polls take memory bandwidth
    from programs that still send: one log-sum-exp or unit, alternately, per word of two values.

    Returns:
        out float32 [ROWS, next_power_of_2(V_DIM)], and whether all words have arrived.
    """
    SOURCES: tl.constexpr = triton.next_power_of_2(GROUP.WORLD)
    WIDTH: tl.constexpr = V_DIM // 2 if PACKED else V_DIM
    HALF: tl.constexpr = triton.next_power_of_2(V_DIM) // (2 if PACKED else 1)
    lane, column = tl.arange(0, SOURCES), tl.arange(0, 2 * HALF)
    source = lane % GROUP.WORLD
    if PACKED:
        offsets = tl.where(
            column[None, :] < HALF,
            row[:, None] * WIDTH + tl.minimum(column, WIDTH - 1)[None, :],
            rows * WIDTH + row[:, None] * 4 + column[None, :] % 4,
        )
    else:
        offsets = tl.where(
            column[None, :] < WIDTH, row[:, None] * WIDTH + column[None, :],
            rows * WIDTH + row[:, None],
        )  # fmt: skip
    parts = slot_ptr + source.to(tl.int64) * part_elements
    payload, arrived = packets.receive(
        peers, parts[:, None, None] + offsets[None, :, :], source[:, None, None], GROUP
    )
    if PACKED:
        out = _merged_integers(payload, lane < GROUP.WORLD)
    else:
        out = _merged_floats(payload, lane < GROUP.WORLD)
    return out, arrived


@triton.jit
def _merged_floats(payload, is_source):
    """Merge [SOURCES, ROWS, 2 * WIDTH]: values, then the log-sum-exp for each of them."""
    WIDTH: tl.constexpr = payload.shape[2] // 2
    both = tl.reshape(
        payload.to(tl.float32, bitcast=True), (payload.shape[0], payload.shape[1], 2, WIDTH)
    )
    out, lse = tl.split(tl.permute(both, (0, 1, 3, 2)))
    weight, total = _weights(lse, is_source)
    return tl.sum(out * weight, 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def _merged_integers(payload, is_source):
    """Merge [SOURCES, ROWS, 2 * WORDS]: words, then log-sum-exp and unit for each two of them."""
    PAIRS: tl.constexpr = payload.shape[2] // 4
    both = tl.reshape(payload, (payload.shape[0], payload.shape[1], 2, PAIRS, 2))
    words, lse_and_unit = tl.split(tl.permute(both, (0, 1, 3, 4, 2)))
    lse, unit = tl.split(lse_and_unit)
    weight, total = _weights(lse.to(tl.float32, bitcast=True), is_source)
    scale = weight * unit.to(tl.float32, bitcast=True)
    divisor = tl.where(total > 0, total, 1.0)
    out = tl.sum(_unpacked(words) * scale[:, :, :, None, None], 0) / divisor[:, :, None, None]
    return tl.reshape(out, (payload.shape[1], 4 * PAIRS))


@triton.jit
def _unpacked(words):
    """float32 [..., 2]: the integers in each of `words`."""
    return tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF).to(tl.float32) - 32767


@triton.jit
def _weights(lse, is_source):
    """The weights of all ranks' parts, [SOURCES, ...] as `lse` is, and their sum."""
    lse = tl.where(is_source[:, None, None], lse, float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # rows without keys: all weights are 0
    weight = tl.exp2(lse - top[None, :, :])
    return weight, tl.sum(weight, 0)


_LSE_BLOCK = tl.constexpr(64)  # log-sum-exps that are copied at a time


class Inbox(NamedTuple):
    """The inbox: slots with one part of every rank.

    Args:
        ptr: float32; words if LL.
        stride_slot, stride_part: elements from one slot, or part, to the next.
        counters_ptr: int32 [XCD_SIGNALS], 0 between launches; None if that is 0.
    """

    ptr: Any
    stride_slot: Any
    stride_part: Any
    counters_ptr: Any = None


class Exchange(NamedTuple):
    """The constants of exchanging and combining parts: ``EXCHANGE: tl.constexpr``.

    Args:
        CHUNK_ROWS: rows that have a signal of their own.
        LL: words replace rows and signals: LL packets or, if PACKED, Lamport words.
        SOURCES_BLOCK: ranks whose parts are loaded at a time.
        V_DIM: of the problem.
        OUT_ROWS: rows that a combiner merges.
        XCD_SIGNALS: chiplets whose programs signal their chunks together; 0 if each signals.
    """

    CHUNK_ROWS: int
    LL: bool
    PACKED: bool
    SOURCES_BLOCK: int
    V_DIM: int
    OUT_ROWS: int
    XCD_SIGNALS: int = 0


@triton.jit
def slot_of_parts(inbox, control_ptr, generation, PACKED: tl.constexpr):
    """The slot of this call, and the number that selects it: the generation; the turn if PACKED."""
    turn, number = generation, generation % 2
    if PACKED:
        turn = packets.running_turn(control_ptr)
        number = turn % 3
    return inbox.ptr + number * inbox.stride_slot, turn


@triton.jit
def merge_into_inboxes(
    chunk, peer, peer_mask, parts, slot_ptr, part_elements, rows, peers,
    EXCHANGE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Merge this rank's splits for one chunk of rows into the inboxes of a block of ranks."""
    V_DIM: tl.constexpr = MERGE.V_DIM
    end = min((chunk + 1) * EXCHANGE.CHUNK_ROWS, rows)
    own_ptr = slot_ptr + peers.rank.to(tl.int64) * part_elements
    out_ptrs = translate(own_ptr + peer * 0, peers, peer)
    for first in range(chunk * EXCHANGE.CHUNK_ROWS, end, MERGE.ROWS):
        row = first + tl.arange(0, MERGE.ROWS)
        mask = row < end
        out, lse = merge_splits(row, mask, parts, MERGE)
        store_at_peers(out_ptrs, peer_mask, out, row, mask, V_DIM)
        store_at_peers(out_ptrs + rows * V_DIM, peer_mask, lse[:, None], row, mask, 1)


@triton.jit
def merge_and_push(
    chunk, parts, slot_ptr, part_elements, rows, peers,
    GROUP: tl.constexpr, EXCHANGE: tl.constexpr, MERGE: tl.constexpr, chunks=0, counters_ptr=None,
):  # fmt: skip
    """Merge this rank's splits for one chunk of rows into every rank's inbox, and signal all.

    Args:
        chunks, counters_ptr: used with XCD_SIGNALS: programs that push, each one chunk with its own
            id as number, and int32 [XCD_SIGNALS].
    """
    peer, peer_mask = every_rank(peers.rank, GROUP)
    if EXCHANGE.LL:
        merge_into_words(
            chunk, peer, peer_mask, parts, slot_ptr, part_elements, rows, peers, EXCHANGE, MERGE
        )
    else:
        merge_into_inboxes(
            chunk, peer, peer_mask, parts, slot_ptr, part_elements, rows, peers, EXCHANGE, MERGE
        )
        if EXCHANGE.XCD_SIGNALS:
            signal_by_chiplet(chunk, chunks, counters_ptr, peers, GROUP, EXCHANGE.XCD_SIGNALS)
        else:
            sync.signal(peers, chunk, peer, GROUP, mask=peer_mask)


@triton.jit
def send_chunk(
    sender, part_ptr, slot_ptr, part_elements, rows, peers, GROUP: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, V_DIM: tl.constexpr, SEND_BLOCK: tl.constexpr,
):  # fmt: skip
    """Send one chunk of this rank's part to one rank's inbox, and signal it."""
    chunk = sender // GROUP.WORLD
    # not all ranks to the same peer at once
    peer = (peers.rank + 1 + sender % GROUP.WORLD) % GROUP.WORLD
    begin = chunk * CHUNK_ROWS
    end = min(begin + CHUNK_ROWS, rows)
    own_ptr = slot_ptr + peers.rank.to(tl.int64) * part_elements
    target_ptr = translate(own_ptr, peers, peer)
    copy(target_ptr, part_ptr, begin * V_DIM, end * V_DIM, SEND_BLOCK)
    copy(target_ptr + rows * V_DIM, part_ptr + rows * V_DIM, begin, end, _LSE_BLOCK)
    sync.signal(peers, chunk, peer, GROUP)


@triton.jit
def wait_for_rows(begin, end, peers, GROUP: tl.constexpr, EXCHANGE: tl.constexpr):
    """Wait for all chunks with rows [begin, end), at most OUT_ROWS; return whether they arrived."""
    CHUNK_ROWS: tl.constexpr = EXCHANGE.CHUNK_ROWS
    most_chunks: tl.constexpr = (EXCHANGE.OUT_ROWS + CHUNK_ROWS - 2) // CHUNK_ROWS + 1
    return wait_for_channels(
        peers, begin // CHUNK_ROWS, tl.cdiv(end, CHUNK_ROWS), GROUP, most_chunks,
        XCDS=EXCHANGE.XCD_SIGNALS,
    )  # fmt: skip


@triton.jit
def combine(
    tile, slot_ptr, out_ptr, part_elements, rows, peers,
    GROUP: tl.constexpr, EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Wait for all ranks' parts of a tile of OUT_ROWS rows, and merge them into the output."""
    V_DIM: tl.constexpr = EXCHANGE.V_DIM
    OUT_ROWS: tl.constexpr = EXCHANGE.OUT_ROWS
    begin = tile * OUT_ROWS
    row = begin + tl.arange(0, OUT_ROWS)
    row_mask = row < rows
    if EXCHANGE.LL:
        out, arrived = received_rows(
            tl.minimum(row, rows - 1), slot_ptr, part_elements, rows, peers, GROUP, V_DIM,
            EXCHANGE.PACKED,
        )  # fmt: skip
    else:
        end = min(begin + OUT_ROWS, rows)
        arrived = wait_for_rows(begin, end, peers, GROUP, EXCHANGE)
        out, _ = merge_ranks(
            row, row_mask, slot_ptr, part_elements, rows, GROUP, EXCHANGE.SOURCES_BLOCK, V_DIM
        )
    store_output(out_ptr, tl.where(arrived, out, float("nan")), row, row_mask, V_DIM)
