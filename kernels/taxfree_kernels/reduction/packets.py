"""Device functions for partial sums that are sent as words of two elements each."""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.reduction.epilogue import add_bias_residual

MOST_WORDS = 1 << 19  # that a pool's slot of them has
#: Most elements of the output: their words from 8 ranks fill a pool's slot of them.
MOST_ELEMENTS = MOST_WORDS * 2 // 8


@triton.jit
def words_of(tile, ELEMENT: tl.constexpr):
    """int32 [M * N / 2]: the elements of `tile`, [M, N], rounded to 16 bits, two in a word."""
    pairs = tl.reshape(tile.to(ELEMENT), [tile.numel // 2, 2]).to(tl.uint16, bitcast=True)
    low, high = tl.split(pairs.to(tl.int32))
    return low | (high << 16)


@triton.jit
def halves_of(words, ELEMENT: tl.constexpr):
    """The two elements that each of `words`, int32, consists of, as float32."""
    low = (words & 0xFFFF).to(tl.uint16).to(ELEMENT, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(ELEMENT, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def sum_by_words(
    own, at, mask, slot_ptr, stride_source, control_ptr, generation, heap_bases, rank,
    ELEMENT: tl.constexpr, WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Send words to every peer, wait for the same words of every peer's, and add them.

    Args:
        own: int32 [WORDS], of this rank.
        at: their places among a source's words, all of which are in the slot.
        mask: which of them are exchanged.
        slot_ptr: rank 0's words, the others `stride_source` words apart.

    Returns:
        float32 [2 * WORDS], added in the ranks' order, and whether all words have come.
    """
    own_ptr = slot_ptr + rank.to(tl.int64) * stride_source
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        target_ptr = sync.translate(own_ptr, heap_bases, rank, peer)
        sync.send(control_ptr, target_ptr + at, own, peer, generation, mask=mask)
    # One poll for all ranks; lanes beyond the last rank look at its words again.
    lane = tl.arange(0, triton.next_power_of_2(WORLD))[:, None]
    source = tl.minimum(lane, WORLD - 1)
    needed = (source != rank) & mask[None, :]
    words, arrived = sync.receive(
        control_ptr, slot_ptr + source * stride_source + at[None, :], source, generation,
        heap_bases, rank, mask=needed, WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip
    words = tl.where(source == rank, own[None, :], words)
    return _added(words, lane, ELEMENT, WORLD), arrived


@triton.jit
def sum_of_lamport_words(
    at, mask, slot_ptr, stride_source, control_ptr, generation, heap_bases, rank,
    ELEMENT: tl.constexpr, WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """As :func:`sum_by_words`, of Lamport words that every rank has sent, this one too."""
    lane = tl.arange(0, triton.next_power_of_2(WORLD))[:, None]
    source = tl.minimum(lane, WORLD - 1)
    words, arrived = sync.receive(
        control_ptr, slot_ptr + source * stride_source + at[None, :], source, generation,
        heap_bases, rank, mask=mask[None, :], WORLD=WORLD, BACKEND=BACKEND,
    )  # fmt: skip
    return _added(words, lane, ELEMENT, WORLD), arrived


@triton.jit
def total_of_lamport_words(
    place, row, row_end, col, n, bias_ptr, residual_ptr,
    slot_ptr, stride_source, control_ptr, generation, heap_bases, rank,
    ELEMENT: tl.constexpr, WORLD: tl.constexpr, BACKEND: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Wait for all ranks' words of a sum of n columns, and add them, the bias and the residual.

    Args:
        place: int32 [LANES], where the words are among a source's.
        row, col: of the first element of each; rows from `row_end` on nobody has sent.

    Returns:
        float32 [2 * LANES], NaN when the words have not come, and of each the row and the column.
    """
    total, arrived = sum_of_lamport_words(
        place, row < row_end, slot_ptr, stride_source, control_ptr, generation, heap_bases, rank,
        ELEMENT, WORLD, BACKEND,
    )  # fmt: skip
    rows, cols = _twice(row, 0), _twice(col, 1)
    total = add_bias_residual(
        total, cols, cols < n, rows.to(tl.int64) * n + cols, (rows < row_end) & (cols < n),
        bias_ptr, residual_ptr, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    return tl.where(arrived, total, float("nan")), rows, cols


@triton.jit
def _twice(block, step):
    """Each element, and behind it the same and `step`."""
    return tl.reshape(tl.join(block, block + step), (2 * block.numel,))


@triton.jit
def _added(words, lane, ELEMENT: tl.constexpr, WORLD: tl.constexpr):
    """float32 [2 * WORDS]: the sum of [SOURCES, WORDS], in the ranks' order."""
    total_low = tl.zeros((words.shape[1],), tl.float32)
    total_high = tl.zeros((words.shape[1],), tl.float32)
    for rank_to_add in tl.static_range(WORLD):
        low, high = halves_of(tl.sum(tl.where(lane == rank_to_add, words, 0), 0), ELEMENT)
        total_low += low
        total_high += high
    return tl.reshape(tl.join(total_low, total_high), [2 * words.shape[1]])
