"""Device functions that store rows at several peers at once, as plain data or as words.

Words need no signal. An LL packet carries one float32; for packed rows, a Lamport word carries two
16-bit integers. The values of all rows come first, then each row's log-sum-exp. For packed rows,
log-sum-exp and unit follow, twice, to fill the 16 bytes that receivers load at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import packets
from taxfree_kernels.device.peers import translate
from taxfree_kernels.flash_decode.merge import merge_splits


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
