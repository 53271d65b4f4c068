"""The baseline with our own all-gather: one kernel pushes parts to inboxes, and waits for all.

Removes the collective library's latency. The gathering kernel still ends when the slowest rank's
part has arrived, and all parts go through memory.

Protocol. Sending programs have the lowest ids, wait for nobody, and signal one rank each; each
receiving program waits for one chunk of one source and copies it out of the inbox. Every chunk of
every source is waited for in each call, so the two payload slots of a pool suffice, as in
``fused``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import plans
from taxfree_kernels.flash_decode.attend import store_rows
from taxfree_kernels.flash_decode.exchange import send_chunk, slot_of_parts
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.flash_decode.spaces import chunk_rows
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.variant import Config


@triton.jit
def _copy_rows(
    target_ptr, source_ptr, begin, end, rows, arrived, V_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """Copy rows [begin, end) of a part; NaN if they have not arrived."""
    BLOCK_V: tl.constexpr = triton.next_power_of_2(V_DIM)
    dv = tl.arange(0, BLOCK_V)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        row_mask = row < end
        mask = row_mask[:, None] & (dv < V_DIM)[None, :]
        out = tl.load(source_ptr + row[:, None] * V_DIM + dv[None, :], mask=mask)
        lse = tl.load(source_ptr + rows * V_DIM + row, mask=row_mask)
        out = tl.where(arrived, out, float("nan"))
        store_rows(target_ptr, out, lse, row, row_mask, rows, V_DIM)


@triton.jit(do_not_specialize=["rank", "rows"])
def _gather(
    part_ptr, gathered_ptr, inbox, rows, control_ptr, heap_bases, rank,
    GROUP: tl.constexpr, CHUNK_ROWS: tl.constexpr, SENDERS: tl.constexpr, V_DIM: tl.constexpr,
    SEND_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot_ptr, _ = slot_of_parts(inbox, control_ptr, generation, PACKED=False)
    if program < SENDERS:
        send_chunk(
            program, part_ptr, slot_ptr, inbox.stride_part, rows, peers, GROUP, CHUNK_ROWS, V_DIM,
            SEND_BLOCK,
        )  # fmt: skip
    else:
        chunk, source = (program - SENDERS) // GROUP.WORLD, (program - SENDERS) % GROUP.WORLD
        begin = chunk * CHUNK_ROWS
        end = min(begin + CHUNK_ROWS, rows)
        arrived = sync.wait(peers, chunk, source, GROUP)
        offset = source.to(tl.int64) * inbox.stride_part
        _copy_rows(gathered_ptr + offset, slot_ptr + offset, begin, end, rows, arrived, V_DIM, ROWS)
    sync.leave(control_ptr)


class GatherPlan(plans.DecodePlan):
    """Splits, their merge into one part, our all-gather of the parts, their merge."""

    launches = 4

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        world, rows, part = problem.world_size, config["OUT_ROWS"], problem.part_elements
        super().__init__(problem, fabric, config, (part, world * part))
        self._merge_splits = plans.SplitsMerge(problem, fabric, self.attention, rows)
        self._exchange = exchange = plans.PartsExchange(
            problem, fabric, config, chunk_rows(problem, config)
        )
        self._gather = Kernel(
            _gather,
            grid=2 * world * exchange.chunks,
            constants=exchange.sending_constants
            | {"SENDERS": world * exchange.chunks, "ROWS": config["ROWS"]},
            options=compile_options(fabric.backend, {}),
        )
        self._merge_ranks = plans.RanksMerge(problem, fabric, rows)

    def finishing(self, problem: FlashDecode) -> tuple[Kernel, ...]:
        return (
            self._merge_splits.kernel(problem.batch),
            self._gather.resized(self._gather.grid, self._exchange.args(problem)),
            self._merge_ranks.kernel(problem.batch),
        )

    def finish(self, out: torch.Tensor, *kernels: Kernel) -> None:
        merge_splits, gather, merge_ranks = kernels
        _, _, own_part, gathered = self.attention.scratch()
        self._merge_splits.launch(merge_splits, own_part, len(out))
        gather(own_part, gathered)
        self._merge_ranks.launch(merge_ranks, gathered, out)


class Gather(plans.ExchangingVariant):
    """Four kernels, all ours."""

    plan_class = GatherPlan
    searched = False


VARIANT = Gather()
