"""PyTorch's fused ops of symmetric memory, which its micro-pipeline pass inserts, on taxfree.

With ``torch._inductor.config._micro_pipeline_tp`` torch.compile rewrites all-gather + matmul and
matmul + reduce-scatter in any dimension into ``symm_mem::fused_*``. On the enabled groups these
run the operations where the table has a variant for them, else PyTorch's own implementation, also
for several weights after one gather and for rows that are wanted themselves. A record may also say
that PyTorch's own is the fastest; then it runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import _symmetric_memory as own
from torch.library import Library

from taxfree._runtime.runtime import Runtime
from taxfree.models import report, rows
from taxfree_kernels.all_gather_matmul.signature import ALL_GATHER_MATMUL
from taxfree_kernels.matmul_reduce_scatter.signature import MATMUL_REDUCE_SCATTER

_runtimes: dict[str, Runtime] = {}


def enable(runtime: Runtime) -> None:
    """Run the fused ops of a runtime's group on it."""
    _runtimes[runtime.group_name] = runtime
    _register()
    ask_for: Any = getattr(own, "enable_symm_mem_for_group", None)
    if ask_for is not None:  # PyTorch's pass leaves other groups out, in silence
        with warnings.catch_warnings(action="ignore"):  # that it is deprecated
            ask_for(runtime.group_name)


@functools.cache
def _register() -> Library:
    """Take the place of PyTorch's implementations; they are called for all other groups."""
    library = Library("symm_mem", "IMPL")
    implementations = (
        ("fused_all_gather_matmul", _fused_all_gather_matmul, own._fused_all_gather_matmul,
         own._fused_all_gather_matmul_fallback),
        ("fused_matmul_reduce_scatter", _fused_matmul_reduce_scatter,
         own._fused_matmul_reduce_scatter, own._fused_matmul_reduce_scatter_fallback),
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore"):  # that they are overridden
        for name, ours, on_cuda, elsewhere in implementations:
            for key, theirs in (("CUDA", on_cuda), ("CPU", elsewhere)):
                library.impl(name, functools.partial(ours, theirs), key, allow_override=True)
    return library


def _fused_all_gather_matmul(
    library: Callable[..., Any],
    a_shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    runtime = _open_runtime(group_name)
    if runtime is not None:
        made, ran = _gathered(runtime, a_shard, weights, gather_dim, return_A)
        report.count("symm_mem::fused_all_gather_matmul", ran)
        if made is not None:
            return made
    found: tuple[torch.Tensor | None, list[torch.Tensor]] = library(
        a_shard, weights, gather_dim, group_name, return_A=return_A
    )
    return found


def _gathered(
    runtime: Runtime, x: torch.Tensor, weights: list[torch.Tensor], dim: int, returns_a: bool
) -> tuple[tuple[torch.Tensor | None, list[torch.Tensor]] | None, str]:
    """The gathered rows if wanted, and the products; None if the library must run. And what ran."""
    for weight in weights:
        reason = rows.unsupported_reason(x, weight)
        if reason is not None:
            return None, f"library: {reason}"
    what = rows.described(len(weights), returns_a)
    if len(weights) == 1 and not returns_a:
        given = x.flatten(0, -2), weights[0], None, _matrix_dim(x, dim), None
        if runtime._gives_way(ALL_GATHER_MATMUL, *given):
            return None, f"library: no record of ours for {what}"
        y = rows.all_gather_matmul(runtime, x, weights[0], None, dim)
        return (None, [y]), "all_gather_matmul"
    if dim % x.dim() == x.dim() - 1:
        return None, f"library: columns are gathered for {what}"
    made = rows.all_gather_matmuls(runtime, x, weights, dim, returns_a)
    ran = (
        f"library: no record of ours for {what}"
        if made is None
        else f"all_gather_matmul for {what}"
    )
    return made, ran


def _fused_matmul_reduce_scatter(
    library: Callable[..., Any],
    x: torch.Tensor,
    weight: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
) -> torch.Tensor:
    runtime = _open_runtime(group_name)
    if runtime is not None:
        reason = None if reduce_op == "sum" else f"reduces by {reduce_op}"
        reason = reason or rows.unsupported_reason(x, weight)
        if reason is None:
            given = x.flatten(0, -2), weight, _matrix_dim(x, scatter_dim)
            if runtime._gives_way(MATMUL_REDUCE_SCATTER, *given):
                reason = "no record of ours"
        ran = "matmul_reduce_scatter" if reason is None else f"library: {reason}"
        report.count("symm_mem::fused_matmul_reduce_scatter", ran)
        if reason is None:
            return rows.matmul_reduce_scatter(runtime, x, weight, scatter_dim)
    found: torch.Tensor = library(x, weight, reduce_op, scatter_dim, group_name)
    return found


def _matrix_dim(x: torch.Tensor, dim: int) -> int:
    """A dimension of rows or columns, of the matrix that the operations see."""
    return int(dim % x.dim() == x.dim() - 1)


def _open_runtime(group_name: str) -> Runtime | None:
    """The runtime of an enabled group; None once it is closed, and for the ops that it runs."""
    runtime = _runtimes.get(group_name)
    return None if runtime is None or runtime.is_closed or runtime._is_calling else runtime
