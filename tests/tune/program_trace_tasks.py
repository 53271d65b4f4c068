"""A fused kernel with delays in known places; what instrumented rank workers run for tests."""

from __future__ import annotations

import time

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.device.sync import clock_ns, interpreted_only
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_tune.profiling import program_trace
from taxfree_tune.taxes import ProgramTrace


@interpreted_only
def _sleep(nanoseconds: int) -> None:
    time.sleep(float(nanoseconds) * 1e-9)


@triton.jit
def _delay(nanoseconds, BACKEND: tl.constexpr):
    if BACKEND == "interpreter":  # the cores are other ranks' too
        _sleep(nanoseconds)
    else:
        begin = clock_ns(BACKEND)
        now = begin
        while now - begin < nanoseconds:
            now = clock_ns(BACKEND)


@triton.jit(do_not_specialize=["nanoseconds"])
def _other(nanoseconds, BACKEND: tl.constexpr):
    _delay(nanoseconds, BACKEND)


@triton.jit(do_not_specialize=["rank", "send_ns", "tile_ns"])
def _send_and_wait(
    control_ptr, heap_bases, rank, send_ns, tile_ns,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A program that signals all peers, and a tile that waits for them."""
    peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
    BACKEND: tl.constexpr = GROUP.BACKEND
    lane = tl.arange(0, GROUP.WORLD)
    if tl.program_id(0) == 0:
        _delay(send_ns, BACKEND)
        sync.signal(peers, 0, lane, GROUP, mask=lane != rank)
    else:
        sync.wait(peers, 0, lane, GROUP, mask=lane != rank)
        _delay(tile_ns, BACKEND)
    sync.leave(control_ptr)


def delayed(
    fabric: Fabric,
    repetitions: int,
    late: float = 0.0,
    send: float = 0.0,
    tile: float = 0.0,
    other: float = 0.0,
) -> ProgramTrace:
    """ProgramTrace of a kernel with delays, in microseconds.

    Args:
        late: of the last rank's call.
        send: of the last rank's signals.
        tile: of the tile, on all ranks.
        other: of a kernel before it, on all ranks.
    """
    is_last = fabric.rank == fabric.world_size - 1
    backend = {"BACKEND": fabric.backend}
    before = Kernel(_other, 1, backend)
    kernel = Kernel(_send_and_wait, 2, {"GROUP": Group(fabric.world_size, fabric.backend)})
    before_ns, *delays_ns = (
        round(1000 * us) for us in (other + late * is_last, send * is_last, tile)
    )

    def call(_: int) -> None:
        before(before_ns)
        kernel(fabric.pool.control, fabric.heap_bases, fabric.rank, *delays_ns)

    return program_trace.trace_call(fabric, call, repetitions)
