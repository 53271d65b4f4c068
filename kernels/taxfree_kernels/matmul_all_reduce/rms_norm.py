"""The last kernel of library paths: adds the residual and normalises the sum, row by row.

Engines run such a kernel after their collectives: the residual costs no launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from taxfree_kernels.fabric.base import Fabric
from taxfree_kernels.launch import Kernel, compile_options
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.reduction.fused import store_normalised
from taxfree_kernels.spaces import power_of_2

_MOST_THREADS = 1024
_A_THREAD = 32  # elements of a row


@triton.jit(do_not_specialize=["count"])
def _add_and_normalise(
    total_ptr, residual_ptr, norm_weight_ptr, eps_ptr, out_ptr, count, n,
    HAS_RESIDUAL: tl.constexpr, BLOCK_ROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_ROW)
    mask = column < n
    at = row.to(tl.int64) * n + column
    total = tl.load(total_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    norm_weight = tl.load(norm_weight_ptr + column, mask=mask, other=0.0)
    store_normalised(total, at, mask, norm_weight, eps_ptr, out_ptr, count, n)


class RMSNorm:
    """out[2, m, n] from a sum [m, n], which may be out[1]."""

    def __init__(self, problem: MatmulAllReduce, fabric: Fabric) -> None:
        block, warp_size = power_of_2(problem.n, 1), fabric.hardware.warp_size
        threads = min(_MOST_THREADS, max(warp_size, block // _A_THREAD))
        self._n = problem.n
        self._kernel = Kernel(
            _add_and_normalise,
            grid=0,
            constants={"HAS_RESIDUAL": problem.residual, "BLOCK_ROW": block},
            options=compile_options(fabric.backend, {"num_warps": threads // warp_size}),
        )
        self._sized = fabric.workspace.by_size(self.kernel)

    def kernel(self, m: int) -> Kernel:
        """The kernel for m rows."""
        return self._kernel.resized(m, (m * self._n, self._n))

    def __call__(
        self,
        total: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        eps: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        given = total if residual is None else residual
        self._sized[len(total)](total, given, norm_weight, eps, out)
        return out
