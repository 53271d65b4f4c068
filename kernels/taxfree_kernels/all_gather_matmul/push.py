"""One fused kernel: sender programs push this rank's shard; tile programs wait for each source.

Removes the launch tax (one kernel), most of the bulk-synchronous tax (a tile starts with its own
rank's shard, then uses arrived data), and the locality tax of a gathered A in a second layout.
Sends each byte over the link once.

With `XCD_SIGNALS`, for devices of several chiplets, the senders of a chiplet signal together: the
last one to finish signals all ranks, on the chiplet's channel.

Protocol. Sender programs have the lowest ids and wait for no one; tile programs wait only for
peers' senders, so any schedule that starts low ids first makes progress. Between them, a rank's
tile programs wait for every channel of every peer in every call: with gather_dim 1 each tile needs
all sources; with gather_dim 0 every row has a tile, and the last tile also waits for sources
without rows. That is the full exchange under which the two payload slots of a pool suffice
(:class:`taxfree_kernels.fabric.heap.Pool`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import fused
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device import sync
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.spaces import xcd_signals_illegal_reason, xcd_signals_space
from taxfree_kernels.variant import Config, Plan, Signals, Space


@triton.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _push(
    a_ptr, own_rows, w_ptr, stride_w, bias_ptr, out_ptr, memory, rank, m, n, k, shard_rows,
    shard_columns, GROUP: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(memory, rank)
    a_scale_ptr, w_scale_ptr = None, None
    if TILE.SCALES != "none":
        a_scale_ptr, w_scale_ptr = stride_w.x_scale_ptr, stride_w.w_scale_ptr
    shard = fused.InputShard(a_ptr, own_rows, shard_rows, shard_columns, a_scale_ptr)
    if program < GATHER.SENDERS:
        counters_ptr = memory.counters_ptr
        if GATHER.XCD_SIGNALS:  # after those of tiles
            counters_ptr += tl.cdiv(m, TILE.BLOCK_M) * tl.cdiv(n, TILE.BLOCK_N)
        fused.push_chunk(program, shard, slot_ptr, peers, GROUP, GATHER, counters_ptr)
    else:
        weight = fused.Weight(w_ptr, stride_w[0], stride_w[1], w_scale_ptr)
        output = fused.Output(bias_ptr, out_ptr)
        fused.gathered_tile(
            program - GATHER.SENDERS, shard, weight, output, memory, slot_ptr, peers, m, n, k,
            GROUP, GATHER, TILE,
        )  # fmt: skip
    sync.leave(memory.control_ptr)


class Push(fused.FusedGatherVariant):
    """Senders and tiles in one kernel."""

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        return {**super().space(problem, hardware), **xcd_signals_space(hardware)}

    def illegal_reason(
        self, problem: AllGatherMatmul, hardware: Hardware, config: Config
    ) -> str | None:
        senders = config["CHUNKS"] * (problem.world_size - 1)
        reason = xcd_signals_illegal_reason(hardware, config, senders)
        return reason or super().illegal_reason(problem, hardware, config)

    def signals(self, problem: AllGatherMatmul, config: Config) -> Signals:
        senders = config["CHUNKS"] * (problem.world_size - 1)
        return Signals(senders, min(senders, config.get("XCD_SIGNALS") or senders))

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        senders = config["CHUNKS"] * (problem.world_size - 1)
        return fused.FusedGatherPlan(problem, fabric, config, _push, senders)


VARIANT = Push()
