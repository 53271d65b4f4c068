"""Device functions that exchange parts: each rank's inbox holds a part of every rank.

A chunk of rows has a channel of its own. A rank sends to itself, too, so that its own part is
waited for like the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.exchange import signal_by_chiplet, wait_for_channels
from taxfree_kernels.device.peers import translate
from taxfree_kernels.device.tiles import copy
from taxfree_kernels.flash_decode.merge import merge_ranks, merge_splits, store_output
from taxfree_kernels.flash_decode.packets import (
    every_rank,
    merge_into_words,
    received_rows,
    store_at_peers,
)

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
def running_slot(inbox, control_ptr, generation, PACKED: tl.constexpr):
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
