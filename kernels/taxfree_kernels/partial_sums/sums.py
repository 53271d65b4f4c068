"""Plans of the vendor's matmul and our sums: whole, or in parts that overlap.

With several parts, each is a call of its own to the pool, with a generation of its own. All but the
last part's sum run on a side stream, each after its part of the matmul; the last runs on the
caller's stream, after the side stream has been joined. So the calls of the pool are ordered, and
each begins after all that the caller's stream had been given before. Matmuls wait for nobody:
however the device shares itself between the streams, the sum of a part needs the same part of peers
only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.variant import Plan, Step
from taxfree_kernels.vendor import matmul_into


class Sum(ABC):
    """Our sum of what all ranks have multiplied, or of a part of it; one call to the pool."""

    _partial: torch.Tensor

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Launch the vendor's matmul for this rank's partial sum, or the part of it."""
        matmul_into(self._partial, x, weight, None)

    @abstractmethod
    def add_up(self, *addends_and_out: torch.Tensor | None) -> None:
        """Launch the sum; takes what the plan is called with after x and the weight."""


class SumsPlan(Plan):
    """A matmul and a sum for each part, the sums but the last beside the next matmul."""

    def __init__(self, fabric: Fabric, sums: Sequence[Sum]) -> None:
        self.launches = 2 * len(sums)
        *self._first, self._last = sums
        if self._first:
            self._side = fabric.side_stream()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        for part in self._first:
            part.multiply(x, weight)
            with self._side.forked():
                part.add_up(*rest)
        self._last.multiply(x, weight)
        if self._first:
            self._side.join()
        self._last.add_up(*rest)
        return rest[-1]

    def steps(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> list[Step]:
        if self._first:  # nothing of it begins when something before it has ended
            return super().steps(x, weight, *rest)
        return [
            Step("matmul", "producer", lambda: self._last.multiply(x, weight)),
            Step("sum", "collective", lambda: self._last.add_up(*rest)),
        ]
