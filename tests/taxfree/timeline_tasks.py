"""A fused kernel with delays in known places; what instrumented rank workers run for tests."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

from taxfree import timeline
from taxfree.taxes import Notes
from taxfree_kernels.device import sync
from taxfree_kernels.device.clock import interpreted_only
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel


@interpreted_only
def _sleep(microseconds: int) -> None:
    time.sleep(float(microseconds) * 1e-6)


@triton.jit(do_not_specialize=["rank", "send_us", "tile_us"])
def _send_and_wait(
    control_ptr, heap_bases, rank, send_us, tile_us,
    WORLD: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """A program that signals all peers, and a tile that waits for them."""
    generation = sync.running_generation(control_ptr)
    lane = tl.arange(0, WORLD)
    if tl.program_id(0) == 0:
        _sleep(send_us)
        sync.signal(
            control_ptr, 0, lane, generation, heap_bases, rank, mask=lane != rank,
            WORLD=WORLD, BACKEND=BACKEND,
        )  # fmt: skip
    else:
        sync.wait(
            control_ptr, 0, lane, generation, heap_bases, rank, mask=lane != rank,
            WORLD=WORLD, BACKEND=BACKEND,
        )  # fmt: skip
        _sleep(tile_us)
    sync.leave(control_ptr)


def delayed(
    fabric: Fabric,
    repetitions: int,
    late: float = 0.0,
    send: float = 0.0,
    tile: float = 0.0,
    host: float = 0.0,
) -> Notes:
    """Notes of a kernel with delays, in seconds.

    Args:
        late: of the last rank's call.
        send: of the last rank's signals.
        tile: of the tile, on all ranks.
        host: before a call, on all ranks.
    """
    is_last = fabric.rank == fabric.world_size - 1
    kernel = Kernel(_send_and_wait, 2, {"WORLD": fabric.world_size, "BACKEND": fabric.backend})
    delays = [round(1e6 * seconds) for seconds in (send * is_last, tile)]

    def call(_: int) -> torch.Tensor:
        time.sleep(host + late * is_last)
        kernel(fabric.pool.control, fabric.heap_bases, fabric.rank, *delays)
        return fabric.pool.control

    return timeline.note_plan(fabric, call, repetitions)
