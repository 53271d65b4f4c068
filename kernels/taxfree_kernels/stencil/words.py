"""A step of a tile whose halo is Lamport words, which neighbours have sent before.

Words show by themselves that they have arrived. Those of step s lie in area s % 3, and the tile
that has read them makes them EMPTY.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets
from taxfree_kernels.device.peers import EMPTY, LAMPORT_SLOT_BYTES, Peers, translate
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.stencil import step
from taxfree_kernels.stencil.problem import AREAS, ITEM_BYTES, Stencil


class Inbox(NamedTuple):
    """Symmetric memory: Lamport words, and sums of squares, float64 [norms, WORLD]."""

    words_ptr: Any
    stride_words: Any
    sums_ptr: Any
    stride_sums: Any


def ends_of(problem: Stencil, fabric: Fabric) -> tuple[Any, ...]:
    """The inbox of a problem's calls, control words, the bases of heaps, and the rank."""
    inbox = Inbox(
        *fabric.pool.lamport_slots(AREAS * 2 * sum(problem.halo)),
        *fabric.pool.slots(max(problem.norms, 1) * problem.world_size, torch.float64),
    )
    return inbox, fabric.pool.control, fabric.heap_bases, fabric.rank


def too_large_reason(problem: Stencil) -> str | None:
    """Why a problem's halos fit no inbox, or None."""
    if AREAS * 2 * ITEM_BYTES * sum(problem.halo) > LAMPORT_SLOT_BYTES:
        return "halos are larger than a slot of words"
    return None


@triton.jit
def send_first(u_ptr, targets, area, tile, rows, peers, BOX: tl.constexpr):
    """Send what other ranks need of a tile for the first step."""
    for number in range(step.blocks_of(tile, rows, BOX)):
        block = step.block_of(tile, number, rows, BOX)
        values = step.loaded(u_ptr, block, rows, BOX)
        send_edges(values, targets, area, block, rows, peers, BOX)


@triton.jit
def relax_inside(
    source_ptr, target_ptr, tile, rows, rank, is_right, has_norm,
    BOX: tl.constexpr, HAS_EDGES: tl.constexpr,
):  # fmt: skip
    """A step of a tile without what others send; the sum of squares of what it changed.

    Args:
        has_norm: the step has one. Else the sum is 0.
        HAS_EDGES: it has points at shared sides, and leaves them out. Else it has none.
    """
    squares = tl.zeros((1,), tl.float64)
    for number in range(step.blocks_of(tile, rows, BOX)):
        block = step.block_of(tile, number, rows, BOX)
        squares += _relax(
            source_ptr, target_ptr, block, rows, rank, None, is_right, has_norm, BOX, HAS_EDGES
        )[0]
    return squares


@triton.jit
def relax_at_sides(
    source_ptr, target_ptr, received_ptr, targets, area, tile, rows, is_right, sends, has_norm,
    peers, GROUP: tl.constexpr, BOX: tl.constexpr,
):  # fmt: skip
    """The same of a tile at shared sides: it waits for halos, and sends its edges."""
    squares = tl.zeros((1,), tl.float64)
    for number in range(step.blocks_of(tile, rows, BOX)):
        block = step.block_of(tile, number, rows, BOX)
        if step.is_beside(block, peers.rank, rows, BOX):
            squares += relax_beside(
                source_ptr, target_ptr, received_ptr, targets, area, block, rows, is_right, sends,
                has_norm, peers, GROUP, BOX,
            )  # fmt: skip
        else:
            squares += _relax(
                source_ptr, target_ptr, block, rows, peers.rank, None, is_right, has_norm, BOX
            )[0]
    return squares


@triton.jit
def relax_beside(
    source_ptr, target_ptr, received_ptr, targets, area, block, rows, is_right, sends, has_norm,
    peers, GROUP: tl.constexpr, BOX: tl.constexpr,
):  # fmt: skip
    """The same of a block at shared sides.

    Args:
        received_ptr: the words of this step.
        area: where those of the next begin.
        sends: there is a next step.
    """
    above, has_above = _receive(received_ptr, block, rows, peers, GROUP, step.ABOVE, BOX)
    below, has_below = _receive(received_ptr, block, rows, peers, GROUP, step.BELOW, BOX)
    before, has_before = _receive(received_ptr, block, rows, peers, GROUP, step.BEFORE, BOX)
    after, has_after = _receive(received_ptr, block, rows, peers, GROUP, step.AFTER, BOX)
    arrived = is_right & has_above & has_below & has_before & has_after
    faces = (above, below, before, after)
    squares, values = _relax(
        source_ptr, target_ptr, block, rows, peers.rank, faces, arrived, has_norm, BOX
    )
    if sends:
        send_edges(values, targets, area, block, rows, peers, BOX)
    return squares


