"""The vendor's matmul for a partial sum, then our kernel that sums flat tensors in chunks.

The size of a flat tensor and the bounds of chunks are multiples of 16 elements, so that accesses
can be 16 bytes wide for all dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import triton
import triton.language as tl

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel
from taxfree_kernels.variant import PartialSum, Plan, Step, resized
from taxfree_kernels.vendor import multiply_into, try_fp8


@triton.jit
def bounds_of_chunk(chunk, begin, end, CHUNKS: tl.constexpr):
    """Begin and end of one of CHUNKS parts of [begin, end), in units of 16 elements."""
    per_chunk = tl.cdiv(end - begin, CHUNKS)
    chunk_begin = min(begin + chunk * per_chunk, end)
    return chunk_begin, min(chunk_begin + per_chunk, end)


class SumPlan(Plan):
    """The vendor's matmul for this rank's partial sum, then one kernel that sums all ranks'.

    Args:
        elements: number of elements of the largest partial sum, as the kernel reads it.
    """

    launches = 2
    _kernel: Kernel

    def __init__(self, problem: PartialSum, fabric: Fabric, elements: int) -> None:
        self._problem = problem
        try_fp8(problem, fabric.device)
        self._partials = fabric.workspace.scratch(((elements,), getattr(torch, problem.dtype)))
        self._sized = fabric.workspace.by_size(self._of_size)

    @abstractmethod
    def _launch(self, problem: PartialSum) -> tuple[int, tuple[Any, ...]]:
        """The grid of the kernel, and its last arguments."""

    def _of_size(self, m: int) -> tuple[torch.Tensor, torch.Tensor, Kernel]:
        """The partial sum in the kernel's layout and as a matrix; the kernel."""
        problem, (flat,) = resized(self._problem, m=m), self._partials()
        matrix = flat[: problem.elements].view(m, problem.n)
        return flat, matrix, self._kernel.resized(*self._launch(problem))

    def kernels(self, size: int) -> tuple[Kernel, ...]:
        return (self._sized[size][2],)

    def add_up(self, partial: torch.Tensor, kernel: Kernel, *rest: torch.Tensor | None) -> None:
        """Launch the sum; takes the plan's arguments but for x, the weight and their scales."""
        kernel(partial, *rest)

    def run(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        flat, matrix, kernel = self._sized[x.shape[0]]
        rest, scales = self._scales_apart(rest)
        multiply_into(matrix, x, weight, None, *scales, is_fast=self._problem.fast_accumulation)
        self.add_up(flat, kernel, *rest)
        return rest[-1]

    def _scales_apart(
        self, rest: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        if not self._problem.is_fp8:
            return rest, ()
        *others, x_scale, weight_scale, out = rest
        return (*others, out), (x_scale, weight_scale)

    def steps(self, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> list[Step]:
        flat, matrix, kernel = self._sized[x.shape[0]]
        rest, scales = self._scales_apart(rest)
        kind = {"is_fast": self._problem.fast_accumulation}
        return [
            Step(
                "matmul",
                "producer",
                lambda: multiply_into(matrix, x, weight, None, *scales, **kind),
            ),
            Step("sum", "collective", lambda: self.add_up(flat, kernel, *rest)),
        ]
