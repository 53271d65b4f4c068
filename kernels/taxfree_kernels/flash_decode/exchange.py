"""Device functions that exchange parts: each rank's inbox holds a part of every rank.

A chunk of rows has a channel of its own. A rank sends to itself, too, so that its own part is
waited for like the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.exchange import wait_for_channels
from taxfree_kernels.device.peers import translate
from taxfree_kernels.device.tiles import copy
from taxfree_kernels.flash_decode.merge import merge_ranks, merge_splits, store_output
from taxfree_kernels.flash_decode.packets import merge_into_words, received_rows
from taxfree_kernels.flash_decode.peers import every_rank, store_at_peers

_LSE_BLOCK = tl.constexpr(64)  # log-sum-exps that are copied at a time


@triton.jit
def running_slot(inbox_ptr, slot_elements, control_ptr, generation, PACKED: tl.constexpr):
    """The slot of this call, and what selects it: the generation, or the turn if PACKED."""
    turn, number = generation, generation % 2
    if PACKED:
        turn = packets.running_turn(control_ptr)
        number = turn % 3
    return inbox_ptr + number * slot_elements, turn


@triton.jit
def merge_into_inboxes(
    chunk, peer, peer_mask, parts_ptr, split_elements, runs_ptr, slot_ptr, part_elements, rows,
    peers, CHUNK_ROWS: tl.constexpr, Q_HEADS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge this rank's splits for one chunk of rows into the inboxes of a block of ranks."""
    end = min((chunk + 1) * CHUNK_ROWS, rows)
    own_ptr = slot_ptr + peers.rank.to(tl.int64) * part_elements
    out_ptrs = translate(own_ptr + peer * 0, peers, peer)
    for first in range(chunk * CHUNK_ROWS, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = row < end
        out, lse = merge_splits(
            row, mask, parts_ptr, split_elements, runs_ptr, Q_HEADS, PARTS, PARTS_BLOCK, V_DIM
        )
        store_at_peers(out_ptrs, peer_mask, out, row, mask, V_DIM)
        store_at_peers(out_ptrs + rows * V_DIM, peer_mask, lse[:, None], row, mask, 1)


@triton.jit
def merge_and_push(
    chunk, parts_ptr, split_elements, runs_ptr, slot_ptr, part_elements, rows, peers,
    GROUP: tl.constexpr, CHUNK_ROWS: tl.constexpr, LL: tl.constexpr, PACKED: tl.constexpr,
    Q_HEADS: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Merge this rank's splits for one chunk of rows into every rank's inbox, and tell all.

    Args:
        slot_ptr: float32, or words if LL, which need no signal to announce them.
        PACKED: whether the words are bare and carry two values each; see :func:`_packed`.
    """
    peer, peer_mask = every_rank(peers.rank, GROUP)
    if LL:
        merge_into_words(
            chunk, peer, peer_mask, parts_ptr, split_elements, runs_ptr, slot_ptr, part_elements,
            rows, peers, CHUNK_ROWS, PACKED, Q_HEADS, PARTS, PARTS_BLOCK, V_DIM, ROWS,
        )  # fmt: skip
    else:
        merge_into_inboxes(
            chunk, peer, peer_mask, parts_ptr, split_elements, runs_ptr, slot_ptr, part_elements,
            rows, peers, CHUNK_ROWS, Q_HEADS, PARTS, PARTS_BLOCK, V_DIM, ROWS,
        )  # fmt: skip
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
def wait_for_rows(
    begin, end, peers, GROUP: tl.constexpr, CHUNK_ROWS: tl.constexpr, ROWS: tl.constexpr
):
    """Wait for every rank's chunks that hold rows [begin, end), at most ROWS; whether all came."""
    most_chunks: tl.constexpr = (ROWS + CHUNK_ROWS - 2) // CHUNK_ROWS + 1
    return wait_for_channels(
        peers, begin // CHUNK_ROWS, tl.cdiv(end, CHUNK_ROWS), GROUP, most_chunks
    )


@triton.jit
def combine(
    tile, slot_ptr, out_ptr, part_elements, rows, peers, GROUP: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, LL: tl.constexpr, SOURCES_BLOCK: tl.constexpr, V_DIM: tl.constexpr,
    OUT_ROWS: tl.constexpr, PACKED: tl.constexpr = False,
):  # fmt: skip
    """Merge all ranks' parts of a tile of OUT_ROWS rows into the output, once they have come."""
    begin = tile * OUT_ROWS
    row = begin + tl.arange(0, OUT_ROWS)
    row_mask = row < rows
    if LL:
        out, arrived = received_rows(
            tl.minimum(row, rows - 1), slot_ptr, part_elements, rows, peers, GROUP, V_DIM, PACKED
        )
    else:
        arrived = wait_for_rows(
            begin, min(begin + OUT_ROWS, rows), peers, GROUP, CHUNK_ROWS, OUT_ROWS
        )
        out, _ = merge_ranks(
            row, row_mask, slot_ptr, part_elements, rows, GROUP, SOURCES_BLOCK, V_DIM
        )
    store_output(out_ptr, tl.where(arrived, out, float("nan")), row, row_mask, V_DIM)
