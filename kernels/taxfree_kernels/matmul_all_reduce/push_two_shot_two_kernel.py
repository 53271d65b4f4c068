"""Two kernels: tiles go to the ranks that own them, and sums to all ranks beside later tiles.

``push_two_shot`` with adders and copiers in a kernel of their own, see
:mod:`taxfree_kernels.reduction.two_kernel`; the slot and the signals are the same.

Protocol. Programs of the first kernel compute and send tiles, and never wait for another. The
second one begins once they all have begun, or ended, so its adders wait for what runs on every
rank. A copier waits for adders of its own group of tiles, which have lower ids, as do those of all
groups before it: on every rank these wait only for tiles, or for adders of groups before their own.
So any order that starts low ids first makes progress. Since the first kernel waits for the end of
the call before, all that the second one touches is of this call, or ordered by signals. The next
call begins after the second kernel's end, and its last program waits for that of the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.device.tiles import in_turns, xcd_swizzle
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.push_two_shot import (
    PushTwoShot,
    PushTwoShotPlan,
    add_piece,
    copy_sum,
    counts_of,
    inbox_of,
    schedule_of,
    send_to_owner,
    slot_elements,
    tiles_in,
)
from taxfree_kernels.reduction.fused import Epilogue, Layout, running_slot
from taxfree_kernels.reduction.two_kernel import TwoKernelPlan, TwoKernelVariant
from taxfree_kernels.variant import Config, Plan


@triton.jit(do_not_specialize=["rank", "m"])
def _tiles(
    x, w, stride_w, buffers, rank, m, n, k, stride_row,
    GROUP: tl.constexpr, TILE: tl.constexpr, SCHEDULE: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    gdc_launch_dependents(GROUP)
    peers, slot_ptr = running_slot(buffers, rank)
    counts, owned = counts_of(m, n, GROUP, TILE, SCHEDULE)
    inbox = inbox_of(slot_ptr, slot_ptr, owned, stride_row, GROUP, TILE)
    for number in range(tl.program_id(0), counts.tiles, tl.num_programs(0)):
        tile = xcd_swizzle(tl.cast(number, tl.int32), counts.tiles, TILE.XCDS)
        send_to_owner(
            tile, x, w, stride_w, buffers, inbox, counts, peers, m, n, k, GROUP, TILE, SCHEDULE
        )


@triton.jit(do_not_specialize=["rank", "m"])
def _sums(
    addends, out_ptr, buffers, rank, m, n, k, stride_row,
    GROUP: tl.constexpr, TILE: tl.constexpr, SCHEDULE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    peers, slot_ptr = running_slot(buffers, rank)
    counts, owned = counts_of(m, n, GROUP, TILE, SCHEDULE)
    inbox = inbox_of(slot_ptr, out_ptr, owned, stride_row, GROUP, TILE)
    adders = owned * SCHEDULE.PIECES
    OWNED_PER_SIGNAL: tl.constexpr = SCHEDULE.TILES_PER_SIGNAL // GROUP.WORLD
    ADDERS_PER_SIGNAL: tl.constexpr = OWNED_PER_SIGNAL * SCHEDULE.PIECES
    # copiers of a group follow the adders of the next one
    is_adder, number = in_turns(
        program, adders, min(ADDERS_PER_SIGNAL, adders), ADDERS_PER_SIGNAL,
        OWNED_PER_SIGNAL * (GROUP.WORLD - 1), 1,
    )  # fmt: skip
    if is_adder:
        add_piece(
            number, adders, addends, out_ptr, buffers, inbox, counts, peers, m, n, GROUP, TILE,
            EPILOGUE, SCHEDULE,
        )  # fmt: skip
    else:
        copy_sum(
            number, out_ptr, inbox, counts, peers, m, n, GROUP, TILE, SCHEDULE, SCHEDULE.PIECES
        )
    if program == tl.num_programs(0) - 1:
        gdc_wait(GROUP)
    sync.leave(buffers.control_ptr)


class PushTwoShotTwoKernelPlan(TwoKernelPlan, PushTwoShotPlan):
    """The two kernels, with the arguments of a sum without RMSNorm."""


class PushTwoShotTwoKernel(TwoKernelVariant, PushTwoShot):
    """Two kernels: tiles go to their owners, sums to all ranks beside later tiles."""

    name = "push_two_shot_two_kernel"

    def plan(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> Plan:
        def layout(problem: MatmulAllReduce) -> Layout:
            tiles = tiles_in(problem, config)
            owned = -(-tiles // problem.world_size)
            sums = owned * (config["PIECES"] + problem.world_size - 1)
            return Layout(tiles, sums, slot_elements(problem, config), (config["BLOCK_N"],))

        return PushTwoShotTwoKernelPlan(
            problem, fabric, config, _tiles, _sums, layout,
            {"SCHEDULE": schedule_of(problem, fabric.hardware, config)},
            {"EPILOGUE": Epilogue(problem.bias, problem.residual)},
        )  # fmt: skip


VARIANT = PushTwoShotTwoKernel()
