"""The vendor's matmul in parts, each scattered and summed by our kernel while the next is computed.

Removes most of the bulk-synchronous tax where a rank computes for as long as it sends: only the
last part's sum is not hidden. The parts are of the dimension that is not scattered, so that each
rank keeps some of every part. Costs two launches a part.

Protocol. Each part is a call of ``one_shot`` to the pool, with a generation of its own. All but the
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
from taxfree_kernels.matmul_reduce_scatter.one_shot import OneShot, ScatterSum
from taxfree_kernels.matmul_reduce_scatter.problem import MatmulReduceScatter
from taxfree_kernels.variant import Config, Plan, Space


class OverlapPlan(Plan):
    """A matmul and a sum per part, the sums but the last beside the next matmul."""

    def __init__(self, problem: MatmulReduceScatter, fabric: Fabric, config: Config) -> None:
        self.launches = 2 * config["PARTS"]
        self._side = fabric.side_stream()
        self._sums = [
            ScatterSum(problem, fabric, config, part)
            for part in spaces.parts_of(problem.unscattered, config["PARTS"])
        ]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        *first, last = self._sums
        for part in first:
            part.multiply(x, weight)
            with self._side.forked():
                part.add_up(out)
        last.multiply(x, weight)
        self._side.join()
        last.add_up(out)
        return out


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
        return OverlapPlan(problem, fabric, config)


VARIANT = Overlap()