@triton.jit
def _relax(
    source_ptr, target_ptr, block, rows, rank, faces, is_right, has_norm,
    BOX: tl.constexpr, BUT_EDGES: tl.constexpr = False,
):  # fmt: skip
    """A step of a block: the sum of squares of what it changed, and the block behind it.

    Args:
        is_right: what it was computed from had arrived. Else it is NaN.
    """
    last, values = step.relaxed(source_ptr, block, rows, rank, faces, BOX)
    mask = step.inside(block, rows, BOX)
    if BUT_EDGES:
        for SIDE in tl.static_range(step.SIDES):
            # not `is_shared`: under Triton 3.6 what a function returns is a run-time value
            if (BOX.DOWN if SIDE < 2 else BOX.ACROSS) > 1:
                is_edge = step.at_side(block, rows, SIDE, BOX)
                mask = mask & ((is_edge & (step.rank_at(rank, SIDE, BOX) >= 0)) == 0)
    place = target_ptr + step.offsets(block, BOX)
    values = tl.where(is_right, values, float("nan"))
    tl.store(place, values, mask=mask)
    squares = tl.zeros((1,), tl.float64)
    if has_norm:
        squares += step.squared_change(last, values, mask)
    return squares, values


@triton.jit
def area_at(step_number, turn, inbox, rows, BOX: tl.constexpr):
    """Where the words that a step receives begin, from the first slot."""
    slot, area = turn % 3 * inbox.stride_words, step_number % 3
    of_rows = 2 * BOX.COLUMNS * BOX.DEPTH * (BOX.DOWN > 1)
    return slot + area * (of_rows + 2 * rows * BOX.DEPTH * (BOX.ACROSS > 1))


@triton.jit
def _words_at(words_ptr, heap_bases, rank, SIDE: tl.constexpr, BOX: tl.constexpr):
    """The words of the rank at a side, or of this one where there is none."""
    other = step.rank_at(rank, SIDE, BOX)
    return translate(
        words_ptr, Peers(None, heap_bases, rank, None), tl.where(other < 0, rank, other)
    )


@triton.jit
def targets_of(words_ptr, heap_bases, rank, BOX: tl.constexpr):
    """For each side, the words of the rank there.

    To be called before any store, so that AMD's compiler knows them to be the same in all lanes.
    """
    return [
        _words_at(words_ptr, heap_bases, rank, SIDE, BOX)
        for SIDE in (step.ABOVE, step.BELOW, step.BEFORE, step.AFTER)
    ]


@triton.jit
def _receive(
    words_ptr, block, rows, peers, GROUP: tl.constexpr, SIDE: tl.constexpr, BOX: tl.constexpr
):
    """A block's neighbours at a side that another rank has, and whether they have arrived."""
    at, has = step.halo_offsets(block, rows, SIDE, BOX)
    other = step.rank_at(peers.rank, SIDE, BOX)
    comes = (other >= 0) & step.reaches(block, rows, SIDE, BOX)
    if len(at.shape) == 1:
        has = has & step.at_side(block, rows, SIDE, BOX)
        if (BOX.ACROSS > 1) | (BOX.COLUMNS * BOX.DEPTH % BOX.BLOCK_1 != 0):
            # another program's words are not even loaded
            own = tl.max(tl.where(has, at, -1), 0)
            at = tl.where(has, at, own)
            comes = comes & (own >= 0)
    words, arrived = tl.zeros(at.shape, tl.int32), tl.num_programs(0) > 0
    if step.is_shared(SIDE, BOX):
        if comes:
            words, arrived = packets.receive(peers, words_ptr + at, other, GROUP, mask=has)
            empty = tl.full(at.shape, EMPTY, tl.int32)
            tl.store(words_ptr + at, empty, mask=has, cache_modifier=".wt")
    return words.to(tl.float32, bitcast=True), arrived


@triton.jit
def send_edges(values, targets, area, block, rows, peers, BOX: tl.constexpr):
    """Send the points of a block that other ranks need, to the opposite sides of their halos."""
    words = values.to(tl.int32, bitcast=True)
    for SIDE in tl.static_range(step.SIDES):
        if step.is_shared(SIDE, BOX):
            other = step.rank_at(peers.rank, SIDE, BOX)
            if (other >= 0) & step.reaches(block, rows, SIDE, BOX):
                at, has = step.halo_offsets(block, rows, SIDE ^ 1, BOX)
                target_ptr = targets[SIDE] + area + at + tl.zeros_like(words)
                mask = step.at_side(block, rows, SIDE, BOX) & has
                packets.send(peers, target_ptr, words, other, mask=mask)
