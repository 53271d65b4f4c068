"""Device functions for parts that travel as flag-in-data words, which no signal has to follow.

A word carries a float32, or two integers of 16 bits where rows are packed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.flash_decode.merge import merge_splits
from taxfree_kernels.flash_decode.peers import at_peers


@triton.jit
def merge_into_words(
    chunk, peer, peer_mask, parts_ptr, split_elements, runs_ptr, slot_ptr, part_elements, rows,
    control_ptr, generation, heap_bases, rank,
    CHUNK_ROWS: tl.constexpr, PACKED: tl.constexpr, Q_HEADS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As :func:`merge_into_inboxes`, but what is stored are flag-in-data words.

    Of rows that are PACKED, the words of all rows come first, then each row's log-sum-exp and unit.
    """
    end = min((chunk + 1) * CHUNK_ROWS, rows)
    own_ptr = slot_ptr + rank.to(tl.int64) * part_elements
    out_ptrs = sync.translate(own_ptr + peer * 0, heap_bases, rank, peer)
    to = peer[:, None, None]
    for first in range(chunk * CHUNK_ROWS, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = row < end
        out, lse = merge_splits(
            row, mask, parts_ptr, split_elements, runs_ptr, Q_HEADS, PARTS, PARTS_BLOCK, V_DIM
        )
        if PACKED:
            words, unit = _packed(out)
            _send_to_peers(
                out_ptrs, peer_mask, words, row, mask, control_ptr, to, generation, V_DIM // 2
            )
            _send_to_peers(
                out_ptrs + rows * (V_DIM // 2), peer_mask, tl.join(lse, unit), row, mask,
                control_ptr, to, generation, 2,
            )  # fmt: skip
        else:
            _send_to_peers(out_ptrs, peer_mask, out, row, mask, control_ptr, to, generation, V_DIM)
            _send_to_peers(
                out_ptrs + rows * V_DIM, peer_mask, lse[:, None], row, mask, control_ptr, to,
                generation, 1,
            )  # fmt: skip


@triton.jit
def _send_to_peers(
    peer_ptrs, peer_mask, tile, row, row_mask, control_ptr, peer, generation, WIDTH: tl.constexpr
):
    """Store rows of 32 bits each at several peers as flag-in-data words."""
    ptrs, tile, mask = at_peers(peer_ptrs, peer_mask, tile, row, row_mask, WIDTH)
    payload = tile.to(tl.int32, bitcast=True)
    sync.send(control_ptr, ptrs, payload, peer, generation, mask=mask)


@triton.jit
def _packed(rows):
    """Rows as integers of 16 bits, two in a word, of a row's largest magnitude / 32767.

    Args:
        rows: float32 [ROWS, WIDTH]. One with an infinity or a NaN becomes NaN as a whole, one
            of less than 1e-30 becomes 0.

    Returns:
        int32 [ROWS, WIDTH / 2], and the unit of each row, float32 [ROWS].
    """
    largest = tl.max(tl.abs(rows), 1)
    is_zero = largest < 1e-30  # the reciprocal of less may be infinite
    per_unit = 32767 / tl.where(is_zero, 1.0, largest)
    integers = tl.floor(rows * per_unit[:, None] + 0.5).to(tl.int32)
    low, high = tl.split(tl.reshape(integers, (rows.shape[0], rows.shape[1] // 2, 2)))
    unit = tl.where(is_zero, 0.0, largest / 32767) + tl.sum(rows * 0.0, 1)
    return (low & 0xFFFF) | (high << 16), unit


@triton.jit
def received_rows(
    row, slot_ptr, part_elements, rows, control_ptr, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, V_DIM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Wait for all ranks' words of some rows, and merge them.

    Returns:
        out float32 [ROWS, next_power_of_2(V_DIM)], and whether all words have come.
    """
    if PACKED:
        out, arrived = _received_integers(
            row, slot_ptr, part_elements, rows, control_ptr, generation, heap_bases, rank,
            WORLD, BACKEND, V_DIM,
        )  # fmt: skip
    else:
        out, arrived = _received_floats(
            row, slot_ptr, part_elements, rows, control_ptr, generation, heap_bases, rank,
            WORLD, BACKEND, V_DIM,
        )  # fmt: skip
    return out, arrived


@triton.jit
def _received_floats(
    row, slot_ptr, part_elements, rows, control_ptr, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """As :func:`received_rows`.

    A poll loads the log-sum-exp of a row once for each value: one wait is for both, and they meet
    in one lane.
    """
    BLOCK_V: tl.constexpr = triton.next_power_of_2(V_DIM)
    SOURCES: tl.constexpr = triton.next_power_of_2(WORLD)
    lane, column = tl.arange(0, SOURCES), tl.arange(0, 2 * BLOCK_V)
    source = lane % WORLD
    offsets = tl.where(
        column[None, :] < V_DIM, row[:, None] * V_DIM + column[None, :], rows * V_DIM + row[:, None]
    )
    parts = slot_ptr + source.to(tl.int64) * part_elements
    payload, arrived = sync.receive(
        control_ptr, parts[:, None, None] + offsets[None, :, :], source[:, None, None],
        generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip
    both = tl.reshape(payload.to(tl.float32, bitcast=True), (SOURCES, row.shape[0], 2, BLOCK_V))
    out, lse = tl.split(tl.permute(both, (0, 1, 3, 2)))
    weight, total = _weights(lse, lane < WORLD)
    return tl.sum(out * weight, 0) / tl.where(total > 0, total, 1.0), arrived


@triton.jit
def _received_integers(
    row, slot_ptr, part_elements, rows, control_ptr, generation, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """As :func:`_received_floats`, with half of its loads.

    Who polls takes memory's time from those who still send. A row's log-sum-exp and unit are loaded
    in turns, one for each word of two values: two words, four values, meet both in one lane.
    """
    PAIRS: tl.constexpr = triton.next_power_of_2(V_DIM) // 2
    SOURCES: tl.constexpr = triton.next_power_of_2(WORLD)
    lane, column = tl.arange(0, SOURCES), tl.arange(0, 2 * PAIRS)
    source = lane % WORLD
    offsets = tl.where(
        column[None, :] < PAIRS,
        row[:, None] * (V_DIM // 2) + tl.minimum(column, V_DIM // 2 - 1)[None, :],
        rows * (V_DIM // 2) + row[:, None] * 2 + column[None, :] % 2,
    )
    parts = slot_ptr + source.to(tl.int64) * part_elements
    payload, arrived = sync.receive(
        control_ptr, parts[:, None, None] + offsets[None, :, :], source[:, None, None],
        generation, heap_bases, rank, WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip
    both = tl.reshape(payload, (SOURCES, row.shape[0], 2, PAIRS // 2, 2))
    words, lse_and_unit = tl.split(tl.permute(both, (0, 1, 3, 4, 2)))
    lse, unit = tl.split(lse_and_unit)
    weight, total = _weights(lse.to(tl.float32, bitcast=True), lane < WORLD)
    scale = weight * unit.to(tl.float32, bitcast=True)
    divisor = tl.where(total > 0, total, 1.0)
    out = tl.sum(_unpacked(words) * scale[:, :, :, None, None], 0) / divisor[:, :, None, None]
    return tl.reshape(out, (row.shape[0], 2 * PAIRS)), arrived


@triton.jit
def _unpacked(words):
    """float32 [..., 2]: the integers in each of `words`."""
    return tl.join((words << 16) >> 16, words >> 16).to(tl.float32)


@triton.jit
def _weights(lse, is_source):
    """The weights of all ranks' parts, [SOURCES, ...] as `lse` is, and their sum."""
    lse = tl.where(is_source[:, None, None], lse, float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # rows without keys: all weights become 0
    weight = tl.exp2(lse - top[None, :, :])
    return weight, tl.sum(weight, 0)
