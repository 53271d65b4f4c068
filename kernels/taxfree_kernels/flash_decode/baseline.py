"""The library path: our attention to this rank's keys, the collective library, our merge.

Pays all three taxes: four launches, an all-gather that starts when the slowest rank arrives and
ends before the merge begins, and partial results that go through memory between kernels.
"""

from __future__ import annotations

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.flash_decode import spaces
from taxfree_kernels.flash_decode.plans import DecodePlan, RanksMerge, SplitsMerge, size_of
from taxfree_kernels.flash_decode.problem import FlashDecode
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import Config, Plan, Step, Variant, resized
from taxfree_kernels.vendor import all_gather


class BaselinePlan(DecodePlan):
    """Splits, their merge into one part, all-gather of the parts, their merge.

    A part holds outputs and log-sum-exps side by side, so that there is one collective. A single
    rank merges its splits into the output.
    """

    def __init__(self, problem: FlashDecode, fabric: Fabric, config: Config) -> None:
        world, rows, part = problem.world_size, config["OUT_ROWS"], problem.part_elements
        self._alone = world == 1
        super().__init__(problem, fabric, config, () if self._alone else (part, world * part))
        self.launches = 2 if self._alone else 4
        self._merge_splits = SplitsMerge(
            problem, fabric, self.attention, rows, finishes=config if self._alone else None
        )
        if not self._alone:
            self._group = fabric.group
            self._merge_ranks = RanksMerge(problem, fabric, rows)

    def finishing(self, problem: FlashDecode) -> tuple[Kernel, ...]:
        splits = self._merge_splits.kernel(problem.batch)
        return (splits,) if self._alone else (splits, self._merge_ranks.kernel(problem.batch))

    def finish(self, out: torch.Tensor, *kernels: Kernel) -> None:
        if self._alone:
            self._merge_splits.launch(kernels[0], out, len(out))
            return
        splits, ranks = kernels
        own_part, gathered = self._parts(len(out))
        self._merge_splits.launch(splits, own_part, len(out))
        all_gather(gathered, own_part, self._group)
        self._merge_ranks.launch(ranks, gathered, out)

    def _parts(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch memory for this rank's part, and for all ranks' parts."""
        elements = resized(self._problem, batch=batch).part_elements
        _, _, own_part, gathered = self.attention.scratch()
        return own_part[:elements], gathered[: self._problem.world_size * elements]

    def steps(self, *tensors: torch.Tensor | None) -> list[Step]:
        if self._alone:
            return super().steps(*tensors)
        *inputs, out = tensors
        assert out is not None
        attend, splits, ranks = self._sized[size_of(inputs)]
        own_part, gathered = self._parts(len(out))
        one_of_each = gathered[: self._problem.world_size]
        return [
            Step("attention", "producer", lambda: self.attention.launch(attend, inputs)),
            Step(
                "merge of splits",
                "producer",
                lambda: self._merge_splits.launch(splits, own_part, len(out)),
            ),
            Step(
                "all-gather",
                "collective",
                lambda: all_gather(gathered, own_part, self._group),
                latency_probe=lambda: all_gather(one_of_each, own_part[:1], self._group),
            ),
            Step(
                "merge of ranks",
                "consumer",
                lambda: self._merge_ranks.launch(ranks, gathered, out),
                reads=gathered,
                memory_bytes=gathered.nbytes,
            ),
        ]


class Baseline(Variant):
    """The library, called as an expert would, with our default splits."""

    fused = False
    is_library = True

    def plan(self, problem: FlashDecode, fabric: Fabric, config: Config) -> Plan:
        return BaselinePlan(problem, fabric, spaces.seed_configs(problem, fabric.hardware)[0])


VARIANT = Baseline()
