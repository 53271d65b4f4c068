"""Copy engines carry halos to peers beside the inner tiles; the kernel of the sides waits.

Protocol. That of :mod:`taxfree_kernels.copies`, but for several messages: each step takes a
generation, which the kernel of the sides leaves. All ranks have entered the call before the first
copy. Halos lie in the first slot, in two parts that steps take in turns. A neighbour copies into a
part again after its kernel of the next step, which has waited for this rank's copies behind the
kernel that has read the part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.copies import PeerCopies
from taxfree_kernels.device import sync
from taxfree_kernels.device.peers import Group, Peers
from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.stencil import step
from taxfree_kernels.stencil.launches import Launches, LaunchesPlan
from taxfree_kernels.stencil.norms import finish
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Config


@triton.jit(do_not_specialize=["rank", "tiles", "elements", "norms"])
def _finish_norms(
    squares_ptr, out_ptr, tiles, elements, norms,  # of a call
    sums_ptr, control_ptr, heap_bases, rank,  # of the fabric
    GROUP: tl.constexpr,
):  # fmt: skip
    peers = Peers(control_ptr, heap_bases, rank, sync.running_generation(control_ptr))
    finish(squares_ptr, sums_ptr, out_ptr + elements, tiles, norms, peers, GROUP, True)


class CopiesPlan(LaunchesPlan):
    """Two launches for each step, a copy and a signal for each side."""

    def __init__(self, problem: Stencil, fabric: Fabric, config: Config) -> None:
        pool = fabric.pool.control, fabric.heap_bases
        super().__init__(problem, fabric, config, pool)
        points = 2 * sum(problem.halo)  # even, so that float64 may follow
        sums = problem.norms * problem.world_size
        inbox, _ = fabric.pool.slots(2 * points + 2 * sums, torch.float32)
        self._halos = inbox[: 2 * points].view(2, points)
        self._copies = PeerCopies(fabric, 1)
        self._finish_norms = Kernel(
            _finish_norms,
            1,
            {"GROUP": Group(problem.world_size, fabric.backend)},
            compile_options(fabric.backend, {"num_warps": 4}),
            (inbox[2 * points :].view(torch.float64), *pool, fabric.rank),
        )
        self.launches = 4 + 4 * problem.steps + (problem.norms > 0)

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        norms = (self._finish_norms,) if self._problem.norms else ()
        return (*super().kernels(size), *self._copies.kernels, *norms)

    def _begin(self) -> None:
        self._copies.begin()

    def _exchange(self, calls: Launches, parity: int) -> torch.Tensor:
        self._copies.follow()
        halo = self._halos[parity]
        for side in calls.sides:
            target = self._fabric.peer_view(halo, side.rank)[side.opposite]
            self._copies.send([target], [calls.edges[parity][side.points]], side.rank)
        return halo

    def _join(self) -> None:
        self._copies.join()

    def _finish(self, calls: Launches, out: torch.Tensor) -> None:
        if norms := self._problem.norms:
            self._finish_norms(calls.squares, out, calls.tiles, out.numel() - norms, norms)
        self._copies.finish(out)


class Copies(step.Tiled):
    """Copy engines beside a kernel for each step."""

    plan_class = CopiesPlan
    slots = 2

    def unsupported_reason(self, problem: Stencil, hardware: Hardware) -> str | None:
        return "one rank has no peers" if problem.world_size == 1 else None


VARIANT = Copies()
