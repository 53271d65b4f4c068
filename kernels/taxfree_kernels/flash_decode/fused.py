"""Two kernels: the splits; then programs that merge and push a chunk of rows, and combiners.

Removes the wait for the slowest rank and for the last byte, two launches, and the trip of the
merged part through memory: a program stores what it has merged into every rank's inbox at once. One
launch remains between the splits and their merge; with `launch_pdl` it is issued before the splits
have ended. With `CHAINED` the splits, too, are launched early; they wait before they let the second
kernel begin, so that it finds the generation of its own call.

Protocol. In the second kernel, pushing programs have the lowest ids and never wait; each sends a
chunk of rows to all ranks and signals them on the chunk's own channel. A combiner waits for every
rank's signal for its rows. Every row has a combiner and every chunk has rows, so in each call every
rank signals, and waits for, every peer on every channel: the full exchange under which the two
payload slots of a pool suffice (:class:`taxfree_kernels.fabric.heap.Pool`). With `LL`, words
replace rows and signals: LL packets in two slots of their own, or, if `PACKED`, Lamport words
in three; every row goes to every rank, so the same holds. With `XCD_SIGNALS`, for devices of
several chiplets, the last pushing program of a chiplet signals for all of them, on the chiplet's
channel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.device import packets, sync
from taxfree_kernels.device.peers import Peers
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import plans, spaces
from taxfree_kernels.flash_decode.exchange import combine, merge_and_push, slot_of_parts
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.flash_decode.spaces import chunk_rows
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel
from taxfree_kernels.spaces import xcd_signals_illegal_reason, xcd_signals_space
from taxfree_kernels.variant import Config, Signals, Space


@triton.jit(do_not_specialize=["rank", "rows"])
def _push_and_combine(
    parts, out_ptr, inbox, rows, control_ptr, heap_bases, rank,
    GROUP: tl.constexpr, PUSHERS: tl.constexpr, EXCHANGE: tl.constexpr, MERGE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    slot_ptr, turn = slot_of_parts(inbox, control_ptr, generation, EXCHANGE.PACKED)
    gdc_wait(GROUP)
    if CHAINED:
        gdc_launch_dependents(GROUP)
    if program < PUSHERS:
        merge_and_push(
            program, parts, slot_ptr, inbox.stride_part, rows, peers, GROUP, EXCHANGE, MERGE,
            PUSHERS, inbox.counters_ptr,
        )  # fmt: skip
    else:
        if EXCHANGE.PACKED:
            packets.empty_last_turn(
                control_ptr, inbox.ptr, inbox.stride_slot, turn, GROUP.WORLD * inbox.stride_part,
                program - PUSHERS, tl.num_programs(0) - PUSHERS,
            )  # fmt: skip
        combine(
            program - PUSHERS, slot_ptr, out_ptr, inbox.stride_part, rows, peers, GROUP, EXCHANGE
        )
    if EXCHANGE.PACKED:
        packets.leave_turn(control_ptr)
    sync.leave(control_ptr)


class FusedDecodePlan(plans.DecodePlan):
    """The splits, then merge, push and combine."""

    launches = 2

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        self._exchange = plans.PartsExchange(problem, fabric, config, chunk_rows(problem, config))
        self._kernel = Kernel(
            _push_and_combine,
            grid=0,
            constants=self._exchange.constants
            | {
                "PUSHERS": self._exchange.chunks,
                "MERGE": self.attention.merging(config["ROWS"]),
                "CHAINED": plans.is_chained(config),
            },
            options=plans.finishing_options(fabric, config),
        )

    def finishing(self, problem: FlashDecode) -> tuple[Kernel, ...]:
        grid = self._exchange.chunks + self._exchange.combiners(problem)
        return (self._kernel.resized(grid, self._exchange.args(problem)),)

    def finish(self, out: torch.Tensor, *kernels: Kernel) -> None:
        (kernel,) = kernels
        kernel(self.attention.parts, out)


def _pushers(problem: FlashDecode, config: Config) -> int:
    """The number of programs that signal, each a chunk; none where words are sent."""
    return 0 if config["LL"] else -(-problem.rows // chunk_rows(problem, config))


class Fused(plans.ExchangingVariant):
    """The splits, then one kernel that merges, pushes and combines."""

    plan_class = FusedDecodePlan
    slots = 3

    def space(self, problem: FlashDecode, hardware: Hardware) -> Space:
        return {
            **super().space(problem, hardware),
            **spaces.words_space(problem),
            **spaces.last_space(hardware),
            **spaces.chained_space(problem, hardware),
            **xcd_signals_space(hardware),
        }

    def illegal_reason(
        self, problem: FlashDecode, hardware: Hardware, config: Config
    ) -> str | None:
        reason = xcd_signals_illegal_reason(hardware, config, _pushers(problem, config))
        return reason or super().illegal_reason(problem, hardware, config)

    def signals(self, problem: FlashDecode, config: Config) -> Signals | None:
        pushers = _pushers(problem, config)
        return Signals(pushers, min(pushers, config.get("XCD_SIGNALS") or pushers))


VARIANT = Fused()
