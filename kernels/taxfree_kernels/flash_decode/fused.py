"""Two kernels: the splits; then programs that merge and push a chunk of rows, and combiners.

Removes the wait for the slowest rank and for the last byte, two launches, and the trip of the
merged part through memory: a program stores what it has merged into every rank's inbox at once. One
launch remains between the splits and their merge; with `launch_pdl` it is issued before the splits
have ended.

Protocol. In the second kernel, pushing programs have the lowest ids and never wait; each sends a
chunk of rows to all ranks and signals them on the chunk's own channel. A combiner waits for every
rank's signal for its rows. Every row has a combiner and every chunk has rows, so in each call every
rank signals, and waits for, every peer on every channel: the full exchange under which the two
payload slots of a pool suffice (:class:`taxfree_kernels.fabric.heap.Pool`). With `LL`, words
replace rows and signals: LL packets in two slots of their own, or, if `PACKED`, Lamport words
in three; every row goes to every rank, so the same holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.pdl import gdc_wait
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import spaces
from taxfree_kernels.flash_decode.constants import chunk_rows
from taxfree_kernels.flash_decode.exchange import combine, merge_and_push, running_slot
from taxfree_kernels.flash_decode.local import (
    DecodePlan,
    Exchange,
    ExchangingVariant,
    finishing_options,
)
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, Plan, Space


@triton.jit(do_not_specialize=["rank", "rows"])
def _push_and_combine(
    parts_ptr, split_elements, runs_ptr, out_ptr, inbox_ptr, slot_elements, part_elements, rows,
    control_ptr, heap_bases, rank,
    WORLD: tl.constexpr, BACKEND: tl.constexpr, CHUNK_ROWS: tl.constexpr, PUSHERS: tl.constexpr,
    LL: tl.constexpr, PACKED: tl.constexpr, Q_HEADS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, SOURCES_BLOCK: tl.constexpr,
    OUT_ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    slot_ptr, turn = running_slot(inbox_ptr, slot_elements, control_ptr, generation, PACKED)
    gdc_wait(BACKEND)
    if program < PUSHERS:
        merge_and_push(
            program, parts_ptr, split_elements, runs_ptr, slot_ptr, part_elements, rows,
            control_ptr, generation, heap_bases, rank,
            WORLD, BACKEND, CHUNK_ROWS, LL, PACKED, Q_HEADS, PARTS, PARTS_BLOCK, V_DIM,
            ROWS,
        )  # fmt: skip
    else:
        if PACKED:
            sync.empty_last_turn(
                control_ptr, inbox_ptr, slot_elements, turn, WORLD * part_elements,
                program - PUSHERS, tl.num_programs(0) - PUSHERS,
            )  # fmt: skip
        combine(
            program - PUSHERS, slot_ptr, out_ptr, part_elements, rows,
            control_ptr, generation, heap_bases, rank,
            WORLD, BACKEND, CHUNK_ROWS, LL, SOURCES_BLOCK, V_DIM, OUT_ROWS, PACKED,
        )  # fmt: skip
    if PACKED:
        sync.leave_turn(control_ptr)
    sync.leave(control_ptr)


class FusedPlan(DecodePlan):
    """The splits, then merge, push and combine."""

    launches = 2

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        self._exchange = Exchange(problem, fabric, config, chunk_rows(problem, config))
        self._kernel = Kernel(
            _push_and_combine,
            grid=0,
            constants=self._exchange.constants
            | self.attention.merging_constants(config["ROWS"])
            | {
                "PUSHERS": self._exchange.chunks,
                "LL": config["LL"],
                "PACKED": config["PACKED"],
            },
            options=finishing_options(fabric, config),
        )

    def finishing(self, problem: FlashDecode) -> tuple[Kernel, ...]:
        grid = self._exchange.chunks + self._exchange.combiners(problem)
        return (self._kernel.resized(grid, self._exchange.args(problem)),)

    def finish(self, out: torch.Tensor, *kernels: Kernel) -> None:
        (kernel,) = kernels
        kernel(*self.attention.parts, out)


class Fused(ExchangingVariant):
    """Splits, then one kernel for all the rest."""

    name = "fused"
    slots = 3

    def space(self, problem: FlashDecode, hardware: Hardware) -> Space:
        return {
            **super().space(problem, hardware),
            **spaces.words_space(problem),
            **spaces.last_space(hardware),
        }

    def plan(self, problem: FlashDecode, fabric: Fabric, config: Config) -> Plan:
        return FusedPlan(problem, fabric, config)


VARIANT = Fused()
