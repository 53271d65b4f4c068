"""The library: halos travel by the collective library's sends, beside the inner tiles."""

from __future__ import annotations

import torch
import torch.distributed as dist

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, is_compiling
from taxfree_kernels.stencil import step
from taxfree_kernels.stencil.launches import Launches, LaunchesPlan, add_squares
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import Config, Variant
from taxfree_kernels.vendor import all_reduce


class BaselinePlan(LaunchesPlan):
    """Sends and receives of all sides at once, on the library's own stream.

    Not on one of ours: where nothing is launched, a captured stream keeps all that it ever waited
    for. Each step had an edge from every earlier one, and 400 steps took 417 us each, not 105.
    """

    def __init__(self, problem: Stencil, fabric: Fabric, config: Config) -> None:
        self._group = fabric.group
        config = step.launched_configs(problem)[0]
        super().__init__(problem, fabric, config, pool=None)
        self._works: list[dist.Work] = []
        self._add_squares = Kernel(add_squares, problem.norms)
        exchanges = problem.world_size > 1
        self.launches = problem.steps * (1 + 2 * exchanges) + exchanges + 3 * (problem.norms > 0)

    def _exchange(self, calls: Launches, parity: int) -> torch.Tensor:
        self._works = []
        if calls.sides and not is_compiling():
            edges, group = calls.edges[parity], self._group
            sends = [
                dist.P2POp(op, buffer[side.points], group=group, group_peer=side.rank)
                for side in calls.sides
                for op, buffer in ((dist.isend, edges), (dist.irecv, calls.halo))
            ]
            self._works = dist.batch_isend_irecv(sends)
        return calls.halo

    def _join(self) -> None:
        for work in self._works:
            work.wait()

    def _finish(self, calls: Launches, out: torch.Tensor) -> None:
        if not self._problem.norms:
            return
        self._add_squares(calls.squares, calls.sums, calls.tiles)
        if not is_compiling():
            all_reduce(calls.sums, self._group)
            out[-self._problem.norms :] = calls.sums


class Baseline(Variant):
    """The library."""

    plan_class = BaselinePlan
    fused = False
    is_library = True


VARIANT = Baseline()
