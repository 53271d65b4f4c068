"""The vendor's matmul and the collective library, which all library paths use.

When kernels are only compiled, these functions do nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from taxfree_kernels.errors import PlanError
from taxfree_kernels.launch import is_compiling

# torch 2.13 renamed these; earlier versions have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def matmul_into(
    out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """out [m, n] = a [m, k] @ weight [k, n] (+ bias [n]); returns it."""
    if is_compiling():
        return out
    if bias is None:
        return torch.mm(a, weight, out=out)
    return torch.addmm(bias, a, weight, out=out)


def all_gather(gathered: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather: all ranks' tensors, in rank order, into a contiguous one."""
    if not is_compiling():
        _all_gather(gathered, shard, group=group)


def all_gathers(
    gathered: list[torch.Tensor], shards: list[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Several all-gathers of bytes, as one."""
    if not is_compiling():
        with dist._coalescing_manager(group):  # as one launch, on the caller's stream
            for whole, shard in zip(gathered, shards, strict=True):
                _all_gather(whole.view(torch.uint8), shard.view(torch.uint8), group=group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce in place."""
    if not is_compiling():
        dist.all_reduce(tensor, group=group)


def reduce_scatter(shard: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce-scatter: this rank's shard of the sum of all ranks' contiguous tensors."""
    if not is_compiling():
        _reduce_scatter(shard, parts, group=group)


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_rows: list[int],
    sent_rows: list[int],
    group: dist.ProcessGroup,
) -> None:
    """Send each rank its rows of a contiguous tensor; the lists count rows by rank."""
    if not is_compiling():
        dist.all_to_all_single(received, sent, received_rows, sent_rows, group=group)


def gather_beside(gathered: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """:func:`all_gather` beside what follows; to be waited for."""
    return _all_gather(gathered, shard, group=group, async_op=True)


def reduce_beside(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """:func:`all_reduce` beside what follows; to be waited for."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def reduce_scatter_beside(
    shard: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup
) -> Any:
    """:func:`reduce_scatter` beside what follows; to be waited for."""
    return _reduce_scatter(shard, parts, group=group, async_op=True)


def symm_mem_op(name: str, group: dist.ProcessGroup, workspace_bytes: int = 0) -> Any:
    """PyTorch's own fused op ``torch.ops.symm_mem.<name>``, with its group registered; collective.

    Args:
        workspace_bytes: what its calls need of the group's workspace. A call that finds less makes
            a larger one, in the middle of whatever the caller does, and fails under capture.

    Raises:
        PlanError: this torch has no such op.
    """
    import torch.distributed._symmetric_memory as symm_mem  # registers the ops

    if not hasattr(torch.ops.symm_mem, name):
        raise PlanError(f"this torch has no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions enable every group
        symm_mem.enable_symm_mem_for_group(group.group_name)
    if workspace_bytes and torch.cuda.is_available():  # on CPUs the ops fall back, and need none
        symm_mem.get_symm_mem_workspace(group.group_name, workspace_bytes)
    return getattr(torch.ops.symm_mem, name)
