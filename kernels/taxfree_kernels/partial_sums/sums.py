"""What plans of the vendor's matmul and a sum of ours share."""

from __future__ import annotations

from abc import abstractmethod

import torch

from taxfree_kernels.variant import Plan, Step
from taxfree_kernels.vendor import matmul_into


class SumPlan(Plan):
    """The vendor's matmul for this rank's partial sum, then one kernel that sums all ranks'."""

    launches = 2
    _partial: torch.Tensor

    @abstractmethod
    def add_up(self, *addends_and_out: torch.Tensor | None) -> None:
        """Launch the sum; takes what the plan is called with after x and the weight."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        matmul_into(self._partial, x, weight, None)
        self.add_up(*rest)
        return rest[-1]

    def steps(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> list[Step]:
        return [
            Step("matmul", "producer", lambda: matmul_into(self._partial, x, weight, None)),
            Step("sum", "collective", lambda: self.add_up(*rest)),
        ]
