"""One fused kernel: every rank copies its shard to its outbox; tile programs load from peers.

Removes the launch tax and the wait for the slowest transfer: a tile reads a peer's rows straight
into registers once that peer has signalled. Each column of tiles fetches A again, so the link
traffic grows with N / BLOCK_N: it suits few rows only.

Protocol. Copy programs have the lowest ids, wait for no one, and signal all peers with one
instruction; the payload of call g is in slot g % 2 of the *owner's* pool. Every rank waits for
every peer in each call, as in ``push``, so when a rank overwrites its slot in call g, every peer
has finished call g - 2, the last one that read the slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.all_gather_matmul import fused
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.device import sync
from taxfree_kernels.device.sync import gdc_wait
from taxfree_kernels.device.tiles import copy
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.variant import Config, Plan, Space


@triton.jit(do_not_specialize=["rank", "own_rows", "m", "shard_rows"])
def _pull(
    a_ptr, own_rows, w_ptr, stride_w, bias_ptr, out_ptr, memory, rank, m, n, k, shard_rows,
    shard_columns, GROUP: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    program = tl.program_id(0)
    peers, slot_ptr = sync.running_slot(memory, rank)
    if program < GATHER.SENDERS:  # one for each chunk
        chunk_rows = tl.cdiv(shard_rows, GATHER.CHUNKS)
        begin = program * chunk_rows
        end = min(begin + chunk_rows, own_rows)
        copy(slot_ptr, a_ptr, begin * shard_columns, end * shard_columns, GATHER.SEND_BLOCK)
        peer = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))
        others = (peer < GROUP.WORLD) & (peer != rank)
        sync.signal(peers, program, tl.where(others, peer, rank), GROUP, mask=others)
    else:
        shard = fused.InputShard(a_ptr, own_rows, shard_rows, shard_columns)
        weight = fused.Weight(w_ptr, stride_w[0], stride_w[1])
        output = fused.Output(bias_ptr, out_ptr)
        fused.gathered_tile(
            program - GATHER.SENDERS, shard, weight, output, memory, slot_ptr, peers, m, n, k,
            GROUP, GATHER, TILE, PULL=True,
        )  # fmt: skip
    sync.leave(memory.control_ptr)


class Pull(fused.FusedGatherVariant):
    """Tiles load peers' rows from their outboxes."""

    def unsupported_reason(self, problem: AllGatherMatmul, hardware: Hardware) -> str | None:
        if problem.is_fp8:
            return "its tiles load rows without scales"
        if problem.m > 1024:
            return "A would cross the link once per column of tiles"
        return super().unsupported_reason(problem, hardware)

    def space(self, problem: AllGatherMatmul, hardware: Hardware) -> Space:
        space = super().space(problem, hardware)
        return {**space, "SOURCES_PER_WAIT": (1,)}  # each source has its own base address

    def plan(self, problem: AllGatherMatmul, fabric: Fabric, config: Config) -> Plan:
        return fused.FusedGatherPlan(problem, fabric, config, _pull, config["CHUNKS"])


VARIANT = Pull()
