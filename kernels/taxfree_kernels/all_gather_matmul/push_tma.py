"""``push`` with tiles loaded by Hopper's Tensor Memory Accelerator (TMA), and few senders.

TMA copies W and A to shared memory, so no thread computes addresses. This doubles the rate of a
tile: on one H200 with all waits passing, 86 us at M = 1024 where ``push``'s tiles take 162. So from
M = 64 on a fused kernel, which removes the launch and most of the bulk-synchronous tax, beats the
vendor's matmul after a gather. SENDERS programs loop over all messages, so that a large shard does
not keep tiles from starting. From M = 256 on, where the link takes half as long as the matmul,
tiles begin with the data that arrives first. With gather_dim 0 that is the first of K_PARTS parts
of K, which goes to all ranks before the next part; with gather_dim 1 it is the shards of the next
SOURCES_PER_WAIT ranks.

Protocol. As in ``push``, with three differences. Peers' stores reach the inbox through the generic
proxy and TMA reads through the async proxy, so a proxy fence follows each wait. Each part of K has
channels of its own, and tiles wait for one part after another. A TMA load reads from one tensor
only. Therefore a rank also sends its rows to its own inbox if they come in parts, or if they share
tiles with peers' rows (shards that are not a multiple of BLOCK_M). Tiles wait for them as for
peers' rows, and their senders are programs with lower ids.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from taxfree_kernels.all_gather_matmul import fused, spaces
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.all_gather_matmul.spaces import sends_to_self, steps_of_part
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Peers
from taxfree_kernels.device.sync import before_tma_loads, gdc_wait
from taxfree_kernels.device.tiles import accumulate_tma, scales_of_tile, zero_tile
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import RowDescriptors, weight_descriptors, with_fields
from taxfree_kernels.variant import Config


@triton.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _push_tma(
    a_ptr, own_rows, a_desc, w_desc, inbox_desc, output, memory, rank, m, n, k, shard_rows,
    shard_columns, GROUP: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    # If a loop over k that follows a wait in a loop could have no steps, ptxas would serialise its
    # matrix instructions; for smaller tiles it does not: see ``partial_tile``.
    IN_PARTS: tl.constexpr = GATHER.K_PARTS > 1 or GATHER.SOURCES_PER_WAIT < GROUP.WORLD
    HAS_STEPS: tl.constexpr = IN_PARTS and TILE.BLOCK_M * TILE.BLOCK_N > 128 * 128
    program = tl.program_id(0)
    generation = sync.running_generation(memory.control_ptr)
    peers = Peers(memory.control_ptr, memory.heap_bases, rank, generation)
    a_scale_ptr, w_scale_ptr = None, None
    if TILE.SCALES != "none":
        a_scale_ptr, w_scale_ptr = output.a_scale_ptr, output.w_scale_ptr
    shard = fused.InputShard(a_ptr, own_rows, shard_rows, shard_columns, a_scale_ptr)
    if program < GATHER.SENDERS:
        slot_ptr = tl.multiple_of(memory.inbox_ptr + (generation % 2) * memory.stride_slot, 16)
        messages: tl.constexpr = GATHER.K_PARTS * GATHER.CHUNKS * (GROUP.WORLD - 1 + GATHER.TO_SELF)
        for message in range(program, messages, GATHER.SENDERS):
            fused.push_chunk(message, shard, slot_ptr, peers, GROUP, GATHER)
    else:
        index = program - GATHER.SENDERS
        slot = (generation % 2).to(tl.int32)
        tile, split, row, col, step_begin, step_end = fused.place_of(
            index, rank, m, n, shard, GATHER.GATHER_DIM, TILE
        )
        row_end = min(row + TILE.BLOCK_M, m)
        scales = None
        if TILE.SCALES != "none":
            slot_ptr = memory.inbox_ptr + (generation % 2) * memory.stride_slot
            scaled_rows = row + tl.arange(0, TILE.BLOCK_M)
            row_mask = scaled_rows < m
        acc = zero_tile(TILE)
        if HAS_STEPS:
            tl.assume(step_end > step_begin)
        if GATHER.GATHER_DIM == 0:
            if TILE.SCALES != "none":
                x_scales = fused.gathered_scales(
                    scaled_rows, rank, shard, slot_ptr, GROUP, GATHER, TILE
                )
            if TILE.SCALES == "channel":  # those of rows arrive with them
                of_rows = tl.zeros((TILE.BLOCK_M,), tl.float32)
                scaled_cols = col + tl.arange(0, TILE.BLOCK_N)
                of_cols = tl.load(w_scale_ptr + scaled_cols, mask=scaled_cols < n, other=0.0)
            elif TILE.SCALES != "none":
                scales = scales_of_tile(x_scales, w_scale_ptr, row_mask, col, n, k, TILE)
            first, arrived = 0, tl.full((), True, tl.int1)
            if not GATHER.TO_SELF:  # a tile of own rows needs no other source
                first = (row // shard_rows == rank).to(tl.int32)
                acc = accumulate_tma(
                    acc, a_desc, 0, row - rank * shard_rows, w_desc, col, 0, first, step_begin,
                    step_end, 1, 1, TILE, scales,
                )  # fmt: skip
            PART_STEPS: tl.constexpr = GATHER.PART_COLUMNS // TILE.BLOCK_K
            for part in range(GATHER.K_PARTS):
                arrived = arrived & fused.wait_for_rows(
                    row, row_end, 0, 0, peers, m, shard_rows, GROUP, GATHER, part
                )
                before_tma_loads(GROUP)
                if TILE.SCALES == "channel":
                    of_rows = tl.load(x_scales, mask=row_mask, other=0.0)
                begin, end = step_begin, step_end
                if GATHER.K_PARTS > 1:
                    part_end = min((part + 1) * PART_STEPS, tl.cdiv(shard_columns, TILE.BLOCK_K))
                    begin, end = _share_of_part(part * PART_STEPS, part_end, split, TILE.SPLIT_K)
                if HAS_STEPS:
                    tl.assume(end > begin)
                acc = accumulate_tma(
                    acc, inbox_desc, slot, row, w_desc, col, first, 1, begin, end, 1, 1, TILE,
                    scales,
                )  # fmt: skip
            if TILE.SCALES == "channel":
                scales = of_rows, of_cols
        else:
            arrived = rank >= 0
            peers_scales = None
            if TILE.SCALES != "none":
                scales, peers_scales = fused.scales_of_sources(
                    scaled_rows, row_mask, col, n, k, shard, w_scale_ptr, slot_ptr, GROUP, GATHER,
                    TILE,
                )  # fmt: skip
            acc = accumulate_tma(
                acc, a_desc, 0, row, w_desc, col, rank, rank + 1, step_begin, step_end, GROUP.WORLD,
                1, TILE, scales,
            )  # fmt: skip
            for first in range(1, GROUP.WORLD, GATHER.SOURCES_PER_WAIT):
                last = min(first + GATHER.SOURCES_PER_WAIT, GROUP.WORLD)
                arrived = arrived & fused.wait_for_rows(
                    row, row_end, first, last, peers, m, shard_rows, GROUP, GATHER
                )
                before_tma_loads(GROUP)
                if HAS_STEPS:
                    tl.assume(last > first)
                acc = accumulate_tma(
                    acc, inbox_desc, slot, row, w_desc, col, rank + first, rank + last, step_begin,
                    step_end, GROUP.WORLD, GROUP.WORLD, TILE, peers_scales,
                )  # fmt: skip
        rows, cols = row + tl.arange(0, TILE.BLOCK_M), col + tl.arange(0, TILE.BLOCK_N)
        fused.finish_tile(
            acc, arrived, tile, split, rows, cols, m, n, output, memory, GROUP,
            GATHER.HAS_BIAS, TILE, scales,
        )  # fmt: skip
    sync.leave(memory.control_ptr)


@triton.jit
def _share_of_part(begin, end, split, SPLIT_K: tl.constexpr):
    """Like ``schedules.stream_k``, of steps [begin, end): one of SPLIT_K shares."""
    steps = end - begin
    return begin + steps * split // SPLIT_K, begin + steps * (split + 1) // SPLIT_K


class PushTmaPlan(fused.FusedGatherPlan):
    """One launch: senders, then tiles."""

    def __init__(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> None:
        is_nk, columns = problem.weight_layout == "nk", problem.shard_columns
        super().__init__(problem, fabric, config, _push_tma)
        block_m, block_n, block_k = (config[f"BLOCK_{side}"] for side in "MNK")
        a_box = [1, 1, block_m, block_k]
        w_box = [1, block_n, block_k] if is_nk else [1, block_k, block_n]
        sources = problem.world_size if problem.gather_dim == 1 else 1
        self._a_descriptors = RowDescriptors(a_box)
        self._w_descriptors = weight_descriptors(sources, w_box, is_nk)
        self._inbox_desc = TensorDescriptor(
            self._memory.inbox_ptr,
            [2, sources, problem.m, columns],
            [self._memory.stride_slot, problem.shard_rows * columns, columns, 1],
            a_box,
        )

    def _gather(self, problem: AllGatherMatmul) -> fused.Gather:
        config, to_self = self._config, sends_to_self(problem, self._config)
        messages = config["K_PARTS"] * config["CHUNKS"] * (problem.world_size - 1 + to_self)
        return fused.Gather.of(
            problem,
            config,
            SENDERS=min(config["SENDERS"], messages),
            TO_SELF=to_self,
            PART_COLUMNS=steps_of_part(problem, config) * config["BLOCK_K"],
        )

    def _layout(self, problem: AllGatherMatmul) -> tuple[TensorDescriptor, bool]:
        """The inbox, and whether tiles also read this rank's shard."""
        slots, sources, _, columns = self._inbox_desc.shape
        stride_slot = self._inbox_desc.strides[0]
        inbox = with_fields(
            self._inbox_desc,
            shape=[slots, sources, problem.m, columns],
            strides=[stride_slot, problem.shard_rows * columns, columns, 1],
        )
        # A tensor map cannot have zero rows; a rank without rows has no tile that would read them.
        reads_own = problem.rows_of(self._rank) > 0
        return inbox, reads_own and not sends_to_self(problem, self._config)

    def _operands(
        self,
        a: torch.Tensor,
        weight: torch.Tensor,
        output: tuple[torch.Tensor, ...],
        layout: Any,
        *scales: torch.Tensor,
    ) -> tuple[Any, ...]:
        inbox, reads_own = layout
        # with gather_dim 0 tiles read nothing else
        a_desc = self._a_descriptors(a) if reads_own else inbox
        kind: Any = fused.ScaledOutput if scales else fused.Output
        return a_desc, self._w_descriptors(weight), inbox, kind(*output, *scales)


class PushTma(fused.FusedGatherVariant):
    """Senders and TMA tiles in one kernel."""

    plan_class = PushTmaPlan
    space = staticmethod(spaces.tma_space)
    illegal_reason = staticmethod(spaces.tma_illegal_reason)

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if hardware.architecture not in ("sm_90", "cpu"):
            return f"not written for {hardware.architecture}"
        rows_of_w = problem.k if problem.weight_layout == "nk" else problem.n
        in_16_bytes = 16 // problem.factor_bytes
        if problem.shard_columns % in_16_bytes or rows_of_w % in_16_bytes:
            return "rows do not start at multiples of 16 bytes"
        return super().unsupported_reason(problem, hardware)

    def seed_configs(self, problem: AllGatherMatmul, hardware: Hardware) -> list[dict[str, Any]]:
        return spaces.first_tma_configs(problem, hardware, self.space(problem, hardware))


VARIANT = PushTma()
