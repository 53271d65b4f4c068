"""The vendor's matmul in parts, each summed by our two-shot kernel while the next is computed.

Removes most of the bulk-synchronous tax where a rank computes for as long as it sends: only the
last part's sum is not hidden. The parts are columns of the output, so that the weight is read once.
Costs two launches a part.

Protocol. That of ``two_shot`` for each part, and how :class:`SumsPlan` orders the parts.
"""

from __future__ import annotations

from typing import Any

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_all_reduce.two_shot import TwoShot, TwoShotSum
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.sums import SumsPlan
from taxfree_kernels.variant import Config, Plan, Space


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
        parts = spaces.parts_of(problem.n, config["PARTS"])
        return SumsPlan(fabric, [TwoShotSum(problem, fabric, config, part) for part in parts])


VARIANT = Overlap()
