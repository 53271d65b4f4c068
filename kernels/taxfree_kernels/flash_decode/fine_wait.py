"""``gather`` with the wait moved into the combiners: each waits for its own rows only.

Removes the wait for the last byte of the slowest rank before any row is combined, and a copy of all
parts. Parts still go through memory between the merge of the splits and the sending kernel.

Protocol. The sending kernel waits for nobody; the combining kernel, which ends the call, waits for
every source's chunk of its rows. Every row has a combiner, so in each call every rank signals, and
waits for, every peer on every channel, and the two payload slots of a pool suffice, as in
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
from taxfree_kernels.flash_decode.exchange import combine, send_chunk, slot_of_parts
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.flash_decode.spaces import chunk_rows
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.variant import Config


@triton.jit(do_not_specialize=["rank", "rows"])
def _send(
    part_ptr, inbox, rows, control_ptr, heap_bases, rank, GROUP: tl.constexpr,
    CHUNK_ROWS: tl.constexpr, V_DIM: tl.constexpr, SEND_BLOCK: tl.constexpr,
):  # fmt: skip
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot_ptr, _ = slot_of_parts(inbox, control_ptr, generation, PACKED=False)
    send_chunk(
        tl.program_id(0), part_ptr, slot_ptr, inbox.stride_part, rows, peers, GROUP, CHUNK_ROWS,
        V_DIM, SEND_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "rows"])
def _combine(
    out_ptr, inbox, rows, control_ptr, heap_bases, rank,
    GROUP: tl.constexpr, EXCHANGE: tl.constexpr,
):  # fmt: skip
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot_ptr, _ = slot_of_parts(inbox, control_ptr, generation, PACKED=False)
    combine(tl.program_id(0), slot_ptr, out_ptr, inbox.stride_part, rows, peers, GROUP, EXCHANGE)
    sync.leave(control_ptr)


class FineWaitPlan(plans.DecodePlan):
    """Splits, their merge into one part, a kernel that sends it, and combiners."""

    launches = 4

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config, (problem.part_elements,))
        self._merge_splits = plans.SplitsMerge(problem, fabric, self.attention, config["OUT_ROWS"])
        self._exchange = exchange = plans.PartsExchange(
            problem, fabric, config, chunk_rows(problem, config)
        )
        options = compile_options(fabric.backend, {})
        self._send = Kernel(
            _send,
            grid=problem.world_size * exchange.chunks,
            constants=exchange.sending_constants,
            options=options,
        )
        self._combine = Kernel(_combine, grid=0, constants=exchange.constants, options=options)

    def finishing(self, problem: FlashDecode) -> tuple[Kernel, ...]:
        args = self._exchange.args(problem)
        return (
            self._merge_splits.kernel(problem.batch),
            self._send.resized(self._send.grid, args),
            self._combine.resized(self._exchange.combiners(problem), args),
        )

    def finish(self, out: torch.Tensor, *kernels: Kernel) -> None:
        merge_splits, send, combine = kernels
        _, _, own_part = self.attention.scratch()
        self._merge_splits.launch(merge_splits, own_part, len(out))
        send(own_part)
        combine(out)


class FineWait(plans.ExchangingVariant):
    """Four kernels; only the last one waits."""

    plan_class = FineWaitPlan


VARIANT = FineWait()
