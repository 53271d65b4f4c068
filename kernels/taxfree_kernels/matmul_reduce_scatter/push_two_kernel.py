"""Two kernels: tiles go to the ranks that own them, which add them beside later tiles.

``push`` with adders in a kernel of their own, see :mod:`taxfree_kernels.reduction.two_kernel`; the
slot and the signals are the same.

Protocol. Programs of the first kernel compute and send tiles, and never wait for another. The
second one begins once they all have begun, or ended, so its adders wait for what runs on every
rank. Since the first kernel waits for the end of the call before, all that the second one touches
is of this call, or ordered by signals. The next call begins after the second kernel's end, and its
last program waits for that of the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.sync import gdc_launch_dependents, gdc_wait
from taxfree_kernels.device.tiles import tiles_of_shards, xcd_swizzle
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.matmul_reduce_scatter.push import (
    Push,
    add_piece,
    constants_of,
    layout_of,
    send_to_owners,
)
from taxfree_kernels.reduction.fused import Layout, running_slot
from taxfree_kernels.reduction.two_kernel import TwoKernelPlan, TwoKernelVariant
from taxfree_kernels.variant import Config, Plan


@triton.jit(do_not_specialize=["rank", "m", "shard_rows"])
def _tiles(
    x, w, stride_w, buffers, rank, m, n, k, shard_rows, shard,
    GROUP: tl.constexpr, TILE: tl.constexpr, SCHEDULE: tl.constexpr, SCATTER_DIM: tl.constexpr,
):  # fmt: skip
    gdc_wait(GROUP)
    gdc_launch_dependents(GROUP)
    peers, slot_ptr = running_slot(buffers, rank)
    tiles_m, tiles_n, _ = tiles_of_shards(m, shard.columns, GROUP, SCATTER_DIM, TILE)
    tiles = tiles_m * tiles_n
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = xcd_swizzle(tl.cast(number, tl.int32), tiles, TILE.XCDS)
        send_to_owners(
            tile, x, w, stride_w, buffers, slot_ptr, peers, m, k, shard_rows, shard, GROUP, TILE,
            SCHEDULE, SCATTER_DIM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "m", "shard_rows"])
def _sums(
    out_ptr, buffers, rank, m, n, k, shard_rows, shard,
    GROUP: tl.constexpr, TILE: tl.constexpr, SCHEDULE: tl.constexpr, SCATTER_DIM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    peers, slot_ptr = running_slot(buffers, rank)
    add_piece(
        program, out_ptr, slot_ptr, peers, m, shard_rows, shard, GROUP, TILE, SCHEDULE, SCATTER_DIM
    )
    if program == tl.num_programs(0) - 1:
        gdc_wait(GROUP)
    sync.leave(buffers.control_ptr)


class PushTwoKernel(TwoKernelVariant, Push):
    """Two kernels: tiles go to their owners, which add them beside later tiles."""

    name = "push_two_kernel"

    def plan(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> Plan:
        def layout(problem: MatmulReduceScatter) -> Layout:
            return layout_of(problem, config)

        constants = constants_of(problem, fabric.hardware, config)
        return TwoKernelPlan(problem, fabric, config, _tiles, _sums, layout, constants, {})


VARIANT = PushTwoKernel()
