"""One gather for several weights: the variants that can serve it, and their plans.

Only of equal shards of rows. A record serves it that is of one matmul with the columns of all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.variant import Plan, Variant, variants
from taxfree_kernels.vendor import multiply_into

Biases = Sequence[torch.Tensor | None]


class SeveralWeights(Variant):
    """A variant whose plans serve several weights: each is a :class:`SeveralWeightsPlan`."""

    #: whether PyTorch's own op, where a caller has that at hand, is as good or better: this is that
    #: op, or runs for want of a record.
    gives_way: ClassVar[bool] = False

    def serves_several_weights(self, problem: Any) -> bool:
        return bool(problem.gather_dim == 0 and not problem.is_fp8)


class SeveralWeightsPlan(Plan):
    """A plan that can serve more weights than the problem's."""

    @abstractmethod
    def run_several(
        self, a: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, returns_a: bool
    ) -> list[torch.Tensor]:
        """all_gather(a) @ weight (+ bias), [m, n] for each weight; then A [m, k] if it is wanted.

        Args:
            a: [m / world_size, k], contiguous; m is at most the problem's.
            weights: [k, n] each.
            biases: [n] or None for each.
        """


class GatheringPlan(SeveralWeightsPlan):
    """A plan that gathers A, then multiplies."""

    _problem: AllGatherMatmul

    @abstractmethod
    def gathered(self, a: torch.Tensor, m: int, *scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A [m, k], in memory that all plans share; in fp8 also its scales.

        Args:
            scale: of this rank's shard, or of all of A, in fp8.
        """

    def kept(self, a: torch.Tensor, m: int) -> torch.Tensor:
        """A [m, k], in memory of its own."""
        return self.gathered(a, m)[0].clone()

    def run(self, *tensors: Any) -> torch.Tensor:
        a, weight, bias, *scales, out = tensors
        whole, *scale = self.gathered(a, out.shape[0], *scales[:1])
        is_fast = self._problem.fast_accumulation
        return multiply_into(out, whole, weight, bias, *scale, *scales[1:], is_fast=is_fast)

    def run_several(
        self, a: torch.Tensor, weights: Sequence[torch.Tensor], biases: Biases, returns_a: bool
    ) -> list[torch.Tensor]:
        m = a.shape[0] * self._problem.world_size
        whole = self.kept(a, m) if returns_a else self.gathered(a, m)[0]
        outs = [
            multiply_into(a.new_empty(m, weight.shape[1]), whole, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return [*outs, whole] if returns_a else outs


def several_weights() -> dict[str, SeveralWeights]:
    """The variants that can serve several weights, by name."""
    known = variants("all_gather_matmul").items()
    return {name: variant for name, variant in known if isinstance(variant, SeveralWeights)}
