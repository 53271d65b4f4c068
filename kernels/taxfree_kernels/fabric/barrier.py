"""A device-side barrier across all ranks' streams, without the host: it aligns timed calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.heap import Pool
from taxfree_kernels.launch import Kernel

if TYPE_CHECKING:
    from taxfree_kernels.fabric.base import Fabric


@triton.jit(do_not_specialize=["rank"])
def _barrier(control_ptr, heap_bases, rank, GROUP: tl.constexpr):
    generation = sync.running_generation(control_ptr)
    peers = Peers(control_ptr, heap_bases, rank, generation)
    peer = tl.arange(0, triton.next_power_of_2(GROUP.WORLD))
    others = (peer < GROUP.WORLD) & (peer != rank)
    peer = tl.where(others, peer, rank)
    sync.signal(peers, 0, peer, GROUP, mask=others)
    sync.wait(peers, 0, peer, GROUP, mask=others)
    sync.leave(control_ptr)


class DeviceBarrier:
    """A kernel that ends on every rank after it has begun on all of them."""

    def __init__(self, fabric: Fabric, timeout_s: float) -> None:
        self.pool = Pool(fabric, slot_bytes=0, ll_bytes=0, lamport_bytes=0, timeout_s=timeout_s)
        self._kernel = Kernel(
            _barrier,
            grid=1,
            constants={"GROUP": Group(fabric.world_size, fabric.backend)},
            last_args=(self.pool.control, fabric.heap_bases, fabric.rank),
        )

    def __call__(self) -> None:
        self._kernel()
