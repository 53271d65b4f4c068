"""The vendor's matmul in parts, each scattered and summed by our kernel while the next is computed.

Removes most of the bulk-synchronous tax where a rank computes for as long as it sends: only the
last part's sum is not hidden. The parts are of the dimension that is not scattered, so that each
rank keeps some of every part. Costs two launches a part.

Protocol. That of ``one_shot`` for each part, and how :class:`SumsPlan` orders the parts.
"""

from __future__ import annotations

from typing import Any

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.hardware import Hardware
from taxfree_kernels.matmul_reduce_scatter.one_shot import OneShot, ScatterSum
from taxfree_kernels.partial_sums import spaces
from taxfree_kernels.partial_sums.sums import SumsPlan
from taxfree_kernels.variant import Config, Plan, Space


class Overlap(OneShot):
    """Vendor matmul in parts, our reduce-scatter of each beside the next."""

    name = "overlap"
    fused = True

    def refuses_problem(self, problem: Any, hardware: Hardware) -> str | None:
        if problem.unscattered < 32 or problem.shard_columns % 16:
            return "shards do not split into parts of aligned rows"
        return super().refuses_problem(problem, hardware)

    def space(self, problem: Any, hardware: Hardware) -> Space:
        counts = spaces.part_counts(hardware, problem.unscattered)
        return {**super().space(problem, hardware), "PARTS": counts}

    def first_configs(self, problem: Any, hardware: Hardware) -> list[dict[str, Any]]:
        counts = spaces.part_counts(hardware, problem.unscattered)
        sent = spaces.partial_bytes(problem) // problem.world_size // counts[0]
        space = super().space(problem, hardware)
        first = spaces.first_sends(space, sent, problem.shard_columns)
        return [{**config, "PARTS": count} for count in counts for config in first[:2]]

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        parts = spaces.parts_of(problem.unscattered, config["PARTS"])
        return SumsPlan(fabric, [ScatterSum(problem, fabric, config, part) for part in parts])


VARIANT = Overlap()
