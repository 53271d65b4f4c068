"""The vendor's matmul in parts, each summed by our two-shot kernel while the next is computed.

Removes most of the bulk-synchronous tax where a rank computes for as long as it sends: only the
last part's sum is not hidden. The parts are columns of the output, so that the weight is read once.
Costs two launches a part.

Protocol. Each part is a call of ``two_shot`` to the pool, with a generation of its own. All but the
last run on a side stream, each after its part of the matmul; the last runs on the caller's stream,
after the side stream has been joined. So the calls of the pool are ordered, and each begins after
all that the caller's stream had been given before. Matmuls wait for nobody: however the device
shares itself between the streams, the sum of a part needs the same part of peers only.
"""

from __future__ import annotations

from typing import Any

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce import spaces
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.matmul_all_reduce.two_shot import TwoShot, TwoShotSum
from taxfree_kernels.variant import Config, Plan, Space


class OverlapPlan(Plan):
    """A matmul and a sum per part, the sums but the last beside the next matmul."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric, config: Config) -> None:
        self.launches = 2 * config["PARTS"]
        self._side = fabric.side_stream()
        self._sums = [
            TwoShotSum(problem, fabric, config, columns)
            for columns in spaces.parts_of(problem.n, config["PARTS"])
        ]

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        *first, last = self._sums
        for part in first:
            part.multiply(x, weight)
            with self._side.forked():
                part.add_up(bias, residual, out)
        last.multiply(x, weight)
        self._side.join()
        last.add_up(bias, residual, out)
        return out


class Overlap(TwoShot):
    """Vendor matmul in parts, our two-shot sum of each beside the next."""

    name = "overlap"
    fused = True

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.n < 32 or problem.n % 16:
            return "columns do not split into parts of aligned rows"
        return super().refuses_problem(problem, hardware)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        return {
            **super().space(problem, hardware),
            "PARTS": spaces.part_counts(hardware, problem.n),
        }

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        counts = spaces.part_counts(hardware, problem.n)
        sent = spaces.partial_bytes(problem) // problem.world_size // counts[0]
        first = spaces.first_sends(super().space(problem, hardware), sent, problem.n)
        return [{**config, "PARTS": count} for count in counts for config in first[:2]]

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
