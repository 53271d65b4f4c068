"""Partial sums as words of two elements each: device functions, plan and variant."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets
from taxfree_kernels.device.peers import LAMPORT_SLOT_BYTES, LL_SLOT_BYTES, translate
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.reduction import fused, spaces
from taxfree_kernels.variant import Config, PartialSum, Space

#: Most elements of an output, two in a packet, whose packets from 8 ranks fit a slot.
MOST_ELEMENTS = 2 * (LL_SLOT_BYTES // 8) // 8


@triton.jit
def words_of(tile, ELEMENT: tl.constexpr):
    """int32 [M * N / 2]: the elements of `tile`, [M, N], rounded to 16 bits, two in a word."""
    pairs = tl.reshape(tile.to(ELEMENT), [tile.numel // 2, 2]).to(tl.uint16, bitcast=True)
    low, high = tl.split(pairs.to(tl.int32))
    return low | (high << 16)


@triton.jit
def halves_of(words, ELEMENT: tl.constexpr):
    """The two elements of each of `words`, int32, as float32."""
    low = (words & 0xFFFF).to(tl.uint16).to(ELEMENT, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(ELEMENT, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def sum_by_words(
    own_words,
    offsets,
    mask,
    slot_ptr,
    stride_source,
    peers,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Send words to every peer, wait for the same words from every peer, and add them.

    Args:
        own_words: int32 [WORDS], this rank's words.
        offsets: theirs in a source's block of the slot; all must lie in the slot.
        mask: words that are exchanged.
        slot_ptr: rank 0's block; blocks are `stride_source` words apart.

    Returns:
        float32 [2 * WORDS], added in rank order, and whether all words have arrived.
    """
    own_ptr = slot_ptr + peers.rank.to(tl.int64) * stride_source
    for step in tl.static_range(1, GROUP.WORLD):
        peer = (peers.rank + step) % GROUP.WORLD
        target_ptr = translate(own_ptr, peers, peer)
        packets.send(peers, target_ptr + offsets, own_words, peer, mask=mask)
    # One poll for all ranks; lanes beyond the last rank repeat its words.
    lane = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))[:, None]
    source = tl.minimum(lane, GROUP.WORLD - 1)
    needed = (source != peers.rank) & mask[None, :]
    words, arrived = packets.receive(
        peers, slot_ptr + source * stride_source + offsets[None, :], source, GROUP, mask=needed
    )
    words = tl.where(source == peers.rank, own_words[None, :], words)
    return _added(words, lane, ELEMENT, GROUP), arrived


@triton.jit
def sum_of_lamport_words(
    offsets, mask, slot_ptr, stride_source, peers, ELEMENT: tl.constexpr, GROUP: tl.constexpr
):
    """Like :func:`sum_by_words`, for Lamport words that all ranks, including this one, send."""
    lane = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))[:, None]
    source = tl.minimum(lane, GROUP.WORLD - 1)
    words, arrived = packets.receive(
        peers,
        slot_ptr + source * stride_source + offsets[None, :],
        source,
        GROUP,
        mask=mask[None, :],
    )
    return _added(words, lane, ELEMENT, GROUP), arrived


@triton.jit
def total_of_lamport_words(
    offsets, row, row_end, col, n, epilogue, slot_ptr, stride_source, peers,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Wait for all ranks' words of a sum of n columns, and add them, the bias and the residual.

    Args:
        offsets: int32 [LANES], of the words in a source's block.
        row, col: of each word's first element; rows from `row_end` on are not sent.

    Returns:
        float32 [2 * LANES], NaN if the words have not arrived; rows; columns.
    """
    total, arrived = sum_of_lamport_words(
        offsets, row < row_end, slot_ptr, stride_source, peers, ELEMENT, GROUP
    )
    rows, cols = _twice(row, 0), _twice(col, 1)
    total = fused.add_bias_residual(
        total, cols, cols < n, rows.to(tl.int64) * n + cols, (rows < row_end) & (cols < n),
        epilogue, EPILOGUE,
    )  # fmt: skip
    return tl.where(arrived, total, float("nan")), rows, cols


@triton.jit
def _twice(block, step):
    """Each element, followed by itself + `step`."""
    return tl.reshape(tl.join(block, block + step), (2 * block.numel,))


@triton.jit
def _added(words, lane, ELEMENT: tl.constexpr, GROUP: tl.constexpr):
    """float32 [2 * WORDS]: the sum of [SOURCES, WORDS], in rank order."""
    total_low = tl.zeros((words.shape[1],), tl.float32)
    total_high = tl.zeros((words.shape[1],), tl.float32)
    for rank_to_add in tl.static_range(GROUP.WORLD):
        low, high = halves_of(tl.sum(tl.where(lane == rank_to_add, words, 0), 0), ELEMENT)
        total_low += low
        total_high += high
    return tl.reshape(tl.join(total_low, total_high), [2 * words.shape[1]])


class LamportPlan(fused.FusedReductionPlan):
    """A plan whose inbox holds Lamport words."""

    def inbox(self, fabric: Fabric, config: Config, elements: int) -> tuple[torch.Tensor, int]:
        return fabric.pool.lamport_slots(elements)


class LamportVariant(fused.FusedReductionVariant):
    """A variant whose programs send the tiles that they compute, and add their own share."""

    slots = 3

    @abstractmethod
    def words(self, problem: PartialSum, config: Config) -> int:
        """The number of Lamport words of a slot that a call uses."""

    def unsupported_reason(self, problem: PartialSum, hardware: Hardware) -> str | None:
        reason = super().unsupported_reason(problem, hardware)
        if reason is None and not self.seed_configs(problem, hardware):
            return "its words fit no slot, or no program"
        return reason

    def space(self, problem: PartialSum, hardware: Hardware) -> Space:
        return {**spaces.tile_space(problem, hardware), "WIRE": problem.wires[:1]}

    def seed_configs(self, problem: PartialSum, hardware: Hardware) -> list[dict[str, Any]]:
        configs = [
            self.with_room(problem, hardware, config)
            for config in super().seed_configs(problem, hardware)
        ]
        return [config for config in configs if not self.illegal_reason(problem, hardware, config)]

    def with_room(self, problem: PartialSum, hardware: Hardware, config: Config) -> dict[str, Any]:
        """A seed config of tiles, changed so that the variant can run it."""
        return dict(config)

    def illegal_reason(self, problem: PartialSum, hardware: Hardware, config: Config) -> str | None:
        if 4 * self.words(problem, config) > LAMPORT_SLOT_BYTES:
            return "more words than a slot holds"
        return super().illegal_reason(problem, hardware, config)
