"""The library path: our attention to the rank's own keys, the collective library, our merge.

Pays all three taxes: four launches, an all-gather that starts when the slowest rank arrives and
ends before the merge begins, and partial results that go through memory between kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import spaces
from taxfree_kernels.flash_decode.local import (
    DecodePlan,
    RanksMerge,
    SplitsMerge,
    empty_parts,
)
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.variant import Config, Plan, Step, Variant

# torch 2.13 renamed it; earlier versions have only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BaselinePlan(DecodePlan):
    """Splits, their merge into one part, all-gather of the parts, their merge.

    A part holds outputs and log-sum-exps side by side, so that there is one collective. A single
    rank merges its splits into the output.
    """

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        super().__init__(problem, fabric, config)
        world, rows = problem.world_size, config["OUT_ROWS"]
        self._alone = world == 1
        self.launches = 2 if self._alone else 4
        self._merge_splits = SplitsMerge(
            problem, fabric, self.attention, rows, into_output=self._alone
        )
        if not self._alone:
            self._group = fabric.group
            self._own, self._gathered = (empty_parts(problem, fabric, n) for n in (1, world))
            self._merge_ranks = RanksMerge(problem, fabric, rows)

    def finish(self, out: torch.Tensor) -> None:
        if self._alone:
            self._merge_splits.launch(out)
            return
        self._merge_splits.launch(self._own)
        self._gather(self._gathered, self._own)
        self._merge_ranks.launch(self._gathered, out)

    def steps(self, *tensors: torch.Tensor | None) -> list[Step]:
        if self._alone:
            return super().steps(*tensors)
        *inputs, out = tensors
        assert out is not None
        own, gathered = self._own, self._gathered
        one_of_each = gathered[: len(gathered) // len(own)]
        return [
            Step("attention", "producer", lambda: self.attention.launch(inputs)),
            Step("merge of splits", "producer", lambda: self._merge_splits.launch(own)),
            Step(
                "all-gather",
                "collective",
                lambda: self._gather(gathered, own),
                least=lambda: self._gather(one_of_each, own[:1]),
            ),
            Step(
                "merge of ranks",
                "consumer",
                lambda: self._merge_ranks.launch(gathered, out),
                reads=gathered,
                memory_bytes=gathered.nbytes,
            ),
        ]

    def _gather(self, gathered: torch.Tensor, own: torch.Tensor) -> None:
        _all_gather(gathered, own, group=self._group)


class Baseline(Variant):
    """The library, as good as an expert would call it, with our default splits."""

    name = "baseline"
    fused = False

    def plan(self, problem: Any, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric, spaces.first_configs(problem, fabric.hardware)[0])


VARIANT = Baseline()
